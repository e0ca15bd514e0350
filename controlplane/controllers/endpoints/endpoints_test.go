package endpoints

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

func service(set ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "svc", Labels: map[string]string{"team": "x"}},
		Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "a"}, Ports: []corev1.ServicePort{{Name: "http", Port: 80, TargetPort: intstr.FromString("web")}}}}
	for _, f := range set {
		f(s)
	}
	return s
}

func addPod(w *fixture.World, name string, set ...func(*corev1.Pod)) {
	tpl := fixture.Template("a")
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Labels: tpl.Labels}, Spec: tpl.Spec}
	p.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "web", ContainerPort: 8080}}
	for _, f := range set {
		f(p)
	}
	w.Create(p)
}

func slicesOf(w *fixture.World) []*discoveryv1.EndpointSlice {
	return fixture.List[*discoveryv1.EndpointSlice](w, fixture.EndpointSlice, "default")
}

func TestFollowsReadinessAndTermination(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n", func(n *corev1.Node) { n.Labels[corev1.LabelTopologyZone] = "site-1" })
	w.Create(service())
	c := New(w.Env())
	w.Settle(c)
	if s := slicesOf(w); len(s) != 1 || len(s[0].Endpoints) != 0 {
		t.Fatalf("without pods: %v", s)
	}
	addPod(w, "p")
	w.BindAll("n")
	w.Report(func(*corev1.Pod) bool { return false })
	w.Settle(c)
	check := func(ready, serving, terminating bool) {
		t.Helper()
		s := slicesOf(w)
		if len(s) != 1 || len(s[0].Endpoints) != 1 {
			t.Fatalf("slices %+v", s)
		}
		e := s[0].Endpoints[0]
		if *e.Conditions.Ready != ready || *e.Conditions.Serving != serving || *e.Conditions.Terminating != terminating {
			t.Fatalf("ready %v serving %v terminating %v", *e.Conditions.Ready, *e.Conditions.Serving, *e.Conditions.Terminating)
		}
		if *e.NodeName != "n" || *e.Zone != "site-1" || e.TargetRef.Name != "p" || *s[0].Ports[0].Port != 8080 || s[0].Labels["team"] != "x" {
			t.Fatalf("endpoint %+v of %+v", e, s[0])
		}
	}
	check(false, false, false)
	w.Report(nil)
	w.Settle(c)
	check(true, true, false)
	ep := fixture.Get[*corev1.Endpoints](w, endpointsGK, "default", "svc")
	if len(ep.Subsets) != 1 || len(ep.Subsets[0].Addresses) != 1 || ep.Subsets[0].Ports[0].Port != 8080 {
		t.Fatalf("endpoints %+v", ep.Subsets)
	}
	w.Delete(fixture.Pod, "default", "p", "")
	w.Settle(c)
	check(false, true, true)
	w.Report(nil)
	w.Settle(c)
	if s := slicesOf(w); len(s) != 1 || len(s[0].Endpoints) != 0 {
		t.Fatalf("after the pod: %+v", s)
	}
	before := w.Machine.Snapshot().ResourceVersion()
	w.Settle(c)
	if w.Machine.Snapshot().ResourceVersion() != before {
		t.Fatal("idle writes")
	}
	w.Delete(fixture.Service, "default", "svc", "")
	if _, err := c.Reconcile(t.Context(), serviceKey("default", "svc")); err != nil {
		t.Fatal(err)
	}
	if n := len(fixture.List[*corev1.Endpoints](w, endpointsGK, "default")); n != 0 {
		t.Fatal("endpoints outlive the service")
	}
}

