package endpointslicemirroring

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/endpoints"
	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func service(name string, set ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}}
	for _, f := range set {
		f(s)
	}
	return s
}

func subset(port int32, ips ...string) corev1.EndpointSubset {
	s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "http", Port: port}}}
	for _, ip := range ips {
		s.Addresses = append(s.Addresses, corev1.EndpointAddress{IP: ip})
	}
	return s
}

func handMade(name string, subsets ...corev1.EndpointSubset) *corev1.Endpoints {
	return &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Subsets: subsets}
}

// show is every slice as "family port: address(ready) ...".
func show(w *fixture.World) string {
	var out []string
	for _, s := range fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default") {
		line := fmt.Sprintf("%s %d:", s.AddressType, *s.Ports[0].Port)
		for _, e := range s.Endpoints {
			line += fmt.Sprintf(" %s(%v)", e.Addresses[0], *e.Conditions.Ready)
		}
		out = append(out, line)
	}
	return strings.Join(out, "; ")
}

func expect(t *testing.T, w *fixture.World, what, want string) {
	t.Helper()
	if got := show(w); got != want {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func TestFollowsEndpoints(t *testing.T) {
	w := fixture.New(t)
	c := New(w.Env())
	w.Create(service("svc"))
	e := handMade("svc", subset(80, "10.1.2.3"))
	e.Labels = map[string]string{"team": "x"}
	e.Annotations = map[string]string{"note": "y", corev1.LastAppliedConfigAnnotation: "{}", corev1.EndpointsLastChangeTriggerTime: "2026-01-01T00:00:00Z"}
	host := "node-1"
	e.Subsets[0].Addresses[0].NodeName, e.Subsets[0].Addresses[0].Hostname = &host, "first"
	w.Create(e)
	w.Settle(c)
	expect(t, w, "created", "IPv4 80: 10.1.2.3(true)")
	s := fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default")[0]
	if s.Labels["team"] != "x" || s.Labels[discoveryv1.LabelServiceName] != "svc" || s.Labels[discoveryv1.LabelManagedBy] != managedBy ||
		len(s.Annotations) != 1 || s.Annotations["note"] != "y" || *s.Endpoints[0].NodeName != host || *s.Endpoints[0].Hostname != "first" ||
		*s.Ports[0].Protocol != corev1.ProtocolTCP || *s.Ports[0].Name != "http" {
		t.Errorf("slice %+v", s)
	}
	if o := metav1.GetControllerOf(s); o == nil || o.Kind != "Endpoints" || o.Name != "svc" {
		t.Errorf("owner %+v", o)
	}
	before := w.Machine.Snapshot().ResourceVersion()
	w.Settle(c)
	if w.Machine.Snapshot().ResourceVersion() != before {
		t.Error("idle writes")
	}

	fixture.Change(w, endpointsGK, "default", "svc", registry.Main, func(e *corev1.Endpoints) {
		e.Subsets = []corev1.EndpointSubset{subset(80, "10.2.3.4")}
		e.Subsets[0].NotReadyAddresses = []corev1.EndpointAddress{{IP: "10.2.3.5"}, {IP: "10.2.3.4"}}
	})
	w.Settle(c)
	expect(t, w, "updated", "IPv4 80: 10.2.3.4(true) 10.2.3.5(false)")
	if again := fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default")[0]; again.UID != s.UID {
		t.Error("an update made another slice")
	}

	// What somebody else does to a slice of ours is put right.
	fixture.Change(w, fixture.EndpointSlice, "default", s.Name, registry.Main, func(s *discoveryv1.EndpointSlice) { s.Endpoints = nil })
	w.Settle(c)
	expect(t, w, "put right", "IPv4 80: 10.2.3.4(true) 10.2.3.5(false)")

	w.Delete(endpointsGK, "default", "svc", metav1.DeletePropagationBackground)
	w.Settle(c)
	expect(t, w, "deleted", "")
}

func TestPortsAndFamilies(t *testing.T) {
	w := fixture.New(t)
	w.Create(service("svc"))
	w.Create(handMade("svc", subset(80, "10.0.0.1", "fd00::1"), subset(81, "10.0.0.1"), subset(80, "10.0.0.2")))
	c := New(w.Env())
	w.Settle(c)
	got := map[string]bool{}
	for _, line := range strings.Split(show(w), "; ") {
		got[line] = true
	}
	if len(got) != 3 || !got["IPv4 80: 10.0.0.1(true) 10.0.0.2(true)"] || !got["IPv6 80: fd00::1(true)"] || !got["IPv4 81: 10.0.0.1(true)"] {
		t.Errorf("slices %v", got)
	}
	// A set of ports that is gone takes its slice with it.
	fixture.Change(w, endpointsGK, "default", "svc", registry.Main, func(e *corev1.Endpoints) { e.Subsets = []corev1.EndpointSubset{subset(82, "10.0.0.1")} })
	w.Settle(c)
	expect(t, w, "other ports", "IPv4 82: 10.0.0.1(true)")
	fixture.Change(w, endpointsGK, "default", "svc", registry.Main, func(e *corev1.Endpoints) { e.Subsets = nil })
	w.Settle(c)
	expect(t, w, "no addresses", "")
}

// TestWhatIsNotMirrored: and what was mirrored and may no longer be.
func TestWhatIsNotMirrored(t *testing.T) {
	for name, c := range map[string]struct {
		svc    func(*corev1.Service)
		change func(*corev1.Endpoints)
	}{
		"skipped":  {nil, func(e *corev1.Endpoints) { e.Labels = map[string]string{discoveryv1.LabelSkipMirror: "true"} }},
		"a lock":   {nil, func(e *corev1.Endpoints) { e.Annotations = map[string]string{leaderElection: "{}"} }},
		"selector": {func(s *corev1.Service) { s.Spec.Selector = map[string]string{"a": "b"} }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := fixture.New(t)
			ctrl := New(w.Env())
			w.Create(service("svc"))
			w.Create(handMade("svc", subset(80, "10.0.0.1")))
			w.Settle(ctrl)
			expect(t, w, "before", "IPv4 80: 10.0.0.1(true)")
			if c.svc != nil {
				fixture.Change(w, fixture.Service, "default", "svc", registry.Main, c.svc)
			} else {
				fixture.Change(w, endpointsGK, "default", "svc", registry.Main, c.change)
			}
			w.Settle(ctrl)
			expect(t, w, "after", "")
		})
	}
	w := fixture.New(t)
	c := New(w.Env())
	w.Create(handMade("svc", subset(80, "10.0.0.1")))
	w.Settle(c)
	expect(t, w, "no service", "")
	w.Create(service("svc"))
	w.Settle(c)
	expect(t, w, "the service came", "IPv4 80: 10.0.0.1(true)")
	w.Delete(fixture.Service, "default", "svc", "")
	w.Settle(c)
	expect(t, w, "the service went", "")
}

