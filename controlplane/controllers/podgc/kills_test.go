package podgc

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Of any pods on nodes that stay or vanish, wherever the leader dies: pods
// that live on nodes that stay are never touched, nor are those of a
// StatefulSet whose node is only gone; in the end the others of vanished nodes
// are gone, as is all but the newest of what is over.
func TestTakesOnlyWhatIsOver(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := fixture.New(t)
		w.AddNode("stays")
		w.AddNode("goes")
		yes := true
		safe, theirs := map[string]bool{}, map[string]bool{}
		over := 0
		for i := range rapid.IntRange(1, 8).Draw(rt, "pods") {
			name := fmt.Sprintf("p%d", i)
			node := rapid.SampledFrom([]string{"", "stays", "goes"}).Draw(rt, "node")
			only, ended := rapid.Bool().Draw(rt, "stateful"), node != "" && rapid.Bool().Draw(rt, "over")
			addPod(w, name, func(p *corev1.Pod) {
				p.Spec.NodeName = node
				if only {
					p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "StatefulSet", Name: "db", UID: "db", Controller: &yes}}
				}
			})
			if ended {
				fixture.Change(w, fixture.Pod, "default", name, registry.Status, func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })
			}
			if ended && node == "stays" {
				over++
			}
			safe[name] = node == "" || !ended && (node == "stays" || only)
			theirs[name] = node == "goes" && only && ended // the StatefulSet's to remove
			w.Advance(time.Second)
		}
		left := func() map[string]bool {
			out := map[string]bool{}
			for _, p := range fixture.List[*corev1.Pod](w, fixture.Pod, "default") {
				out[p.Name] = p.DeletionTimestamp == nil && (p.Status.Phase != corev1.PodFailed)
			}
			return out
		}
		var broken error
		check := func() {
			now := left()
			for name, s := range safe {
				if s && !now[name] {
					broken = fmt.Errorf("%s was taken", name)
				}
			}
		}
		if rapid.Bool().Draw(rt, "vanishes") {
			w.Delete(fixture.Node, "", "goes", "")
		}
		for range rapid.IntRange(1, 8).Draw(rt, "leaders") {
			env := w.Killed(rapid.IntRange(0, 4).Draw(rt, "writes"), check)
			c := New(env, Config{KeepTerminated: 2, Quarantine: time.Nanosecond})
			for range 2 { // the quarantine begins anew with each leader
				_, _ = c.Reconcile(context.Background(), state.Key{Name: "pods"}) // it is killed
			}
		}
		if broken != nil {
			rt.Fatal(broken)
		}
		if _, err := w.Store.Get(fixture.Node, "", "goes"); err == nil {
			w.Delete(fixture.Node, "", "goes", "")
		}
		c := New(w.Env(), Config{KeepTerminated: 2, Quarantine: time.Nanosecond})
		for range 3 {
			if _, err := c.Reconcile(context.Background(), state.Key{Name: "pods"}); err != nil {
				rt.Fatal(err)
			}
		}
		check()
		if broken != nil {
			rt.Fatal(broken)
		}
		unsafe := 0
		for name := range left() {
			if !safe[name] && !theirs[name] {
				unsafe++
			}
		}
		if unsafe > min(over, 2) {
			rt.Fatalf("%d pods are left that are over or stranded: %v", unsafe, left())
		}
	})
}
