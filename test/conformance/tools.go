//go:build tools

// Package conformance pins the Kubernetes end-to-end suite, which run.sh
// builds and runs against a real server.
package conformance

import _ "k8s.io/kubernetes/test/e2e"
