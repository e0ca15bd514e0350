package cronjob

import (
	"slices"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A schedule of each second starts one Job a minute, writes the status no
// more often than that takes, and says once that runs are left out, also while
// the Job before still runs.
func TestEverySecond(t *testing.T) {
	for _, policy := range []batchv1.ConcurrencyPolicy{batchv1.AllowConcurrent, batchv1.ForbidConcurrent, batchv1.ReplaceConcurrent} {
		w := newWorld(t)
		w.Create(newCron("@every 1s", func(c *batchv1.CronJob) {
			c.Spec.FailedJobsHistoryLimit, c.Spec.ConcurrencyPolicy = ptr(int32(0)), policy // a name is free again at once
		}))
		versions, started := map[string]bool{}, map[string]bool{}
		for i := range 5 * 60 {
			w.Advance(time.Second)
			w.Settle(w.c)
			versions[w.cron().ResourceVersion] = true
			for _, j := range w.jobs() {
				started[string(j.UID)] = true
			}
			if i%60 == 50 && i < 180 {
				w.finish(batchv1.JobFailed)
				w.Settle(w.c)
			}
		}
		// 12:00 to 12:05; with Forbid the one of 12:03 goes on.
		want := map[batchv1.ConcurrencyPolicy]int{batchv1.ForbidConcurrent: 4}[policy]
		if want == 0 {
			want = 6
		}
		if len(started) != want || len(versions) > 3*want {
			t.Errorf("%s: %d started, %d versions", policy, len(started), len(versions))
		}
		if n, blocked := len(w.Events.With("TooFrequent")), len(w.Events.With("JobAlreadyActive")); n != 1 || blocked > 5 {
			t.Errorf("%s: %d and %d events", policy, n, blocked)
		}
	}
}

// Only what shares a minute is left out, and nothing waits longer for it.
func TestMinutesOfEvery(t *testing.T) {
	start := at("2026-06-01T12:00:00Z")
	for every, want := range map[string][]string{
		"40s":   {"12:00:40", "12:01:20", "12:02:00", "12:03:20"},
		"1m":    {"12:01:00", "12:02:00", "12:03:00", "12:04:00"},
		"1m30s": {"12:01:30", "12:03:00", "12:04:30", "12:06:00"},
		"25s":   {"12:00:25", "12:01:15", "12:02:05", "12:03:20"},
	} {
		cal := mustCalendar(t, "@every "+every)
		c := newCron("@every " + every)
		c.CreationTimestamp = metav1.NewTime(start)
		var got []string
		for now := start; len(got) < len(want); {
			d := decide(c, cal, 0, now, now)
			if !d.start.IsZero() {
				got = append(got, d.start.Format(time.TimeOnly))
				c.Status.LastScheduleTime = ptr(metav1.NewTime(d.start))
				continue
			}
			if !d.next.After(now) {
				t.Fatalf("%s: at %s: %+v", every, now, d)
			}
			now = d.next
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", every, got, want)
		}
	}
}
