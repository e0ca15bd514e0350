package endpoints

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// Pods listen on all of their addresses, modules as containers.
func TestEndpointsAreWhereSomebodyListens(t *testing.T) {
	class := "wasm"
	svc := &corev1.Service{}
	pod := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.42.0.2", PodIPs: []corev1.PodIP{{IP: "10.42.0.2"}, {IP: "fd42::2"}}}}
	for _, c := range []*string{nil, &class} {
		for family, want := range map[discoveryv1.AddressType]string{discoveryv1.AddressTypeIPv4: "10.42.0.2", discoveryv1.AddressTypeIPv6: "fd42::2"} {
			pod.Spec.RuntimeClassName = c
			if e, ok := podEndpoint(svc, pod, family, ""); !ok || e.endpoint.Addresses[0] != want {
				t.Errorf("wasm %v: %s is %v at %v", c != nil, family, ok, e.endpoint.Addresses)
			}
		}
	}
}