// Pods' weights stand on the slice that has their endpoints, and follow them.
func TestWeightsStandOnTheSlice(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(service())
	addPod(w, "canary", func(p *corev1.Pod) { p.Annotations = map[string]string{manifests.AnnotationWeight: "5"} })
	addPod(w, "stable")
	w.BindAll("n")
	w.Report(nil)
	c := New(w.Env())
	check := func(weight uint16) {
		t.Helper()
		w.Settle(c)
		s := slicesOf(w)
		if len(s) != 1 || len(s[0].Endpoints) != 2 {
			t.Fatalf("slices %+v", s)
		}
		got, err := manifests.ParseWeights(s[0].Annotations[manifests.AnnotationWeights])
		if err != nil {
			t.Fatal(err)
		}
		want := map[string]uint16{}
		for _, e := range s[0].Endpoints {
			if e.TargetRef.Name == "canary" && weight > 0 {
				want[e.Addresses[0]] = weight
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("weights %v, want %v", got, want)
		}
	}
	check(5)
	weigh := func(set func(p *corev1.Pod)) {
		t.Helper()
		if _, err := w.Env().Store.Update(t.Context(), podGK, "default", "canary", registry.Main, func(o runtime.Object) (runtime.Object, error) {
			set(o.(*corev1.Pod))
			return o, nil
		}, w.Env().Write()); err != nil {
			t.Fatal(err)
		}
	}
	weigh(func(p *corev1.Pod) { p.Annotations[manifests.AnnotationWeight] = "50" })
	check(50)
	weigh(func(p *corev1.Pod) { delete(p.Annotations, manifests.AnnotationWeight) })
	check(0)
}

func TestRootlessPodsGetASliceForEachPort(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(service())
	for i := range 3 {
		addPod(w, fmt.Sprintf("p%d", i), func(p *corev1.Pod) {
			p.Annotations = map[string]string{PortsAnnotation: fmt.Sprintf(`{"8080":%d}`, 30000+i%2)}
		})
	}
	w.BindAll("n")
	w.Report(nil)
	w.Settle(New(w.Env()))
	got := map[int32]int{}
	for _, s := range slicesOf(w) {
		got[*s.Ports[0].Port] += len(s.Endpoints)
	}
	if len(got) != 2 || got[30000] != 2 || got[30001] != 1 {
		t.Fatalf("endpoints by port: %v", got)
	}
}

func TestManyPodsStayInTheirSlices(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n", func(n *corev1.Node) {
		q := n.Status.Allocatable["pods"]
		q.Set(1000)
		n.Status.Allocatable["pods"] = q
		c := n.Status.Allocatable["cpu"]
		c.Set(1000)
		n.Status.Allocatable["cpu"] = c
		m := n.Status.Allocatable["memory"]
		m.Set(1 << 40)
		n.Status.Allocatable["memory"] = m
	})
	w.Create(service())
	for i := range 250 {
		addPod(w, fmt.Sprintf("p%03d", i))
	}
	w.BindAll("n")
	w.Report(nil)
	c := New(w.Env())
	w.Settle(c)
	if s := slicesOf(w); len(s) != 3 {
		t.Fatalf("%d slices", len(s))
	}
	before := map[string]string{}
	for _, s := range slicesOf(w) {
		before[s.Name] = s.ResourceVersion
	}
	w.SetReady(fixture.Get[*corev1.Pod](w, fixture.Pod, "default", "p007"), false)
	w.Settle(c)
	changed, total := 0, 0
	for _, s := range slicesOf(w) {
		if before[s.Name] != s.ResourceVersion {
			changed++
		}
		total += len(s.Endpoints)
	}
	if changed != 1 || total != 250 {
		t.Fatalf("%d slices rewritten, %d endpoints", changed, total)
	}
}

func TestHeadlessAndUnready(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(service(func(s *corev1.Service) {
		s.Spec.ClusterIP, s.Spec.PublishNotReadyAddresses, s.Spec.Ports = corev1.ClusterIPNone, true, nil
	}))
	addPod(w, "p", func(p *corev1.Pod) { p.Spec.Hostname, p.Spec.Subdomain = "h", "svc" })
	w.BindAll("n")
	w.Report(func(*corev1.Pod) bool { return false })
	w.Settle(New(w.Env()))
	s := slicesOf(w)
	if len(s) != 1 || len(s[0].Endpoints) != 1 || !*s[0].Endpoints[0].Conditions.Ready || *s[0].Endpoints[0].Hostname != "h" {
		t.Fatalf("slices %+v", s)
	}
	if _, ok := s[0].Labels[corev1.IsHeadlessService]; !ok {
		t.Fatalf("labels %v", s[0].Labels)
	}
}

func TestSelectorChangeMovesPods(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(service())
	addPod(w, "p")
	w.BindAll("n")
	w.Report(nil)
	c := New(w.Env())
	w.Settle(c)
	fixture.Change(w, fixture.Service, "default", "svc", registry.Main, func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "b"} })
	w.Settle(c)
	for _, s := range slicesOf(w) {
		if len(s.Endpoints) != 0 {
			t.Fatalf("still there: %+v", s.Endpoints)
		}
	}
}

// TestLocalAddressesAreLeftOut: a pod that has only 127.0.0.1, which no slice
// may hold, neither fails the Service nor hides the other pods, and is said once.
func TestLocalAddressesAreLeftOut(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(service())
	c := New(w.Env())
	addPod(w, "far")
	w.BindAll("n")
	w.Report(nil)
	addPod(w, "near")
	w.BindAll("n")
	fixture.Change(w, fixture.Pod, "default", "near", registry.Status, func(p *corev1.Pod) {
		p.Status.PodIP, p.Status.PodIPs = "127.0.0.1", []corev1.PodIP{{IP: "127.0.0.1"}}
	})
	for range 3 {
		w.Report(nil)
		w.Settle(c)
	}
	if s := slicesOf(w); len(s) != 1 || len(s[0].Endpoints) != 1 || s[0].Endpoints[0].TargetRef.Name != "far" {
		t.Fatalf("slices %+v", s)
	}
	said := w.Events.With("LocalAddress")
	if len(said) != 1 || said[0].About.Name != "svc" || !strings.Contains(said[0].Message, "--node-address") {
		t.Fatalf("events %+v", said)
	}
}
