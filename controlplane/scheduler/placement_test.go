package scheduler

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/manifests"
)

// Every node, every filter, with figures and who holds what is missing.
func TestExplainNamesNodesFiltersAndHolders(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("busy", inZone("z0"), func(n *corev1.Node) { n.Status.Allocatable["memory"] = resource.MustParse("430Mi") })
	w.AddNode("tainted", inZone("z1"), func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "k", Value: "v", Effect: corev1.TaintEffectNoSchedule}}
		n.Spec.Unschedulable = true
	})
	w.AddNode("kept", inZone("z2"))
	for name, memory := range map[string]string{"a": "120Mi", "b": "60Mi", "c": "30Mi", "d": "10Mi"} {
		w.Create(pod(name, on("busy"), requests("1m", memory)))
	}
	w.Create(pod("other", on("kept"), labelled("other")))
	w.Create(pod("big", requests("100m", "300Mi"), awayFrom("other", zoneKey)))
	p, err := Explain(w.Store, nil, get(w, "big"), func(ns string) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	want := "0/3 nodes are available: 1 Insufficient memory (needs 300Mi, most free 210Mi), 1 node(s) didn't match pod anti-affinity rules, 1 node(s) were unschedulable."
	if p.Message != want || len(p.Nodes) != 3 {
		t.Fatalf("%d nodes, %q", len(p.Nodes), p.Message)
	}
	said := map[string]string{}
	for _, n := range p.Nodes {
		var bad []string
		for _, f := range n.Filters {
			if f.OK {
				continue
			}
			bad = append(bad, f.Name+": "+f.Reason)
			for _, x := range f.Figures {
				if x.Short {
					bad = append(bad, "held by "+strings.Join(x.HeldBy, ", "))
				}
			}
		}
		said[n.Name] = strings.Join(bad, " | ")
	}
	for node, want := range map[string]string{
		"busy":    "NodeResourcesFit: memory: needs 300Mi, free 210Mi of 430Mi | held by default/a (120Mi), default/b (60Mi), default/c (30Mi), 1 other",
		"tainted": "NodeUnschedulable: node(s) were unschedulable | TaintToleration: node(s) had untolerated taint {k: v}",
		"kept":    "InterPodAffinity: node(s) didn't match pod anti-affinity rules (" + zoneKey + "=z2 has 1 pods of {app=other}, none is wanted)",
	} {
		if said[node] != want {
			t.Errorf("%s: %q, want %q", node, said[node], want)
		}
	}
	// Who may not see a namespace's pods is not told their names.
	p, err = Explain(w.Store, nil, get(w, "big"), func(string) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	if by := p.Nodes[0].Filters[5].Figures[1].HeldBy; len(by) != 1 || by[0] != "4 others" {
		t.Errorf("held by %v", by)
	}
	w.Create(pod("astray", on("nowhere")))
	p, err = Explain(w.Store, nil, get(w, "astray"), func(string) bool { return true })
	if err != nil || p.Message != "The pod's spec.nodeName is nowhere, and there is no such node; 2 of 3 nodes could take it." {
		t.Errorf("%+v, %v", p, err)
	}
	// A pod that runs is not in its own way.
	p, err = Explain(w.Store, nil, get(w, "a"), func(string) bool { return true })
	if err != nil || !p.Nodes[0].Fits || p.Message != "The pod is on node busy; 2 of 3 nodes could take it." {
		t.Errorf("%+v, %v", p, err)
	}
}

// A pod that names a scheduler of somebody else is told so.
func TestExplainNamesTheSchedulersThereAre(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(pod("ghost", func(p *corev1.Pod) { p.Spec.SchedulerName = "nosuch" }))
	p, err := Explain(w.Store, nil, get(w, "ghost"), func(string) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	if want := `No scheduler here is called "nosuch", so the pod waits for another program to place it; there are: default-scheduler.`; p.Message != want {
		t.Errorf("%q", p.Message)
	}
}

// reasonOf is what one filter says of a node, and who is in the way.
func reasonOf(t *testing.T, p *Placement, node, filter string) string {
	t.Helper()
	for i := range p.Nodes {
		if p.Nodes[i].Name != node {
			continue
		}
		for _, f := range p.Nodes[i].Filters {
			if f.Name == filter && !f.OK {
				return f.Reason + " | " + strings.Join(f.HeldBy, ", ")
			}
		}
	}
	return ""
}

// Affinity in both directions, labels of nodes: what is wanted, what is there,
// in which domain, and which pods are in the way.
func TestExplainTellsWhatAffinityMinds(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("a", inZone("z0"))
	w.AddNode("b", inZone("z1"))
	w.AddNode("bare")
	w.Create(pod("db", on("a"), labelled("db")))
	w.Create(pod("shy", on("b"), labelled("shy"), awayFrom("web", zoneKey)))
	w.Create(pod("near", labelled("x"), near("db", zoneKey)))
	w.Create(pod("lonely", labelled("x"), near("nobody", zoneKey)))
	w.Create(pod("apart", labelled("x"), awayFrom("db", zoneKey)))
	w.Create(pod("web", labelled("web")))
	w.Create(pod("fast", labelled("x"), func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{zoneKey: "z1"} }))
	w.Create(pod("far", labelled("x"), func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: zoneKey, Operator: corev1.NodeSelectorOpIn, Values: []string{"z8", "z9"}}}}}}}}
	}))
	for _, tc := range []struct{ pod, node, filter, want string }{
		{"near", "b", "InterPodAffinity", "node(s) didn't match pod affinity rules (" + zoneKey + "=z1 has no pod of {app=db}; there are some in z0) | "},
		{"near", "bare", "InterPodAffinity", "node(s) didn't match pod affinity rules (the node has no label " + zoneKey + ") | "},
		{"lonely", "a", "InterPodAffinity", "node(s) didn't match pod affinity rules (" + zoneKey + "=z0 has no pod of {app=nobody}; there are none anywhere) | "},
		{"apart", "a", "InterPodAffinity", "node(s) didn't match pod anti-affinity rules (" + zoneKey + "=z0 has 1 pods of {app=db}, none is wanted) | default/db"},
		{"web", "b", "InterPodAffinity", "node(s) didn't satisfy existing pods anti-affinity rules (" + zoneKey + "=z1 has 1 pods that keep {app=web} away) | default/shy"},
		{"fast", "a", "NodeAffinity", "node(s) didn't match Pod's node affinity/selector (wants " + zoneKey + "=z1, the node has " + zoneKey + "=z0) | "},
		{"fast", "bare", "NodeAffinity", "node(s) didn't match Pod's node affinity/selector (wants " + zoneKey + "=z1, the node has no label " + zoneKey + ") | "},
		{"far", "a", "NodeAffinity", "node(s) didn't match Pod's node affinity/selector (wants " + zoneKey + " In [z8, z9], the node has " + zoneKey + "=z0) | "},
	} {
		p, err := Explain(w.Store, nil, get(w, tc.pod), func(string) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		if got := reasonOf(t, p, tc.node, tc.filter); got != tc.want {
			t.Errorf("%s on %s: %q, want %q", tc.pod, tc.node, got, tc.want)
		}
	}
	// Who may not see a namespace's pods is not told their names.
	p, err := Explain(w.Store, nil, get(w, "apart"), func(string) bool { return false })
	if err != nil {
		t.Fatal(err)
	}
	if got := reasonOf(t, p, "a", "InterPodAffinity"); !strings.HasSuffix(got, " | 1 other") {
		t.Error(got)
	}
}

