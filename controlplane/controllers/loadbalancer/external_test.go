package loadbalancer

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// External addresses that no node has are told, each change once, and so is
// their end.
func TestExternalAddressesThatNoNodeHas(t *testing.T) {
	w := fixture.New(t)
	external := func(name string, ips ...string) {
		w.Create(service(name, func(s *corev1.Service) {
			s.Spec.Type, s.Spec.AllocateLoadBalancerNodePorts, s.Spec.ExternalIPs = corev1.ServiceTypeClusterIP, nil, ips
		}))
	}
	c := New(w.Env())
	external("early", "192.0.2.9")
	w.Settle(c)
	told := func(want ...string) {
		t.Helper()
		var got []string
		for _, reason := range []string{reasonNotServed, reasonServed} {
			for _, e := range w.Events.With(reason) {
				if reason == reasonNotServed && (e.Type != corev1.EventTypeWarning || !strings.Contains(e.Message, "LoadBalancer")) {
					t.Errorf("%+v", e)
				}
				ips, _, _ := strings.Cut(strings.TrimPrefix(e.Message, "no node has "), ", so ")
				got = append(got, e.About.Name+" "+map[bool]string{true: ips, false: "served"}[reason == reasonNotServed])
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("told %q, want %q", got, want)
		}
	}
	told() // no node yet: nothing is known
	addNode(w, "a", "192.0.2.1")
	external("good", "192.0.2.1")
	external("half", "192.0.2.1", "192.0.2.7", "192.0.2.8")
	w.Settle(c)
	told("early 192.0.2.9", "half 192.0.2.7, 192.0.2.8")
	fixture.Change(w, fixture.Node, "", "a", registry.Main, func(n *corev1.Node) { n.Labels["x"] = "y" })
	w.Settle(c)
	told("early 192.0.2.9", "half 192.0.2.7, 192.0.2.8")
	addNode(w, "b", "192.0.2.9")
	fixture.Change(w, fixture.Service, "default", "half", registry.Main, func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"192.0.2.7"} })
	w.Settle(c)
	told("early 192.0.2.9", "half 192.0.2.7, 192.0.2.8", "half 192.0.2.7", "early served")
	fixture.Change(w, fixture.Service, "default", "half", registry.Main, func(s *corev1.Service) { s.Spec.ExternalIPs = nil })
	w.Delete(fixture.Service, "default", "early", "")
	w.Settle(c)
	before := w.Machine.Snapshot().ResourceVersion()
	w.Settle(c)
	if w.Machine.Snapshot().ResourceVersion() != before {
		t.Fatal("idle writes")
	}
}
