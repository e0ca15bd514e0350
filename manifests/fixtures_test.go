package manifests

import "k8s.io/apimachinery/pkg/util/intstr"

func intstrInt(n int) intstr.IntOrString { return intstr.FromInt32(int32(n)) }
