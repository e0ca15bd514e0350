package ingress

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/ingress"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// serving tells once more, plainly, which addresses serve Ingresses.
func serving(w *fixture.World) (out []string) {
	nodes := fixture.List[*corev1.Node](w, fixture.Node, "")
	labelled := slices.ContainsFunc(nodes, func(n *corev1.Node) bool { return n.Labels[manifests.LabelIngress] == "true" })
	slices.SortFunc(nodes, func(a, b *corev1.Node) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	for i, n := range nodes {
		if (labelled && n.Labels[manifests.LabelIngress] == "true" || !labelled && i == 0) && n.Status.Conditions[0].Status == corev1.ConditionTrue {
			out = append(out, n.Status.Addresses[0].Address)
		}
	}
	slices.Sort(out)
	return out
}

func ingresses(w *fixture.World) []*networkingv1.Ingress {
	return fixture.List[*networkingv1.Ingress](w, ingress.GK, "default")
}

// happens is what befalls nodes, classes, Services and Ingresses.
func happens(rt *rapid.T, w *fixture.World, i int) {
	nodes := fixture.List[*corev1.Node](w, fixture.Node, "")
	w.Advance(time.Second)
	switch what := rapid.IntRange(0, 7).Draw(rt, "happens"); {
	case what == 0 && len(nodes) < 4:
		addNode(w, fmt.Sprintf("n%d", i), fmt.Sprintf("192.0.2.%d", i+1))
	case what <= 2 && len(nodes) > 0:
		n := nodes[rapid.IntRange(0, len(nodes)-1).Draw(rt, "node")]
		switch rapid.IntRange(0, 2).Draw(rt, "node's change") {
		case 0:
			fixture.Change(w, fixture.Node, "", n.Name, registry.Main, func(n *corev1.Node) {
				n.Labels[manifests.LabelIngress] = rapid.SampledFrom([]string{"true", "false"}).Draw(rt, "label")
			})
		case 1:
			fixture.Change(w, fixture.Node, "", n.Name, registry.Status, func(n *corev1.Node) {
				n.Status.Conditions[0].Status = rapid.SampledFrom([]corev1.ConditionStatus{"True", "False", "Unknown"}).Draw(rt, "ready")
			})
		default:
			w.Delete(fixture.Node, "", n.Name, "")
		}
	case what <= 4:
		class := rapid.SampledFrom([]string{"dunlin", "other", "nobody"}).Draw(rt, "class")
		w.Create(ing(fmt.Sprintf("i%d", i), class, "a.example", prefix("/", "web", 80)))
	case what == 5:
		if list := ingresses(w); len(list) > 0 {
			w.Delete(ingress.GK, "default", list[rapid.IntRange(0, len(list)-1).Draw(rt, "ingress")].Name, "")
		}
	case what == 6:
		if _, err := w.Store.Get(ingress.ClassGK, "", "nobody"); apierrors.IsNotFound(err) {
			w.Create(classOf("nobody", manifests.IngressController))
		}
	case what == 7:
		if _, err := w.Store.Get(fixture.Service, "default", "web"); apierrors.IsNotFound(err) {
			w.Create(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}})
		} else {
			w.Delete(fixture.Service, "default", "web", "")
		}
	}
}

// Whatever befalls nodes and Ingresses, and wherever the leader dies: what
// other controllers wrote is left alone, and in the end every Ingress of ours
// shows the addresses that serve it, and what keeps requests from it was told.
func TestAddressesThroughKills(t *testing.T) {
	theirs := networkingv1.IngressLoadBalancerStatus{Ingress: []networkingv1.IngressLoadBalancerIngress{{IP: "198.51.100.1"}}}
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		addNode(w, "a", "192.0.2.200")
		w.Create(classOf("dunlin", manifests.IngressController))
		w.Create(classOf("other", "example.com/other"))
		w.Create(ing("foreign", "other", "a.example", prefix("/", "web", 80)))
		fixture.Change(w, ingress.GK, "default", "foreign", registry.Status, func(i *networkingv1.Ingress) { i.Status.LoadBalancer = theirs })
		reign := w.Reign(rt, func() error {
			for _, i := range ingresses(w) {
				switch {
				case i.Name == "foreign" && len(i.Status.LoadBalancer.Ingress) != 1:
					return fmt.Errorf("another controller's status is %+v", i.Status)
				case i.Name != "foreign" && *i.Spec.IngressClassName == "other" && len(i.Status.LoadBalancer.Ingress) > 0:
					return fmt.Errorf("%s of another controller got %+v", i.Name, i.Status)
				}
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
		want := serving(w)
		_, none := w.Store.Get(fixture.Service, "default", "web")
		for _, i := range ingresses(w) {
			class, _ := w.Store.Get(ingress.ClassGK, "", *i.Spec.IngressClassName)
			switch c, ok := class.(*networkingv1.IngressClass); {
			case !ok:
				if said(w, "UnknownClass", i.Name, "") == 0 {
					rt.Fatalf("%s has no class, and nobody says so", i.Name)
				}
			case c.Spec.Controller == manifests.IngressController:
				if got := addressesOf(w, i.Name); !slices.Equal(got, want) {
					rt.Fatalf("%s has %v, want %v", i.Name, got, want)
				}
				if none != nil && said(w, "NoSuchService", i.Name, "") == 0 {
					rt.Fatalf("%s leads to no Service, and nobody says so", i.Name)
				}
			}
		}
	})
}
