package disruption

import (
	"context"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/intstr"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/deployment"
	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/replicaset"
	"github.com/dunlin-project/dunlin/controlplane/eviction"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// From any state, whoever dies between any two writes, the evictor too:
// evictions never leave fewer healthy pods than the budget asks for, and once
// nobody dies any more the budget allows again what it shall.
func TestFloorHoldsThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.Int32Range(1, 5).Draw(rt, "replicas")
		least := rapid.IntRange(0, int(n)).Draw(rt, "least")
		w := newWorld(t, n, budget(minAvailable(intstr.FromInt(least))))
		healthy := func() (k int) {
			for _, p := range w.pods() {
				if p.DeletionTimestamp == nil && isReady(p) {
					k++
				}
			}
			return k
		}
		for range rapid.IntRange(5, 30).Draw(rt, "steps") {
			pods := w.pods()
			switch rapid.IntRange(0, 6).Draw(rt, "step") {
			case 0, 1, 2:
				if len(pods) == 0 {
					continue
				}
				p := pods[rapid.IntRange(0, len(pods)-1).Draw(rt, "which")]
				before, serves := healthy(), p.DeletionTimestamp == nil && isReady(p)
				store := &fixture.Mortal{Store: w.Store, Left: rapid.IntRange(0, 4).Draw(rt, "writes")}
				err := eviction.Evict(context.Background(), store, "default", p.Name, registry.DeleteOptions{}, w.Now)
				if after := healthy(); serves && after < before && after < least {
					rt.Fatalf("the eviction of %s (%v) leaves %d healthy pods of at least %d", p.Name, err, after, least)
				}
			case 3:
				env := w.Killed(rapid.IntRange(0, 4).Draw(rt, "writes"), nil)
				w.Try(env, deployment.New(env), replicaset.New(env), New(env))
			case 4:
				w.BindAll("n")
			case 5:
				w.Report(nil)
			case 6:
				if len(pods) > 0 {
					p := pods[rapid.IntRange(0, len(pods)-1).Draw(rt, "sick")]
					if p.Spec.NodeName != "" && p.DeletionTimestamp == nil {
						w.SetReady(p, false)
						w.Settle(New(w.Env())) // the figure is of the pods as they are
					}
				}
			}
		}
		// Evictions that died half-way are forgotten in time.
		for range 4 {
			w.Advance(deletionTimeout)
			w.turn()
		}
		if st := w.status(); int(st.DisruptionsAllowed) != int(n)-least || len(st.DisruptedPods) != 0 || st.CurrentHealthy != n {
			rt.Fatalf("%d replicas, at least %d: %+v", n, least, st)
		}
		for _, p := range w.pods() { // and lets all go, one after the other
			for try := 0; ; try++ {
				err := w.evict(p.Name)
				if err == nil || apierrors.IsNotFound(err) {
					break
				}
				if least == int(n) && apierrors.IsTooManyRequests(err) {
					return
				}
				if try == 10 {
					rt.Fatal(fmt.Errorf("eviction of %s: %w", p.Name, err))
				}
				w.turn()
			}
		}
	})
}

func isReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
