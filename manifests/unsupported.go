package manifests

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Unsupported names the set fields that Dunlin does not implement: one
// warning each where ignoring the field is safe, and an error where it is
// not. obj is defaulted; a default value never warns.
func Unsupported(obj runtime.Object) (warnings []string, refused field.ErrorList) { return nil, nil }
