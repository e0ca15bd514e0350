package volumes

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Facts are what a pod may ask about itself and its node beyond its object.
type Facts struct {
	NodeName string
	HostIPs  []string
	PodIPs   []string
	// Allocatable stands in for limits that are not set.
	Allocatable corev1.ResourceList
	// UID and GID are what the pod's guests run as where the pod does not
	// say; negative leaves files with the agent's own.
	UID, GID int
}

// Field reads one fieldRef path of the pod, as upstream's downward API.
func Field(pod *corev1.Pod, path string, f Facts) (string, error) {
	if base, key, ok := subscript(path); ok {
		switch base {
		case "metadata.annotations":
			return pod.Annotations[key], nil
		case "metadata.labels":
			return pod.Labels[key], nil
		}
		return "", fmt.Errorf("field path %q does not take a subscript", path)
	}
	switch path {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "metadata.uid":
		return string(pod.UID), nil
	case "metadata.labels":
		return formatMap(pod.Labels), nil
	case "metadata.annotations":
		return formatMap(pod.Annotations), nil
	case "spec.nodeName":
		return f.NodeName, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.hostIP":
		return first(f.HostIPs), nil
	case "status.hostIPs":
		return strings.Join(f.HostIPs, ","), nil
	case "status.podIP":
		return first(f.PodIPs), nil
	case "status.podIPs":
		return strings.Join(f.PodIPs, ","), nil
	}
	return "", fmt.Errorf("field path %q is not supported", path)
}

func subscript(path string) (base, key string, ok bool) {
	base, rest, ok := strings.Cut(path, "['")
	key, end := strings.CutSuffix(rest, "']")
	return base, key, ok && end
}

func first(s []string) string {
	if len(s) == 0 {
		return ""
	}
	return s[0]
}

// formatMap writes key="escaped value" lines in key order.
func formatMap(m map[string]string) string {
	lines := make([]string, 0, len(m))
	for _, k := range slices.Sorted(maps.Keys(m)) {
		lines = append(lines, k+"="+strconv.Quote(m[k]))
	}
	return strings.Join(lines, "\n")
}

// Resource reads one resourceFieldRef; container is the name to use where
// the reference names none (environment variables).
func Resource(pod *corev1.Pod, container string, r *corev1.ResourceFieldSelector, f Facts) (string, error) {
	if r.ContainerName != "" {
		container = r.ContainerName
	}
	c := find(pod, container)
	if c == nil {
		return "", fmt.Errorf("container %q of the resource field reference does not exist", container)
	}
	kind, name, ok := strings.Cut(r.Resource, ".")
	if !ok || kind != "limits" && kind != "requests" {
		return "", fmt.Errorf("resource %q is not supported (limits.* or requests.*)", r.Resource)
	}
	list := c.Resources.Requests
	if kind == "limits" {
		list = c.Resources.Limits
	}
	q, ok := list[corev1.ResourceName(name)]
	if !ok && kind == "limits" {
		q = f.Allocatable[corev1.ResourceName(name)]
	}
	divisor := r.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	if name == string(corev1.ResourceCPU) {
		return ceilDiv(q.MilliValue(), divisor.MilliValue())
	}
	return ceilDiv(q.Value(), divisor.Value())
}

func ceilDiv(a, b int64) (string, error) {
	if b <= 0 {
		return "", fmt.Errorf("divisor must be positive")
	}
	return strconv.FormatInt(int64(math.Ceil(float64(a)/float64(b))), 10), nil
}

func find(pod *corev1.Pod, name string) *corev1.Container {
	for _, list := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}
