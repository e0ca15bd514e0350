package loadbalancer

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func service(name string, set ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Selector: map[string]string{"app": "a"}, Ports: []corev1.ServicePort{{Port: 80}}}}
	for _, f := range set {
		f(s)
	}
	return s
}

func addNode(w *fixture.World, name, ip string) {
	w.AddNode(name, func(n *corev1.Node) {
		n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}}
	})
}

func addressesOf(w *fixture.World, name string) (out []string) {
	for _, i := range fixture.Get[*corev1.Service](w, fixture.Service, "default", name).Status.LoadBalancer.Ingress {
		out = append(out, i.IP)
	}
	return out
}

func TestNodesAreTheLoadBalancer(t *testing.T) {
	w := fixture.New(t)
	addNode(w, "a", "192.0.2.1")
	addNode(w, "b", "192.0.2.2")
	w.Create(service("web"))
	c := New(w.Env())
	w.Settle(c)
	want := func(name string, ips ...string) {
		t.Helper()
		if got := addressesOf(w, name); !slices.Equal(got, ips) {
			t.Fatalf("%s has %v, want %v", name, got, ips)
		}
	}
	want("web", "192.0.2.1", "192.0.2.2")
	fixture.Change(w, fixture.Node, "", "b", registry.Main, func(n *corev1.Node) { n.Labels[NodeLabel] = "true" })
	w.Settle(c)
	want("web", "192.0.2.2")
	// The same port again: the first one keeps it, until it goes.
	w.Create(service("zz-late"))
	w.Settle(c)
	want("web", "192.0.2.2")
	want("zz-late")
	w.Delete(fixture.Service, "default", "web", "")
	w.Settle(c)
	want("zz-late", "192.0.2.2")
	fixture.Change(w, fixture.Service, "default", "zz-late", registry.Main, func(s *corev1.Service) {
		s.Spec.Type, s.Spec.AllocateLoadBalancerNodePorts, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeClusterIP, nil, ""
	})
	w.Settle(c)
	want("zz-late")
	// Only where endpoints are, if the policy says so: there are none.
	w.Create(service("local", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal }))
	w.Settle(c)
	want("local")
	before := w.Machine.Snapshot().ResourceVersion()
	w.Settle(c)
	if w.Machine.Snapshot().ResourceVersion() != before {
		t.Fatal("idle writes")
	}
}
