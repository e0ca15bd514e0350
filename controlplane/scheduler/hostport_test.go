package scheduler

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// hostPort is of a container that asks for a port of the node on one of its
// addresses; "" is all. (A guest's port is always opened on all.)
func hostPort(ip string, port int32, protocol corev1.Protocol) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].Image = "registry.example/app:1"
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 8080, HostPort: port, Protocol: protocol, HostIP: ip}}
	}
}

// Of two pods with host ports the second is placed beside the first, or waits
// and says why, until the first is gone; the state machine judges likewise.
// The first rows are those of upstream's conformance.
func TestHostPortsOfAddresses(t *testing.T) {
	const node, other = "192.0.2.10", "127.0.0.1"
	tcp, udp := corev1.ProtocolTCP, corev1.ProtocolUDP
	for name, c := range map[string]struct {
		first, second func(*corev1.Pod)
		clash         bool
	}{
		"another address":             {hostPort(other, 54321, tcp), hostPort(node, 54321, tcp), false},
		"another protocol":            {hostPort(node, 54321, tcp), hostPort(node, 54321, udp), false},
		"all addresses, then one":     {hostPort("", 54322, tcp), hostPort(node, 54322, tcp), true},
		"one address, then all":       {hostPort(node, 54322, tcp), hostPort("", 54322, tcp), true},
		"0.0.0.0, then one":           {hostPort("0.0.0.0", 54322, tcp), hostPort(node, 54322, tcp), true},
		"one, then 0.0.0.0":           {hostPort(other, 54322, tcp), hostPort("0.0.0.0", 54322, tcp), true},
		"all, another protocol":       {hostPort("", 54322, tcp), hostPort(node, 54322, udp), false},
		"all, another port":           {hostPort("", 54322, tcp), hostPort(node, 54323, tcp), false},
		"the same address":            {hostPort(node, 54322, tcp), hostPort(node, 54322, tcp), true},
		"the protocol is TCP, unsaid": {hostPort(node, 54322, ""), hostPort("", 54322, tcp), true},
	} {
		t.Run(name, func(t *testing.T) {
			w := fixture.New(t)
			n := w.AddNode("n", func(n *corev1.Node) { n.Labels["dunlin.dev/runtime.runc"] = "true" })
			w.Create(pod("first", c.first))
			s := newScheduler(w)
			settle(t, s)
			w.Create(pod("second", c.second))
			settle(t, s)
			if nodeOf(w, "first") != "n" {
				t.Fatalf("the first: %s", scheduled(w, "first").Message)
			}
			if !c.clash {
				if nodeOf(w, "second") != "n" {
					t.Fatalf("the second: %s", scheduled(w, "second").Message)
				}
				return
			}
			if got := scheduled(w, "second"); nodeOf(w, "second") != "" || got.Status != corev1.ConditionFalse ||
				!strings.Contains(got.Message, "1 node(s) didn't have free ports for the requested pod ports") {
				t.Fatalf("the second is on %q: %+v", nodeOf(w, "second"), got)
			}
			second := fixture.Get[*corev1.Pod](w, fixture.Pod, "default", "second")
			errs, err := w.Store.Bind(context.Background(), []registry.PodBinding{{Namespace: "default", Name: "second", PodUID: second.UID, Node: "n", NodeUID: n.UID}}, 0)
			if err != nil || errs[0] == nil || !apierrors.IsConflict(errs[0]) {
				t.Fatalf("bound by hand: %v %v", err, errs)
			}
			none := int64(0)
			if _, _, err := w.Store.Delete(context.Background(), fixture.Pod, "default", "first", registry.DeleteOptions{GracePeriodSeconds: &none}); err != nil {
				t.Fatal(err)
			}
			settle(t, s)
			if nodeOf(w, "second") != "n" {
				t.Fatalf("the port is free: %s", scheduled(w, "second").Message)
			}
		})
	}
}
