package cronjob

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/internal/clock"
)

func ptr[T any](v T) *T { return &v }

func newCron(schedule string, set ...func(*batchv1.CronJob)) *batchv1.CronJob {
	t := fixture.Template("work")
	t.Spec.RestartPolicy = corev1.RestartPolicyNever
	c := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "tick"},
		Spec: batchv1.CronJobSpec{Schedule: schedule, JobTemplate: batchv1.JobTemplateSpec{Spec: batchv1.JobSpec{Template: t}}}}
	for _, f := range set {
		f(c)
	}
	return c
}

func zone(name string) func(*batchv1.CronJob) {
	return func(c *batchv1.CronJob) { c.Spec.TimeZone = &name }
}

func mustCalendar(t testing.TB, schedule string, set ...func(*batchv1.CronJob)) calendar {
	t.Helper()
	cal, err := newCalendar(newCron(schedule, set...))
	if err != nil {
		t.Fatal(err)
	}
	return cal
}

func at(s string) time.Time {
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		panic(err)
	}
	return t
}

type world struct {
	*fixture.World
	c *loop.Controller
}

func newWorld(t testing.TB) *world {
	w := fixture.New(t) // 2026-06-01T12:00:00Z
	return &world{w, New(w.Env())}
}

func (w *world) cron() *batchv1.CronJob {
	return fixture.Get[*batchv1.CronJob](w.World, gk, "default", "tick")
}

func (w *world) jobs() []*batchv1.Job {
	return fixture.List[*batchv1.Job](w.World, jobGK, "default")
}

func (w *world) names() (out []string) {
	for _, j := range w.jobs() {
		out = append(out, j.Name)
	}
	slices.Sort(out)
	return out
}

// finish ends all Jobs.
func (w *world) finish(t batchv1.JobConditionType) {
	for _, j := range w.jobs() {
		if done, _ := over(j); done {
			continue
		}
		fixture.Change(w.World, jobGK, "default", j.Name, registry.Status, func(j *batchv1.Job) {
			now := metav1.NewTime(w.Now()).Rfc3339Copy()
			j.Status.StartTime = &now
			target := batchv1.JobFailureTarget
			if t == batchv1.JobComplete {
				target, j.Status.CompletionTime = batchv1.JobSuccessCriteriaMet, &now
			}
			j.Status.Conditions = []batchv1.JobCondition{{Type: target, Status: corev1.ConditionTrue}, {Type: t, Status: corev1.ConditionTrue}}
		})
	}
}

func TestEveryMinuteThenAnOutage(t *testing.T) {
	w := newWorld(t)
	w.Create(newCron("* * * * *"))
	w.Settle(w.c)
	if len(w.jobs()) != 0 {
		t.Fatal("started before its time")
	}
	for i := range 3 {
		w.Advance(time.Minute)
		w.Settle(w.c)
		if len(w.jobs()) != i+1 {
			t.Fatalf("%d jobs after %d minutes", len(w.jobs()), i+1)
		}
		w.finish(batchv1.JobComplete)
	}
	j := w.jobs()[0]
	if j.Annotations[batchv1.CronJobScheduledTimestampAnnotation] != "2026-06-01T12:01:00Z" || !metav1.IsControlledBy(j, w.cron()) ||
		j.Name != fmt.Sprintf("tick-%d", at("2026-06-01T12:01:00Z").Unix()/60) {
		t.Fatalf("%+v", j.ObjectMeta)
	}
	w.Advance(3*time.Hour + 20*time.Second)
	w.c = New(w.Env())
	w.Settle(w.c)
	w.Settle(w.c)
	if st := w.cron().Status; len(st.Active) != 1 || !st.LastScheduleTime.Time.Equal(at("2026-06-01T15:03:00Z")) {
		t.Fatalf("after the outage: %+v", st)
	}
	if n := len(w.jobs()); n != 4 {
		t.Fatalf("%d jobs: not exactly one was caught up with", n)
	}
	w.Advance(time.Minute)
	w.Settle(w.c)
	if st := w.cron().Status; len(st.Active) != 2 {
		t.Fatalf("the next minute: %+v", st)
	}
}

