package statefulset

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// TestMadeAnewWhileItsPodsEnd: a set that was deleted and made anew says which
// pods of before it waits for, where, and, once their node is silent, what to
// do; it does not try again and again meanwhile.
func TestMadeAnewWhileItsPodsEnd(t *testing.T) {
	w := newWorld(t)
	w.Create(newSet(2, parallel))
	w.turns(1, nil)
	before := map[string]bool{}
	for _, p := range w.pods() {
		before[string(p.UID)] = true
	}
	w.Silent["n"] = true
	w.Delete(gk, "default", "db", metav1.DeletePropagationBackground)
	for _, p := range w.pods() {
		fixture.Change(w.World, fixture.Pod, "default", p.Name, registry.Main, func(p *corev1.Pod) { // as if the set were gone already
			p.OwnerReferences[0].UID = "earlier"
		})
		w.Delete(fixture.Pod, "default", p.Name, "")
	}
	w.Create(newSet(2, parallel))
	w.turns(3, nil)
	is := func(typ appsv1.StatefulSetConditionType, says ...string) {
		t.Helper()
		c := w.get().Status.Conditions
		if len(c) != 1 || c[0].Type != typ {
			t.Fatalf("want %s: %+v", typ, c)
		}
		for _, s := range says {
			if !strings.Contains(c[0].Message, s) {
				t.Fatalf("want %q in %q", s, c[0].Message)
			}
		}
		if n := len(w.Events.With(string(typ))); n != 1 {
			t.Fatalf("%d events %s", n, typ)
		}
	}
	is(NamesTaken, "the earlier pod db-0 is still being stopped on node n", "pod db-1")
	for _, p := range w.pods() {
		fixture.Change(w.World, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) { lost.SetNotReady(&p.Status, "n", w.Now()) })
	}
	w.turns(3, nil)
	is(NodesAway, "1 node(s) are offline", "db-0 (an earlier pod of that name, node n)", "db-1 (an earlier", "dunlin node declare-dead")
	if e := w.Events.With("FailedCreate"); len(e) != 0 {
		t.Fatalf("%d events FailedCreate: %+v", len(e), e)
	}
	for _, p := range w.pods() {
		if !before[string(p.UID)] {
			t.Fatalf("%s twice", p.Name)
		}
	}
	w.Silent["n"] = false
	for _, p := range w.pods() { // the node is back
		fixture.Change(w.World, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) { lost.ClearStatus(&p.Status, w.Now()) })
	}
	w.turns(2, nil)
	if st := w.get().Status; st.ReadyReplicas != 2 || len(st.Conditions) != 0 {
		t.Fatalf("%+v", st)
	}
}

// TestNameOfAnothersPod: it is told once, is no failure that is tried again
// each second, and its end is enough for the set to go on.
func TestNameOfAnothersPod(t *testing.T) {
	w := newWorld(t)
	tpl := fixture.Template("other")
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "db-0", Labels: tpl.Labels}, Spec: tpl.Spec})
	w.Create(newSet(1))
	for range 5 {
		w.Advance(recheck)
		w.Settle(w.c)
	}
	c := w.get().Status.Conditions
	if len(c) != 1 || c[0].Type != NamesTaken || !strings.Contains(c[0].Message, "pod db-0 exists and is not of this set (it has no controller): delete it") ||
		len(w.Events.With("NamesTaken")) != 1 || len(w.Events.With("FailedCreate")) != 0 {
		t.Fatalf("%+v, events %+v %+v", c, w.Events.With("NamesTaken"), w.Events.With("FailedCreate"))
	}
	rec, ok := w.Machine.Snapshot().Get(state.Key{Kind: "Pod", Namespace: "default", Name: "db-0"})
	var woken []string
	for _, s := range w.c.Sources {
		if ok && s.Kind == "Pod" {
			s.Keys(state.Event{Type: state.Deleted, Record: rec}, func(k state.Key) { woken = append(woken, k.Name) })
		}
	}
	if !slices.Equal(woken, []string{"db"}) {
		t.Fatalf("the pod's end wakes %v", woken)
	}
	zero := int64(0)
	if _, _, err := w.Store.Delete(t.Context(), fixture.Pod, "default", "db-0", registry.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	w.Settle(w.c)
	if p := fixture.Get[*corev1.Pod](w.World, fixture.Pod, "default", "db-0"); !metav1.IsControlledBy(p, w.get()) || len(w.get().Status.Conditions) != 0 {
		t.Fatalf("%+v, %+v", p.OwnerReferences, w.get().Status.Conditions)
	}
}
