package job

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/controllers/gc"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

func ptr[T any](v T) *T { return &v }

func newJob(completions, parallelism int32, set ...func(*batchv1.Job)) *batchv1.Job {
	t := fixture.Template("work")
	t.Spec.RestartPolicy = corev1.RestartPolicyNever
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "work"},
		Spec: batchv1.JobSpec{Completions: &completions, Parallelism: &parallelism, Template: t}}
	for _, f := range set {
		f(j)
	}
	return j
}

func byIndex(j *batchv1.Job) { j.Spec.CompletionMode = ptr(batchv1.IndexedCompletion) }

type world struct {
	*fixture.World
	c *loop.Controller
}

func newWorld(t testing.TB) *world {
	w := fixture.New(t)
	w.AddNode("n")
	return &world{w, New(w.Env())}
}

func (w *world) job() *batchv1.Job { return fixture.Get[*batchv1.Job](w.World, gk, "default", "work") }

func (w *world) pods() []*corev1.Pod {
	return fixture.List[*corev1.Pod](w.World, fixture.Pod, "default")
}

// live are the pods that are neither over nor being deleted.
func (w *world) live() (out []*corev1.Pod) {
	for _, p := range w.pods() {
		if p.DeletionTimestamp == nil && p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed {
			out = append(out, p)
		}
	}
	return out
}

// turn lets the controller and the node work.
func (w *world) turn() {
	w.Settle(w.c)
	w.BindAll("n")
	w.Report(nil)
	w.Settle(w.c)
}

func has1(st batchv1.JobStatus, t batchv1.JobConditionType, reason string) bool {
	c := condition(&st, t)
	return isTrue(c) && c.Reason == reason
}

func TestRunsToCompletion(t *testing.T) {
	w := newWorld(t)
	w.Create(newJob(5, 2))
	for done := range 5 {
		w.turn()
		live := w.live()
		if len(live) != min(2, 5-done) {
			t.Fatalf("%d pods with %d of 5 done", len(live), done)
		}
		if st := w.job().Status; st.Active != int32(len(live)) || *st.Ready != int32(len(live)) || st.Succeeded != int32(done) || st.StartTime == nil {
			t.Fatalf("%+v", st)
		}
		w.Finish(live[0], 0)
	}
	w.turn()
	j := w.job()
	if !has1(j.Status, batchv1.JobComplete, batchv1.JobReasonCompletionsReached) || !has1(j.Status, batchv1.JobSuccessCriteriaMet, batchv1.JobReasonCompletionsReached) ||
		j.Status.Succeeded != 5 || j.Status.Active != 0 || j.Status.CompletionTime == nil {
		t.Fatalf("%+v", j.Status)
	}
	for _, p := range w.pods() {
		if len(p.Finalizers) != 0 {
			t.Fatalf("%s is still held", p.Name)
		}
	}
	if len(w.Events.With("Completed")) != 1 {
		t.Fatal("events")
	}
	before := w.Machine.Snapshot().ResourceVersion()
	w.Settle(New(w.Env()))
	if w.Machine.Snapshot().ResourceVersion() != before {
		t.Fatal("writes at rest")
	}
}

func TestIndexes(t *testing.T) {
	w := newWorld(t)
	w.Create(newJob(4, 4, byIndex))
	w.turn()
	var hosts []string
	for _, p := range w.live() {
		hosts = append(hosts, p.Spec.Hostname)
		if p.Spec.Containers[0].Env[0].Name != indexVariable || p.Labels[batchv1.JobCompletionIndexAnnotation] != p.Annotations[batchv1.JobCompletionIndexAnnotation] {
			t.Fatalf("%+v", p.ObjectMeta)
		}
	}
	slices.Sort(hosts)
	if strings.Join(hosts, " ") != "work-0 work-1 work-2 work-3" {
		t.Fatal(hosts)
	}
	for _, p := range w.live() {
		if p.Spec.Hostname != "work-1" {
			w.Finish(p, 0)
		}
	}
	w.turn()
	if st := w.job().Status; st.CompletedIndexes != "0,2,3" || st.Succeeded != 3 {
		t.Fatalf("%+v", st)
	}
	w.Finish(w.live()[0], 0)
	w.turn()
	if st := w.job().Status; st.CompletedIndexes != "0-3" || !has1(st, batchv1.JobComplete, batchv1.JobReasonCompletionsReached) {
		t.Fatalf("%+v", st)
	}
}

