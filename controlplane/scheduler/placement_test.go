package scheduler

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
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
		"kept":    "InterPodAffinity: node(s) didn't match pod anti-affinity rules",
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
