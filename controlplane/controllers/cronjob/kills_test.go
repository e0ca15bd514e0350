package cronjob

import (
	"fmt"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
)

// Jobs end as they will and users delete them, while the leader dies between
// any two writes: with Forbid and Replace never do two run, nothing that runs
// is ended but by Replace, and no history is shorter than its limit for it. In
// the end the newest time has its Job, the status names what runs and nothing
// else, and no history is longer than its limit.
func TestPoliciesThroughKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(t)
		policy := rapid.SampledFrom([]batchv1.ConcurrencyPolicy{batchv1.AllowConcurrent, batchv1.ForbidConcurrent, batchv1.ReplaceConcurrent}).Draw(rt, "policy")
		limits := map[bool]int{true: rapid.IntRange(0, 2).Draw(rt, "successes kept"), false: rapid.IntRange(0, 2).Draw(rt, "failures kept")}
		w.Create(newCron("* * * * *", func(c *batchv1.CronJob) {
			c.Spec.ConcurrencyPolicy = policy
			c.Spec.SuccessfulJobsHistoryLimit, c.Spec.FailedJobsHistoryLimit = ptr(int32(limits[true])), ptr(int32(limits[false]))
		}))
		// seen is what runs, and was so before the leader's last write.
		seen := map[types.UID]string{}
		var broken error
		look := func() map[bool]int {
			ended := map[bool]int{}
			clear(seen)
			for _, j := range w.jobs() {
				if done, well := over(j); done {
					ended[well]++
				} else {
					seen[j.UID] = j.Name
				}
			}
			return ended
		}
		history := look()
		check := func() {
			before := map[types.UID]string{}
			for uid, name := range seen {
				before[uid] = name
			}
			now := look()
			for uid, name := range before {
				if seen[uid] == "" && policy != batchv1.ReplaceConcurrent {
					broken = fmt.Errorf("%s was ended", name)
				}
			}
			if len(seen) > 1 && policy != batchv1.AllowConcurrent {
				broken = fmt.Errorf("%d run at once: %v", len(seen), seen)
			}
			for well, limit := range limits {
				if now[well] < min(limit, history[well]) {
					broken = fmt.Errorf("%d of %d are left that ended well=%v, the limit is %d", now[well], history[well], well, limit)
				}
			}
		}
		for range rapid.IntRange(10, 60).Draw(rt, "steps") {
			switch rapid.IntRange(0, 6).Draw(rt, "step") {
			case 0, 1:
				w.Advance(time.Duration(rapid.IntRange(20, 200).Draw(rt, "seconds")) * time.Second)
			case 2:
				w.finish(rapid.SampledFrom([]batchv1.JobConditionType{batchv1.JobComplete, batchv1.JobFailed}).Draw(rt, "end"))
			case 3:
				if names := w.names(); len(names) > 0 {
					w.Delete(jobGK, "default", rapid.SampledFrom(names).Draw(rt, "a user's"), metav1.DeletePropagationBackground)
				}
			default:
				history = look()
				env := w.Killed(rapid.SampledFrom([]int{99, 0, 1, 2, 3, 4, 99}).Draw(rt, "writes"), check)
				w.Try(env, New(env))
			}
			if broken != nil {
				rt.Fatal(broken)
			}
		}
		w.c = New(w.Env())
		w.Settle(w.c) // also what the last one did not come to
		w.finish(batchv1.JobComplete)
		w.Advance(time.Minute)
		w.Settle(w.c)
		w.atRest(rt, limits)
	})
}

// atRest fails unless the newest time's Job runs, and the status and the
// histories are what they shall be.
func (w *world) atRest(rt *rapid.T, limits map[bool]int) {
	st, newest := fixture.Get[*batchv1.CronJob](w.World, gk, "default", "tick").Status, w.Now().Truncate(time.Minute)
	if st.LastScheduleTime == nil || !st.LastScheduleTime.Time.Equal(newest) {
		rt.Fatalf("the newest time is %v: %+v", newest, st)
	}
	ended := map[bool]int{}
	var running []types.UID
	for _, j := range w.jobs() {
		if done, well := over(j); done {
			ended[well]++
		} else {
			running = append(running, j.UID)
		}
	}
	if len(running) != 1 || len(st.Active) != 1 || st.Active[0].UID != running[0] {
		rt.Fatalf("%v run, the status says %+v", running, st.Active)
	}
	for well, limit := range limits {
		if ended[well] > limit {
			rt.Fatalf("%d are left that ended well=%v, the limit is %d", ended[well], well, limit)
		}
	}
}