func TestDeadlineAndSuspension(t *testing.T) {
	w := newWorld(t)
	w.Create(newCron("0 * * * *", func(c *batchv1.CronJob) { c.Spec.StartingDeadlineSeconds = ptr(int64(60)) }))
	w.Settle(w.c)
	w.Advance(time.Hour + 61*time.Second)
	w.Settle(w.c)
	w.Settle(w.c)
	if len(w.jobs()) != 0 || len(w.Events.With("MissSchedule")) != 1 {
		t.Fatalf("%d jobs, %d events", len(w.jobs()), len(w.Events.With("MissSchedule")))
	}
	suspend := func(on bool) {
		fixture.Change(w.World, gk, "default", "tick", registry.Main, func(c *batchv1.CronJob) { c.Spec.Suspend = &on })
	}
	suspend(true)
	w.Advance(time.Hour - 61*time.Second)
	w.Settle(w.c)
	if len(w.jobs()) != 0 {
		t.Fatal("started while suspended")
	}
	suspend(false)
	w.Settle(w.c)
	if len(w.jobs()) != 1 {
		t.Fatal("not started after that")
	}
}

func TestConcurrency(t *testing.T) {
	for policy, want := range map[batchv1.ConcurrencyPolicy]int{batchv1.AllowConcurrent: 3, batchv1.ForbidConcurrent: 1, batchv1.ReplaceConcurrent: 1} {
		w := newWorld(t)
		w.Create(newCron("* * * * *", func(c *batchv1.CronJob) { c.Spec.ConcurrencyPolicy = policy }))
		var names []string
		for range 3 {
			w.Advance(time.Minute)
			w.Settle(w.c)
			names = append(names, w.names()...)
		}
		if n := len(w.jobs()); n != want || len(w.cron().Status.Active) != want {
			t.Errorf("%s: %d jobs, %+v", policy, n, w.cron().Status)
		}
		slices.Sort(names)
		started := len(slices.Compact(names))
		if policy == batchv1.ForbidConcurrent && started != 1 || policy == batchv1.ReplaceConcurrent && started != 3 {
			t.Errorf("%s: %d were started", policy, started)
		}
		if policy == batchv1.ForbidConcurrent {
			w.finish(batchv1.JobComplete)
			w.Settle(w.c)
			if len(w.jobs()) != 2 || len(w.Events.With("JobAlreadyActive")) != 2 {
				t.Errorf("%s: not started when the way was free: %d jobs, %d events", policy, len(w.jobs()), len(w.Events.With("JobAlreadyActive")))
			}
		}
	}
}

func TestHistoryLimits(t *testing.T) {
	w := newWorld(t)
	w.Create(newCron("* * * * *", func(c *batchv1.CronJob) {
		c.Spec.SuccessfulJobsHistoryLimit, c.Spec.FailedJobsHistoryLimit = ptr(int32(2)), ptr(int32(1))
	}))
	for i := range 8 {
		w.Advance(time.Minute)
		w.Settle(w.c)
		if i%2 == 0 {
			w.finish(batchv1.JobComplete)
		} else {
			w.finish(batchv1.JobFailed)
		}
	}
	w.Settle(w.c)
	good, bad := 0, 0
	for _, j := range w.jobs() {
		if _, ok := over(j); ok {
			good++
		} else {
			bad++
		}
	}
	if good != 2 || bad != 1 {
		t.Fatalf("%d good, %d bad", good, bad)
	}
	if st := w.cron().Status; len(st.Active) != 0 || !st.LastSuccessfulTime.Time.Equal(at("2026-06-01T12:07:00Z")) {
		t.Fatalf("%+v", st)
	}
}

// Steps of the clock: back, far forward and back again, from the epoch to
// now. Nothing runs twice for one nominal time, and it always goes on.
func TestClockSteps(t *testing.T) {
	w := newWorld(t)
	w.Create(newCron("*/10 * * * *"))
	run := func() int {
		before := len(w.jobs())
		w.Settle(w.c)
		w.Settle(w.c)
		w.finish(batchv1.JobFailed)
		return len(w.jobs()) - before
	}
	fixture.Change(w.World, gk, "default", "tick", registry.Main, func(c *batchv1.CronJob) { c.Spec.FailedJobsHistoryLimit = ptr(int32(1000)) })
	w.Advance(10 * time.Minute)
	if run() != 1 {
		t.Fatal("no first run")
	}
	w.Advance(-time.Hour)
	for range 6 {
		if run() != 0 {
			t.Fatal("replayed after a step back")
		}
		w.Advance(10 * time.Minute)
	}
	w.Advance(10 * time.Minute)
	if run() != 1 {
		t.Fatal("does not go on after a step back")
	}
	w.Advance(24 * time.Hour)
	if run() != 1 {
		t.Fatal("more than one for a day")
	}
	w.Advance(-w.Now().Sub(at("1970-01-01T00:10:00Z")))
	if run() > 1 {
		t.Fatal("1970")
	}
	w.Advance(at("2026-06-03T12:00:00Z").Sub(w.Now()))
	if run() != 1 {
		t.Fatal("more than one for 56 years")
	}
	w.Advance(2 * 365 * 24 * time.Hour)
	run()
	w.Advance(-2 * 365 * 24 * time.Hour) // the stamp is two years ahead
	w.Advance(10 * time.Minute)
	w.Advance(10 * time.Minute)
	run()
	w.Advance(10 * time.Minute)
	if run() > 1 {
		t.Fatal("more than one")
	}
	seen := map[string]bool{}
	for _, j := range w.jobs() {
		nominal := j.Annotations[batchv1.CronJobScheduledTimestampAnnotation]
		if seen[nominal] {
			t.Fatalf("%s twice", nominal)
		}
		seen[nominal] = true
	}
}