// Failed pods are replaced with growing delays until the limit.
func TestBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.Create(newJob(1, 1, func(j *batchv1.Job) { j.Spec.BackoffLimit = ptr(int32(2)) }))
		for i, wait := range []time.Duration{10 * time.Second, 20 * time.Second} {
			w.turn()
			w.Finish(w.live()[0], 1)
			w.turn()
			if n := len(w.live()); n != 0 {
				t.Fatalf("failure %d: replaced at once", i+1)
			}
			time.Sleep(wait - time.Second)
			w.turn()
			if n := len(w.live()); n != 0 {
				t.Fatalf("failure %d: replaced too early", i+1)
			}
			time.Sleep(2 * time.Second)
		}
		w.turn()
		w.Finish(w.live()[0], 1)
		w.turn()
		if st := w.job().Status; st.Failed != 3 || !has1(st, batchv1.JobFailed, batchv1.JobReasonBackoffLimitExceeded) ||
			!has1(st, batchv1.JobFailureTarget, batchv1.JobReasonBackoffLimitExceeded) {
			t.Fatalf("%+v", st)
		}
	})
}

func TestBackOffOfEachIndex(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.Create(newJob(2, 2, byIndex, func(j *batchv1.Job) { j.Spec.BackoffLimitPerIndex = ptr(int32(1)) }))
		w.turn()
		for round := range 2 {
			for _, p := range w.live() {
				if p.Spec.Hostname == "work-0" {
					if got := p.Annotations[batchv1.JobIndexFailureCountAnnotation]; got != fmt.Sprint(round) {
						t.Fatalf("failure count %q in round %d", got, round)
					}
					w.Finish(p, 1)
				}
			}
			w.turn()
			time.Sleep(time.Minute)
			w.turn()
		}
		st := w.job().Status
		if st.FailedIndexes == nil || *st.FailedIndexes != "0" || finished(&st) != nil || len(w.live()) != 1 {
			t.Fatalf("%+v, %d pods", st, len(w.live()))
		}
		w.Finish(w.live()[0], 0)
		w.turn()
		if st := w.job().Status; !has1(st, batchv1.JobFailed, batchv1.JobReasonFailedIndexes) || st.CompletedIndexes != "1" {
			t.Fatalf("%+v", st)
		}
	})
}

func TestPodFailurePolicy(t *testing.T) {
	in := func(values ...int32) *batchv1.PodFailurePolicyOnExitCodesRequirement {
		return &batchv1.PodFailurePolicyOnExitCodesRequirement{Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: values}
	}
	policy := &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{
		{Action: batchv1.PodFailurePolicyActionIgnore, OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}},
		{Action: batchv1.PodFailurePolicyActionFailJob, OnExitCodes: in(42)},
		{Action: batchv1.PodFailurePolicyActionFailIndex, OnExitCodes: in(43)},
		{Action: batchv1.PodFailurePolicyActionCount, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{
			ContainerName: ptr("c"), Operator: batchv1.PodFailurePolicyOnExitCodesOpNotIn, Values: []int32{1}}},
	}}
	pod := func(code int32, conditions ...corev1.PodCondition) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"}, Status: corev1.PodStatus{Conditions: conditions, ContainerStatuses: []corev1.ContainerStatus{
			{Name: "c", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code}}}}}}
	}
	for code, want := range map[int32]string{42: "true Container c for pod default/p failed with exit code 42 matching FailJob rule at index 1 false",
		43: "true  true", 7: "true  false", 1: "true  false"} {
		counts, message, index := match(policy, pod(code))
		if got := fmt.Sprint(counts, " ", message, " ", index); got != want {
			t.Errorf("%d: %s", code, got)
		}
	}
	if counts, _, _ := match(policy, pod(42, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue})); counts {
		t.Error("a disruption counts")
	}

	w := newWorld(t)
	w.Create(newJob(3, 3, func(j *batchv1.Job) {
		j.Spec.PodFailurePolicy = policy
		j.Spec.PodFailurePolicy.Rules = policy.Rules[:2]
	}))
	w.turn()
	w.Finish(w.live()[0], 42)
	for range 3 {
		w.turn()
	}
	st := w.job().Status
	if !has1(st, batchv1.JobFailed, batchv1.JobReasonPodFailurePolicy) || st.Failed != 3 || len(w.live()) != 0 {
		t.Fatalf("%+v", st)
	}
}