// A claim that is elsewhere: which, where its volume is, and who uses it.
func TestExplainTellsWhereAClaimIs(t *testing.T) {
	w := storageWorld(t, "n1", "n2")
	claim(w, "data", manifests.LocalClass, "1Gi")
	consumer(w, "first", "data")
	turn(t, w, w.Env())
	at := placeOf(w, "first")
	other := map[string]string{"n1": "n2", "n2": "n1"}[at]
	consumer(w, "second", "data", onNode(other))
	p, err := Explain(w.Store, nil, get(w, "second"), func(string) bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	got := reasonOf(t, p, other, "VolumeBinding")
	if at == "" || !strings.Contains(got, " (its claim data is ") || !strings.Contains(got, " on node "+at+") | default/first (node "+at+")") {
		t.Errorf("first is on %q: %q", at, got)
	}
	claim(w, "huge", manifests.LocalClass, "900Gi")
	consumer(w, "third", "huge")
	if p, err = Explain(w.Store, nil, get(w, "third"), func(string) bool { return true }); err != nil {
		t.Fatal(err)
	}
	if got := reasonOf(t, p, "n1", "VolumeBinding"); !strings.Contains(got, "(needs 900Gi, free ") {
		t.Error(got)
	}
}

// A gated pod's gates are named: whoever set them is to be found.
func TestExplainNamesGates(t *testing.T) {
	w := fixture.New(t)
	w.AddNode("n")
	w.Create(pod("p", func(p *corev1.Pod) {
		p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/quota"}, {Name: "review"}}
	}))
	p, err := Explain(w.Store, nil, get(w, "p"), func(string) bool { return true })
	if want := "Scheduling is blocked due to non-empty scheduling gates: example.com/quota, review"; err != nil || p.Message != want {
		t.Fatalf("%v, %q, want %q", err, p.Message, want)
	}
}
