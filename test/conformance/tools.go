//go:build tools

// Package conformance pins the Kubernetes end-to-end suite, which run.sh
// builds and runs against a real server, and agnhost, the program that most
// of its pods run.
package conformance

import (
	_ "k8s.io/kubernetes/test/e2e"
	_ "k8s.io/kubernetes/test/images/agnhost"
)
