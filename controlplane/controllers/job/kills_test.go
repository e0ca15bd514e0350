package job

import (
	"fmt"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	"pgregory.net/rapid"
)

// Killed between any two writes, whatever the pods do: every success counts
// once, the Job ends, and there are never more pods than its parallelism.
func TestCountsExactlyThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(t)
		n, parallel := rapid.Int32Range(1, 4).Draw(rt, "completions"), rapid.Int32Range(1, 3).Draw(rt, "parallelism")
		isIndexed := rapid.Bool().Draw(rt, "indexed")
		w.Create(newJob(n, parallel, func(j *batchv1.Job) {
			j.Spec.BackoffLimit = ptr(int32(1000))
			if isIndexed {
				byIndex(j)
			}
		}))
		won, failures := 0, 0
		var broken error
		check := func() {
			st := w.job().Status
			if counted := int(st.Succeeded) + len(st.UncountedTerminatedPods.Succeeded); counted > won {
				broken = fmt.Errorf("%d successes counted of %d: %+v", counted, won, st)
			}
			if counted := int(st.Failed) + len(st.UncountedTerminatedPods.Failed); counted > failures {
				broken = fmt.Errorf("%d failures counted of %d: %+v", counted, failures, st)
			}
			if len(w.live()) > int(parallel) {
				broken = fmt.Errorf("%d pods, parallelism %d", len(w.live()), parallel)
			}
		}
		for range rapid.IntRange(5, 30).Draw(rt, "steps") {
			switch live := w.live(); rapid.IntRange(0, 4).Draw(rt, "step") {
			case 0, 1:
				if w.job().Status.UncountedTerminatedPods == nil {
					w.Settle(New(w.Env())) // the first status
				}
				env := w.Killed(rapid.IntRange(0, 5).Draw(rt, "writes"), check)
				w.Try(env, New(env)) // back-off is forgotten with the leader
			case 2:
				w.BindAll("n")
			case 3:
				w.Report(nil)
			case 4:
				if len(live) == 0 {
					break
				}
				p := live[rapid.IntRange(0, len(live)-1).Draw(rt, "which")]
				if p.Spec.NodeName == "" {
					break
				}
				if rapid.IntRange(0, 3).Draw(rt, "fails") == 0 {
					failures++
					w.Finish(p, 1)
				} else {
					won++
					w.Finish(p, 0)
				}
			}
			if broken != nil {
				rt.Fatal(broken)
			}
		}
		for range 4 * n {
			w.c = New(w.Env())
			w.turn()
			for _, p := range w.live() {
				won++
				w.Finish(p, 0)
			}
		}
		w.c = New(w.Env())
		w.turn()
		st := w.job().Status
		if finished(&st) == nil || int(st.Succeeded) != won || int(st.Failed) != failures || st.Succeeded != n {
			rt.Fatalf("%d of %d won, %d failed: %+v", won, n, failures, st)
		}
	})
}
