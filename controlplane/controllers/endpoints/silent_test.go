package endpoints

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// A Wasm pod listens on its first address only; containers on all.
func TestEndpointsAreWhereSomebodyListens(t *testing.T) {
	class := "wasm"
	svc := &corev1.Service{}
	pod := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.42.0.2", PodIPs: []corev1.PodIP{{IP: "10.42.0.2"}, {IP: "fd42::2"}}}}
	for _, c := range []struct {
		class  *string
		first  string
		family discoveryv1.AddressType
		want   bool
	}{
		{nil, "10.42.0.2", discoveryv1.AddressTypeIPv6, true},
		{&class, "10.42.0.2", discoveryv1.AddressTypeIPv4, true},
		{&class, "10.42.0.2", discoveryv1.AddressTypeIPv6, false},
		{&class, "fd42::2", discoveryv1.AddressTypeIPv6, true},
		{&class, "fd42::2", discoveryv1.AddressTypeIPv4, false},
	} {
		pod.Spec.RuntimeClassName, pod.Status.PodIP = c.class, c.first
		if _, ok := podEndpoint(svc, pod, c.family, ""); ok != c.want {
			t.Errorf("wasm %v, first %s: %s is %v", c.class != nil, c.first, c.family, ok)
		}
	}
}
