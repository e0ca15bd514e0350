package node

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestSELinuxLabels: refused where they would have an effect.
func TestSELinuxLabels(t *testing.T) {
	label := &corev1.SELinuxOptions{Level: "s0:c1,c2"}
	for name, pod := range map[string]*corev1.Pod{
		"pod": wasmPod("a", func(p *corev1.Pod) { p.Spec.SecurityContext = &corev1.PodSecurityContext{SELinuxOptions: label} }),
		"container": wasmPod("a", func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{SELinuxOptions: label}
		}),
	} {
		if err := seLinux(pod, &pod.Spec.Containers[0], true); err == nil {
			t.Errorf("%s: taken by a node with SELinux", name)
		}
		if err := seLinux(pod, &pod.Spec.Containers[0], false); err != nil {
			t.Errorf("%s: a node without SELinux: %v", name, err)
		}
	}
	if plain := wasmPod("a"); seLinux(plain, &plain.Spec.Containers[0], true) != nil {
		t.Error("a pod without labels is refused")
	}
}

// A pod's own names are in its hosts file: the short one, and with a subdomain
// the whole one before it (as the kubelet writes them).
func TestHostsFile(t *testing.T) {
	pod := wasmPod("a", func(p *corev1.Pod) { p.Spec.Hostname = "one" })
	if got := string(hostsFile(pod, []string{"10.0.0.7"}, "cluster.local")); !strings.HasSuffix(got, "\n10.0.0.7\tone\n") {
		t.Errorf("%q", got)
	}
	pod.Spec.Subdomain = "sub"
	if got := string(hostsFile(pod, []string{"10.0.0.7", "fd00::7"}, "example")); !strings.HasSuffix(got, "\n10.0.0.7\tone.sub.default.svc.example\tone\nfd00::7\tone.sub.default.svc.example\tone\n") {
		t.Errorf("%q", got)
	}
}