// TestBesideTheEndpointsController: the two never touch each other's slices,
// also where a Service changes sides.
func TestBesideTheEndpointsController(t *testing.T) {
	w := fixture.New(t)
	mirror, own := New(w.Env()), endpoints.New(w.Env())
	w.Create(service("svc", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "a"} }))
	w.Settle(mirror, own)
	list := fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default")
	if len(list) != 1 || list[0].Labels[discoveryv1.LabelManagedBy] == managedBy {
		t.Fatalf("slices %+v", list)
	}
	fixture.Change(w, fixture.Service, "default", "svc", registry.Main, func(s *corev1.Service) { s.Spec.Selector = nil })
	fixture.Change(w, endpointsGK, "default", "svc", registry.Main, func(e *corev1.Endpoints) { e.Subsets = []corev1.EndpointSubset{subset(80, "10.0.0.9")} })
	w.Settle(mirror, own)
	ours := 0
	for _, s := range fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default") {
		if s.Labels[discoveryv1.LabelManagedBy] == managedBy {
			ours++
		}
	}
	if ours != 1 {
		t.Errorf("%d mirrored slices: %s", ours, show(w))
	}
}

func TestAtMostAThousandOfASubset(t *testing.T) {
	w := fixture.New(t)
	w.Create(service("svc"))
	s := subset(80)
	ip := netip.MustParseAddr("10.0.0.1")
	for range maxPerSubset + 5 {
		s.NotReadyAddresses = append(s.NotReadyAddresses, corev1.EndpointAddress{IP: ip.String()})
		ip = ip.Next()
	}
	s.Addresses = []corev1.EndpointAddress{{IP: "192.0.2.1"}}
	w.Create(handMade("svc", s))
	w.Settle(New(w.Env()))
	list := fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default")
	if len(list) != 1 || len(list[0].Endpoints) != maxPerSubset || list[0].Endpoints[0].Addresses[0] != "192.0.2.1" {
		t.Fatalf("%d slices", len(list))
	}
	if ev := w.Events.With("TooManyAddressesToMirror"); len(ev) == 0 || !strings.Contains(ev[0].Message, "6 addresses were skipped") {
		t.Errorf("events %+v", ev)
	}
}