// A stamp that lies years ahead does not stop the schedule.
func TestStampFarAhead(t *testing.T) {
	c := newCron("* * * * *")
	c.CreationTimestamp = metav1.NewTime(at("2026-01-01T00:00:00Z"))
	cal := mustCalendar(t, c.Spec.Schedule)
	now := at("2026-06-01T12:00:30Z")
	c.Status.LastScheduleTime = ptr(metav1.NewTime(now.Add(2 * 365 * 24 * time.Hour)))
	if d := decide(c, cal, 0, now, now); !d.start.IsZero() || !d.next.Equal(at("2026-06-01T12:01:00Z")) {
		t.Fatalf("%+v", d)
	}
	if d := decide(c, cal, 0, now, now.Add(time.Minute)); !d.start.Equal(at("2026-06-01T12:01:00Z")) {
		t.Fatalf("%+v", d)
	}
	c.Status.LastScheduleTime = ptr(metav1.NewTime(now.Add(time.Hour)))
	if d := decide(c, cal, 0, now, now.Add(59*time.Minute)); !d.start.IsZero() || !d.next.Equal(at("2026-06-01T13:01:00Z")) {
		t.Fatalf("%+v", d)
	}
}

func TestClockThatJumpedStartsNothing(t *testing.T) {
	w := newWorld(t)
	jumped := true
	env := w.Env()
	env.Trust = func() error {
		if jumped {
			return errors.New("jumped")
		}
		return nil
	}
	w.c = New(env)
	w.Create(newCron("* * * * *"))
	w.Advance(2 * 365 * 24 * time.Hour)
	w.Settle(w.c)
	w.Settle(w.c)
	if len(w.jobs()) != 0 || len(w.Events.With("ClockJumped")) != 1 {
		t.Fatalf("%d jobs", len(w.jobs()))
	}
	w.Advance(-2 * 365 * 24 * time.Hour)
	w.Advance(time.Minute)
	jumped = false
	w.Settle(w.c)
	if n := w.names(); len(n) != 1 || n[0] != fmt.Sprintf("tick-%d", at("2026-06-01T12:01:00Z").Unix()/60) {
		t.Fatal(n)
	}
}

// Killed at any write: what was stamped is made, once.
func TestStampComesFirst(t *testing.T) {
	for n := range 4 {
		w := newWorld(t)
		w.Create(newCron("* * * * *"))
		w.Advance(time.Minute)
		env := w.Killed(n, nil)
		w.Try(env, New(env))
		if st := w.cron().Status; len(w.jobs()) > 0 && st.LastScheduleTime == nil {
			t.Fatalf("%d writes: a job without a stamp", n)
		}
		w.c = New(w.Env())
		w.Settle(w.c)
		st := w.cron().Status
		if len(w.jobs()) != 1 || len(st.Active) != 1 || st.Active[0].UID != w.jobs()[0].UID {
			t.Fatalf("%d writes: %d jobs, %+v", n, len(w.jobs()), st)
		}
	}
}