func TestSuccessPolicyStopsTheRest(t *testing.T) {
	w := newWorld(t)
	w.Create(newJob(3, 3, byIndex, func(j *batchv1.Job) {
		j.Spec.SuccessPolicy = &batchv1.SuccessPolicy{Rules: []batchv1.SuccessPolicyRule{{SucceededIndexes: ptr("0-1"), SucceededCount: ptr(int32(1))}}}
	}))
	w.turn()
	for _, p := range w.live() {
		if p.Spec.Hostname == "work-2" {
			w.Finish(p, 0)
		}
	}
	w.turn()
	if finished(ptr(w.job().Status)) != nil {
		t.Fatal("the wrong index ended it")
	}
	for _, p := range w.live() {
		if p.Spec.Hostname == "work-1" {
			w.Finish(p, 0)
		}
	}
	for range 3 {
		w.turn()
	}
	if st := w.job().Status; !has1(st, batchv1.JobComplete, batchv1.JobReasonSuccessPolicy) || st.CompletedIndexes != "1,2" || len(w.live()) != 0 {
		t.Fatalf("%+v", st)
	}
}

// A suspended Job has no pods, and those that were stopped for it have not
// failed.
func TestSuspendAndResume(t *testing.T) {
	w := newWorld(t)
	w.Create(newJob(2, 2, func(j *batchv1.Job) { j.Spec.BackoffLimit = ptr(int32(0)) }))
	w.turn()
	suspend := func(on bool) {
		fixture.Change(w.World, gk, "default", "work", registry.Main, func(j *batchv1.Job) { j.Spec.Suspend = &on })
	}
	suspend(true)
	for range 3 {
		w.turn()
	}
	if st := w.job().Status; len(w.pods()) != 0 || st.Failed != 0 || st.StartTime != nil || !has1(st, batchv1.JobSuspended, "JobSuspended") || st.Active != 0 {
		t.Fatalf("%d pods, %+v", len(w.pods()), st)
	}
	suspend(false)
	w.turn()
	if st := w.job().Status; len(w.live()) != 2 || st.StartTime == nil || isTrue(condition(&st, batchv1.JobSuspended)) {
		t.Fatalf("%+v", st)
	}
}

// Deadlines and times to live are of the wall clock: while it cannot be
// trusted, nothing ends by them.
func TestDeadlineAndTimeToLive(t *testing.T) {
	w := newWorld(t)
	jumped := true
	env := w.Env()
	env.Trust = func() error {
		if jumped {
			return errors.New("the clock jumped")
		}
		return nil
	}
	w.c = New(env)
	w.Create(newJob(1, 1, func(j *batchv1.Job) {
		j.Spec.ActiveDeadlineSeconds, j.Spec.TTLSecondsAfterFinished = ptr(int64(60)), ptr(int32(100))
	}))
	w.turn()
	w.Advance(2 * 365 * 24 * time.Hour)
	w.turn()
	if len(w.live()) != 1 {
		t.Fatal("ended by a clock that jumped")
	}
	w.Advance(-2 * 365 * 24 * time.Hour)
	jumped = false
	w.turn()
	w.Advance(59 * time.Second)
	w.turn()
	if len(w.live()) != 1 {
		t.Fatal("ended early")
	}
	if after, err := w.c.Reconcile(context.Background(), key()); err != nil || after > time.Second || after <= 0 {
		t.Fatalf("again after %v, %v", after, err)
	}
	w.Advance(time.Second)
	for range 3 {
		w.turn()
	}
	if st := w.job().Status; !has1(st, batchv1.JobFailed, batchv1.JobReasonDeadlineExceeded) || st.Failed != 1 {
		t.Fatalf("%+v", st)
	}
	w.Advance(99 * time.Second)
	w.turn()
	w.job()
	jumped = true
	w.Advance(time.Second)
	w.turn()
	w.job()
	jumped = false
	w.Settle(w.c, gc.New(w.Env()))
	if _, err := w.Store.Get(gk, "default", "work"); err == nil {
		t.Fatal("still there after its time to live")
	}
}

func key() state.Key { return state.Key{Kind: gk.String(), Namespace: "default", Name: "work"} }

