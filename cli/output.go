package cli

import (
	"io"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
)

// indented writes whole lines two spaces to the right.
type indented struct{ w io.Writer }

func (i indented) Write(p []byte) (int, error) {
	if _, err := i.w.Write(append([]byte("  "), p...)); err != nil {
		return 0, err
	}
	return len(p), nil
}

// addRequests adds what the pod requests to the sum.
func addRequests(sum corev1.ResourceList, p *corev1.Pod) {
	for k, q := range manifests.PodRequests(p) {
		s := sum[k]
		s.Add(q)
		sum[k] = s
	}
}