// However wild the clock and the kills are: one Job at most for each nominal
// time, and no more than one start a look.
func TestAtMostOncePerTime(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(t)
		schedule := rapid.SampledFrom([]string{"* * * * *", "*/5 * * * *", "30 1,2 * * *", "@every 2m"}).Draw(rt, "schedule")
		w.Create(newCron(schedule, zone("Europe/Berlin"), func(c *batchv1.CronJob) { c.Spec.FailedJobsHistoryLimit = ptr(int32(0)) }))
		ever := map[string]string{} // nominal time -> uid
		var broken error
		check := func() {
			for _, j := range w.jobs() {
				nominal := j.Annotations[batchv1.CronJobScheduledTimestampAnnotation]
				if uid, ok := ever[nominal]; ok && uid != string(j.UID) {
					broken = fmt.Errorf("%s was started twice", nominal)
				}
				ever[nominal] = string(j.UID)
			}
		}
		for range rapid.IntRange(5, 30).Draw(rt, "steps") {
			switch rapid.IntRange(0, 3).Draw(rt, "step") {
			case 0:
				w.Advance(time.Duration(rapid.IntRange(1, 240).Draw(rt, "minutes")) * time.Minute)
			case 1:
				w.Advance(-time.Duration(rapid.IntRange(1, 12*60).Draw(rt, "back")) * time.Minute)
			case 2:
				w.finish(batchv1.JobFailed)
			case 3:
				before := len(ever)
				env := w.Killed(rapid.IntRange(0, 5).Draw(rt, "writes"), check)
				w.Try(env, New(env))
				if len(ever) > before+1 {
					rt.Fatalf("%d starts in one look", len(ever)-before)
				}
			}
			if broken != nil {
				rt.Fatal(broken)
			}
		}
	})
}

func TestStartCap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c startCap
		for range capStarts {
			if c.wait(time.Now()) != 0 {
				t.Fatal("held back too early")
			}
			c.note(time.Now())
			time.Sleep(time.Second)
		}
		if d := c.wait(time.Now()); d != capWindow-capStarts*time.Second {
			t.Fatal(d)
		}
		time.Sleep(capWindow - capStarts*time.Second)
		if c.wait(time.Now()) != 0 {
			t.Fatal("held back for ever")
		}
	})
}

// A schedule that asks for a start each second is held to the cap.
func TestCapHolds(t *testing.T) {
	w := newWorld(t)
	w.Create(newCron("* * * * *", func(c *batchv1.CronJob) { c.Spec.FailedJobsHistoryLimit = ptr(int32(1000)) }))
	for range 50 { // the wall clock races; time itself stands
		w.Advance(time.Minute)
		w.Settle(w.c)
		w.finish(batchv1.JobFailed)
	}
	if n := len(w.jobs()); n != capStarts {
		t.Fatalf("%d starts", n)
	}
	if len(w.Events.With("TooManyStarts")) != 1 {
		t.Fatal("not said")
	}
}

// In virtual time, with the real loop: each run at its second.
func TestRunsByTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		env := w.Env()
		env.Clock = clock.System
		c := newCron("*/3 * * * *", func(c *batchv1.CronJob) { c.Spec.FailedJobsHistoryLimit = ptr(int32(1000)) })
		w.Create(c)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- loop.Run(ctx, env, nil, New(env)) }()
		// The object was made in 2026 by the fixture's clock; the bubble begins
		// in 2000: a stamp that far ahead counts as now.
		for i := range 4 {
			time.Sleep(3 * time.Minute)
			synctest.Wait()
			if n := len(w.jobs()); n != i+1 {
				t.Errorf("%d jobs after %d minutes", n, 3*(i+1))
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

// The times of @every are counted from the stamp: looking at the object puts
// none of them off.
func TestEveryIsNotPutOffByLooks(t *testing.T) {
	cal, err := newCalendar(&batchv1.CronJob{Spec: batchv1.CronJobSpec{Schedule: "@every 1m"}})
	if err != nil {
		t.Fatal(err)
	}
	start := at("2026-06-01T12:00:10Z")
	c := &batchv1.CronJob{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(start)}, Spec: batchv1.CronJobSpec{Schedule: "@every 1m"}}
	for _, look := range []time.Duration{0, 25 * time.Second, 59 * time.Second} {
		if d := decide(c, cal, 0, start, start.Add(look)); !d.start.IsZero() || !d.next.Equal(start.Add(time.Minute)) {
			t.Errorf("after %s: %+v", look, d)
		}
	}
	if d := decide(c, cal, 0, start, start.Add(85*time.Second)); !d.start.Equal(start.Add(time.Minute)) || !d.next.Equal(start.Add(2*time.Minute)) {
		t.Errorf("late: %+v", d)
	}
	if d := decide(c, cal, 0, start, start.Add(-time.Hour)); !d.start.IsZero() || !d.next.Equal(start.Add(time.Minute)) {
		t.Errorf("a clock put back: %+v", d)
	}
}
