package plugins

import (
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
)

// requestsOf and limitsOf choose which side of resources is added up.
func requestsOf(r *corev1.ResourceRequirements) corev1.ResourceList { return r.Requests }
func limitsOf(r *corev1.ResourceRequirements) corev1.ResourceList   { return r.Limits }

// podTotal adds up one side of a pod's resources by the rule of KEP-753:
// containers and sidecars together, or the largest moment of the init
// sequence if that is more; pod-level resources stand in for both. Overhead
// is not in it.
func podTotal(pod *corev1.Pod, side func(*corev1.ResourceRequirements) corev1.ResourceList) corev1.ResourceList {
	// The rule is the same for both sides, so limits are added up as if they
	// were requests.
	view := &corev1.Pod{Spec: corev1.PodSpec{}}
	only := func(in []corev1.Container) []corev1.Container {
		out := make([]corev1.Container, len(in))
		for i := range in {
			out[i].RestartPolicy = in[i].RestartPolicy
			out[i].Resources.Requests = side(&in[i].Resources)
		}
		return out
	}
	view.Spec.Containers, view.Spec.InitContainers = only(pod.Spec.Containers), only(pod.Spec.InitContainers)
	if pod.Spec.Resources != nil {
		view.Spec.Resources = &corev1.ResourceRequirements{Requests: side(pod.Spec.Resources)}
	}
	return manifests.PodRequests(view)
}

// isExtended says whether a resource is one of a vendor's ("example.com/x").
func isExtended(name corev1.ResourceName) bool {
	domain, _, ok := strings.Cut(string(name), "/")
	return ok && domain != "kubernetes.io" && !strings.HasSuffix(domain, ".kubernetes.io")
}