// A lost pod is replaced; if it comes back it may end the Job, and two
// successes for the same work are one.
func TestLateSuccessCountsOnce(t *testing.T) {
	for name, finish := range map[string]func(w *world, original, replacement *corev1.Pod){
		"the original":    func(w *world, o, _ *corev1.Pod) { w.Finish(o, 0) },
		"the replacement": func(w *world, _, r *corev1.Pod) { w.Finish(r, 0) },
		"both":            func(w *world, o, r *corev1.Pod) { w.Finish(o, 0); w.Finish(r, 0) },
	} {
		w := newWorld(t)
		w.AddNode("other")
		w.Create(newJob(2, 1))
		w.turn()
		original := w.live()[0]
		fixture.Change(w.World, fixture.Pod, "default", original.Name, registry.Status, func(p *corev1.Pod) { lost.SetStatus(&p.Status, "n", w.Now()) })
		w.Settle(w.c)
		w.BindAll("other")
		w.Report(nil)
		w.Settle(w.c)
		if len(w.live()) != 2 {
			t.Fatalf("%s: %d pods", name, len(w.live()))
		}
		var replacement *corev1.Pod
		for _, p := range w.live() {
			if p.UID != original.UID {
				replacement = p
			}
		}
		if w.job().Status.Active != 1 || replacement.Annotations[replacesAnnotation] != string(original.UID) {
			t.Fatalf("%s: %+v", name, w.job().Status)
		}
		fixture.Change(w.World, fixture.Pod, "default", original.Name, registry.Status, func(p *corev1.Pod) { lost.ClearStatus(&p.Status, w.Now()) })
		finish(w, original, replacement)
		for range 4 {
			w.Settle(w.c)
			w.Report(nil)
		}
		st := w.job().Status
		if st.Succeeded != 1 || finished(&st) != nil || st.Failed != 0 {
			t.Fatalf("%s: %+v", name, st)
		}
		if n := len(w.live()); n != 1 {
			t.Fatalf("%s: %d pods for the rest", name, n)
		}
	}
}

func TestOthersJobsAndDeletedJobs(t *testing.T) {
	w := newWorld(t)
	w.Create(newJob(1, 1, func(j *batchv1.Job) { j.Spec.ManagedBy = ptr("example.com/other") }))
	w.turn()
	if len(w.pods()) != 0 || w.job().Status.StartTime != nil {
		t.Fatal("took another controller's job")
	}
	w.Delete(gk, "default", "work", metav1.DeletePropagationBackground)
	w.Create(newJob(2, 2))
	w.turn()
	if len(w.live()) != 2 {
		t.Fatal("no pods")
	}
	w.Delete(gk, "default", "work", metav1.DeletePropagationBackground)
	for range 3 {
		w.Settle(w.c, gc.New(w.Env()))
		w.Report(nil)
	}
	if n := len(w.pods()); n != 0 {
		t.Fatalf("%d pods of a deleted job are held", n)
	}
}

func TestManage(t *testing.T) {
	pod := func(index int32, created int64, c class) member {
		return member{rec: &state.Record{Header: state.Header{Key: state.Key{Name: fmt.Sprint(index, "-", created)}, NodeName: "n", Phase: "Running", Ready: true, Created: created}},
			index: index, class: c}
	}
	j := newJob(4, 3, byIndex)
	pods := []member{pod(0, 1, active), pod(0, 2, active), pod(9, 1, active), pod(1, 1, failed)}
	p := manage(j, pods, count(j, &batchv1.JobStatus{UncountedTerminatedPods: &batchv1.UncountedTerminatedPods{}}, pods))
	if slices.Sort(p.remove); !slices.Equal(p.remove, []int{1, 2}) {
		t.Errorf("doubles and strangers: %+v", p)
	}
	pods = pods[:1]
	p = manage(j, pods, count(j, &batchv1.JobStatus{CompletedIndexes: "1", UncountedTerminatedPods: &batchv1.UncountedTerminatedPods{}}, pods))
	if !slices.Equal(p.indexes, []int32{2, 3}) || p.create != 2 {
		t.Errorf("missing: %+v", p)
	}
	j = newJob(4, 3, func(j *batchv1.Job) { j.Spec.PodReplacementPolicy = ptr(batchv1.Failed) })
	pods = []member{pod(none, 1, active), pod(none, 2, leaving)}
	if p = manage(j, pods, count(j, &batchv1.JobStatus{UncountedTerminatedPods: &batchv1.UncountedTerminatedPods{}}, pods)); p.create != 1 {
		t.Errorf("replaced before it has ended: %+v", p)
	}
}
