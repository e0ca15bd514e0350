package manifests

import "k8s.io/apimachinery/pkg/runtime"

// Default fills in upstream's defaults for a served kind, implemented by us
// or not. It is idempotent. Types that are not served are left alone.
func Default(obj runtime.Object) {}
