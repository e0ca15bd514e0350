package sweep

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

func newWorld(t testing.TB) *fixture.World {
	w := fixture.New(t)
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: manifests.NodeLeaseNamespace}})
	return w
}

func event(w *fixture.World, name string, about corev1.ObjectReference) {
	w.Create(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, InvolvedObject: about, Reason: "R", Type: corev1.EventTypeNormal,
		FirstTimestamp: metav1.NewTime(w.Now()), LastTimestamp: metav1.NewTime(w.Now()), Count: 1})
}

func lease(w *fixture.World, node string) {
	w.Create(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: manifests.NodeLeaseNamespace, Name: node}})
}

func about(p *corev1.Pod) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID}
}

func pod(w *fixture.World, name string) *corev1.Pod {
	return w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: fixture.Template("x").Spec}).(*corev1.Pod)
}

// left are the events and node Leases that there are.
func left(w *fixture.World) (out []string) {
	for _, e := range fixture.List[*corev1.Event](w, eventGK, "") {
		out = append(out, e.Name)
	}
	for _, l := range fixture.List[*coordinationv1.Lease](w, leaseGK, manifests.NodeLeaseNamespace) {
		out = append(out, "lease of "+l.Name)
	}
	slices.Sort(out)
	return out
}

func run(t *testing.T, env loop.Env) time.Duration {
	t.Helper()
	again, err := New(env).Reconcile(context.Background(), state.Key{})
	if err != nil {
		t.Fatal(err)
	}
	return again
}

func TestOnlyWhatIsAboutTheGone(t *testing.T) {
	w := newWorld(t)
	w.AddNode("n")
	lease(w, "n")
	lease(w, "was")
	lives, goes := pod(w, "lives"), pod(w, "goes")
	event(w, "lives", about(lives))
	event(w, "gone", about(goes))
	event(w, "unknown-kind", corev1.ObjectReference{APIVersion: "example.com/v1", Kind: "Thing", Name: "t"})
	event(w, "node", corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: "n", UID: "n"})
	event(w, "gone-node", corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: "was", UID: "was"})
	w.Delete(fixture.Pod, "default", "goes", metav1.DeletePropagationBackground)
	run(t, w.Env())
	all := []string{"gone", "gone-node", "lease of n", "lives", "node", "unknown-kind"}
	if got := left(w); !slices.Equal(got, all) {
		t.Fatalf("too early for events: %v", got)
	}
	w.Advance(keepEvents + time.Second)
	env := w.Env()
	env.Trust = func() error { return fmt.Errorf("it jumped") }
	run(t, env)
	if got := left(w); !slices.Equal(got, all) {
		t.Fatalf("by a clock that nobody trusts: %v", got)
	}
	run(t, w.Env())
	if got := left(w); !slices.Equal(got, []string{"lease of n", "lives", "node", "unknown-kind"}) {
		t.Fatal(got)
	}
}

// However much there is, one run removes so much, and the next goes on.
func TestRunsAreBounded(t *testing.T) {
	w := newWorld(t)
	for i := range 2*most + 1 {
		event(w, fmt.Sprintf("e%d", i), corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: "default", Name: "gone", UID: "gone-uid"})
	}
	w.Advance(keepEvents + time.Second)
	for _, want := range []int{most + 1, 1, 0} {
		again := run(t, w.Env())
		if got := len(left(w)); got != want || (again > 0) != (want > 0) {
			t.Fatalf("%d left, %d expected; again after %s", got, want, again)
		}
	}
}

// Wherever the leader dies, nothing goes that is about what lives, and the
// next one finishes.
func TestThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(t)
		keep := []string{}
		for i := range rapid.IntRange(1, 8).Draw(rt, "objects") {
			name := fmt.Sprintf("p%d", i)
			event(w, name, about(pod(w, name)))
			w.AddNode(name)
			lease(w, name)
			if rapid.Bool().Draw(rt, "goes") {
				w.Delete(fixture.Pod, "default", name, metav1.DeletePropagationBackground)
				w.Delete(fixture.Node, "", name, metav1.DeletePropagationBackground)
			} else {
				keep = append(keep, name, "lease of "+name)
			}
		}
		w.Advance(keepEvents + time.Second)
		slices.Sort(keep)
		check := func() {
			now := left(w)
			for _, k := range keep {
				if !slices.Contains(now, k) {
					rt.Fatalf("%s was removed", k)
				}
			}
		}
		for range rapid.IntRange(1, 4).Draw(rt, "leaders") {
			env := w.Killed(rapid.IntRange(0, 3).Draw(rt, "writes"), nil)
			_, _ = New(env).Reconcile(context.Background(), state.Key{}) // it is killed
			check()
		}
		run(t, w.Env())
		if got := left(w); !slices.Equal(got, keep) {
			rt.Fatalf("left: %v, want %v", got, keep)
		}
	})
}
