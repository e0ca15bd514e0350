package loadbalancer

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func services(w *fixture.World) []*corev1.Service {
	list := fixture.List[*corev1.Service](w, fixture.Service, "default")
	slices.SortFunc(list, func(a, b *corev1.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	return list
}

// serving tells once more, plainly, which addresses are the load balancer.
func serving(w *fixture.World) (out []string) {
	nodes := fixture.List[*corev1.Node](w, fixture.Node, "")
	labelled := slices.ContainsFunc(nodes, func(n *corev1.Node) bool { return n.Labels[NodeLabel] == "true" })
	for _, n := range nodes {
		if (!labelled || n.Labels[NodeLabel] == "true") && n.Status.Conditions[0].Status == corev1.ConditionTrue {
			out = append(out, n.Status.Addresses[0].Address)
		}
	}
	slices.Sort(out)
	return out
}

func happens(rt *rapid.T, w *fixture.World, i int) {
	w.Advance(time.Second)
	nodes := fixture.List[*corev1.Node](w, fixture.Node, "")
	list := slices.DeleteFunc(services(w), func(s *corev1.Service) bool { return s.Name == "foreign" })
	switch what := rapid.IntRange(0, 9).Draw(rt, "happens"); {
	case what == 0 && len(nodes) < 4:
		addNode(w, fmt.Sprintf("n%d", i), fmt.Sprintf("192.0.2.%d", i+1))
	case what == 1 && len(nodes) > 0:
		n := nodes[rapid.IntRange(0, len(nodes)-1).Draw(rt, "node")]
		switch rapid.IntRange(0, 2).Draw(rt, "node's change") {
		case 0:
			fixture.Change(w, fixture.Node, "", n.Name, registry.Main, func(n *corev1.Node) {
				n.Labels[NodeLabel] = rapid.SampledFrom([]string{"true", "false"}).Draw(rt, "label")
			})
		case 1:
			fixture.Change(w, fixture.Node, "", n.Name, registry.Status, func(n *corev1.Node) {
				n.Status.Conditions[0].Status = rapid.SampledFrom([]corev1.ConditionStatus{"True", "False", "Unknown"}).Draw(rt, "ready")
			})
		default:
			w.Delete(fixture.Node, "", n.Name, "")
		}
	case what <= 4 || len(list) == 0:
		w.Create(service(fmt.Sprintf("s%d", i), func(s *corev1.Service) {
			s.Spec.Ports[0].Port = rapid.Int32Range(80, 82).Draw(rt, "port")
		}))
	case what == 5:
		w.Delete(fixture.Service, "default", list[rapid.IntRange(0, len(list)-1).Draw(rt, "goes")].Name, "")
	default:
		s := list[rapid.IntRange(0, len(list)-1).Draw(rt, "service")]
		fixture.Change(w, fixture.Service, "default", s.Name, registry.Main, func(s *corev1.Service) {
			switch {
			case rapid.Bool().Draw(rt, "other port"):
				s.Spec.Ports[0].Port = rapid.Int32Range(80, 82).Draw(rt, "port")
			case s.Spec.Type == corev1.ServiceTypeLoadBalancer:
				s.Spec.Type, s.Spec.AllocateLoadBalancerNodePorts, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeClusterIP, nil, ""
				s.Spec.Ports[0].NodePort = 0
			default:
				s.Spec.Type = corev1.ServiceTypeLoadBalancer
			}
		})
	}
}

// Whatever befalls nodes and Services, and wherever the leader dies: what
// another implementation wrote is left alone; in the end the oldest Service
// of a port has the nodes' addresses, the others none and a reason.
func TestAddressesThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		addNode(w, "a", "192.0.2.200")
		class := "example.com/other"
		w.Create(service("foreign", func(s *corev1.Service) { s.Spec.LoadBalancerClass = &class }))
		fixture.Change(w, fixture.Service, "default", "foreign", registry.Status, func(s *corev1.Service) {
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "198.51.100.1"}}
		})
		reign := w.Reign(rt, func() error {
			if got := addressesOf(w, "foreign"); !slices.Equal(got, []string{"198.51.100.1"}) {
				return fmt.Errorf("another implementation's Service has %v", got)
			}
			return nil
		}, func(env loop.Env) []*loop.Controller { return []*loop.Controller{New(env)} })
		for i := range rapid.IntRange(3, 30).Draw(rt, "steps") {
			switch rapid.IntRange(0, 4).Draw(rt, "step") {
			case 0:
				reign.Elect(rapid.IntRange(0, 3).Draw(rt, "writes"))
				reign.Work()
			case 1:
				reign.Work()
			default:
				happens(rt, w, i)
			}
		}
		reign.Finish()
		want, taken := serving(w), map[int32]bool{}
		for _, s := range services(w) {
			got := addressesOf(w, s.Name)
			switch port := s.Spec.Ports[0].Port; {
			case s.Name == "foreign":
			case s.Spec.Type != corev1.ServiceTypeLoadBalancer:
				if len(got) > 0 {
					rt.Fatalf("%s is no load balancer any more, and has %v", s.Name, got)
				}
			case taken[port]:
				if len(got) > 0 || !slices.ContainsFunc(w.Events.With("PortConflict"), func(e fixture.Event) bool { return e.About.Name == s.Name }) {
					rt.Fatalf("%s has %v, and its port %d is another's", s.Name, got, port)
				}
			default:
				taken[port] = true
				if !slices.Equal(got, want) {
					rt.Fatalf("%s has %v, want %v", s.Name, got, want)
				}
			}
		}
	})
}
