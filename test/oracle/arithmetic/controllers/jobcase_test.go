package controllers

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

var jobKind = schema.GroupKind{Group: batchv1.GroupName, Kind: "Job"}

// jobCase is a Job and its pods, in any state.
type jobCase struct {
	w    *fixture.World
	now  time.Time // upstream's
	more dice
	job  *batchv1.Job
	pods []*corev1.Pod
}

func newJobCase(t *testing.T, seed uint64, now time.Time) *jobCase {
	d := roll(seed)
	c := &jobCase{w: fixture.New(t), now: now, more: dice{rand.New(rand.NewPCG(seed, 2))}}
	c.w.Advance(now.Sub(c.w.Now()))
	c.w.AddNode("n")
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "j"}, Spec: batchv1.JobSpec{Template: fixture.Template("j"), Suspend: new(bool)}}
	s := &j.Spec
	s.Template.Spec.RestartPolicy = oneOf(d, corev1.RestartPolicyNever, corev1.RestartPolicyNever, corev1.RestartPolicyOnFailure)
	s.Parallelism = new(int32)
	*s.Parallelism = int32(d.r.IntN(7))
	*s.Suspend = d.odds(8)
	if !d.odds(4) {
		s.Completions = new(int32)
		*s.Completions = int32(1 + d.r.IntN(7))
		if d.odds(2) {
			s.CompletionMode = new(batchv1.CompletionMode)
			*s.CompletionMode = batchv1.IndexedCompletion
		}
	}
	if !d.odds(3) {
		s.BackoffLimit = new(int32)
		*s.BackoffLimit = int32(d.r.IntN(5))
	}
	if d.odds(6) {
		s.ActiveDeadlineSeconds = new(int64)
		*s.ActiveDeadlineSeconds = int64(oneOf(d, 60, 100_000))
	}
	if d.odds(3) {
		s.PodReplacementPolicy = new(batchv1.PodReplacementPolicy)
		*s.PodReplacementPolicy = oneOf(d, batchv1.Failed, batchv1.TerminatingOrFailed)
	}
	c.indexed(d, s)
	c.policy(d, s)
	c.w.Create(j)
	c.read()
	for i := range d.r.IntN(9) {
		c.pod(d, i)
	}
	c.read()
	c.status(d)
	c.read()
	return c
}

func isIndexed(s *batchv1.JobSpec) bool {
	return s.CompletionMode != nil && *s.CompletionMode == batchv1.IndexedCompletion
}

func (c *jobCase) indexed(d dice, s *batchv1.JobSpec) {
	if !isIndexed(s) {
		return
	}
	n := *s.Completions
	if d.odds(2) && s.Template.Spec.RestartPolicy == corev1.RestartPolicyNever {
		s.BackoffLimitPerIndex = new(int32)
		*s.BackoffLimitPerIndex = int32(d.r.IntN(3))
		if d.odds(2) {
			s.MaxFailedIndexes = new(int32)
			*s.MaxFailedIndexes = int32(d.r.IntN(int(n) + 1))
		}
	}
	if !d.odds(3) {
		return
	}
	s.SuccessPolicy = &batchv1.SuccessPolicy{}
	for range 1 + d.r.IntN(2) {
		r := batchv1.SuccessPolicyRule{}
		of := n
		if d.odds(2) {
			first := int32(d.r.IntN(int(n)))
			var set manifests.Indexes
			set = set.With(first, min(first+1, n-1), int32(d.r.IntN(int(n))))
			text := set.String()
			r.SucceededIndexes, of = &text, int32(set.Len())
		}
		if r.SucceededIndexes == nil || d.odds(2) {
			r.SucceededCount = new(int32)
			*r.SucceededCount = int32(1 + d.r.IntN(int(of)))
		}
		s.SuccessPolicy.Rules = append(s.SuccessPolicy.Rules, r)
	}
}

// policy makes rules of all actions, over exit codes and conditions.
func (c *jobCase) policy(d dice, s *batchv1.JobSpec) {
	if !d.odds(3) || s.Template.Spec.RestartPolicy != corev1.RestartPolicyNever {
		return
	}
	s.PodReplacementPolicy = nil // Failed by default, and must be
	s.PodFailurePolicy = &batchv1.PodFailurePolicy{}
	for range 1 + d.r.IntN(3) {
		r := batchv1.PodFailurePolicyRule{Action: oneOf(d, batchv1.PodFailurePolicyActionCount, batchv1.PodFailurePolicyActionIgnore, batchv1.PodFailurePolicyActionFailJob)}
		if s.BackoffLimitPerIndex != nil && d.odds(3) {
			r.Action = batchv1.PodFailurePolicyActionFailIndex
		}
		if d.odds(3) {
			r.OnPodConditions = []batchv1.PodFailurePolicyOnPodConditionsPattern{{Type: oneOf(d, corev1.DisruptionTarget, "example.com/Broken"), Status: oneOf(d, corev1.ConditionTrue, corev1.ConditionFalse)}}
		} else {
			r.OnExitCodes = &batchv1.PodFailurePolicyOnExitCodesRequirement{Operator: oneOf(d, batchv1.PodFailurePolicyOnExitCodesOpIn, batchv1.PodFailurePolicyOnExitCodesOpNotIn), Values: oneOf(d, []int32{1}, []int32{2, 3}, []int32{1, 137})}
			if d.odds(2) {
				r.OnExitCodes.ContainerName = &s.Template.Spec.Containers[0].Name
			}
		}
		s.PodFailurePolicy.Rules = append(s.PodFailurePolicy.Rules, r)
	}
}

func (c *jobCase) read() {
	c.job = fixture.Get[*batchv1.Job](c.w, jobKind, "default", "j").DeepCopy()
	c.pods = nil
	for _, p := range fixture.List[*corev1.Pod](c.w, fixture.Pod, "default") {
		c.pods = append(c.pods, p.DeepCopy())
	}
}

// pod makes one of the Job's, in any state.
func (c *jobCase) pod(d dice, i int) {
	t := c.job.Spec.Template.DeepCopy()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("j-%d", i), Labels: t.Labels, Annotations: map[string]string{}, Finalizers: []string{batchv1.JobTrackingFinalizer},
		OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(c.job, batchv1.SchemeGroupVersion.WithKind("Job"))}}, Spec: t.Spec}
	phase := oneOf(d, corev1.PodPending, corev1.PodRunning, corev1.PodRunning, corev1.PodSucceeded, corev1.PodFailed, corev1.PodFailed)
	over := phase == corev1.PodFailed || phase == corev1.PodSucceeded
	if over && d.odds(6) {
		p.Finalizers = nil // was counted
	}
	if isIndexed(&c.job.Spec) && !d.odds(12) {
		n := strconv.Itoa(d.r.IntN(int(*c.job.Spec.Completions) + 1))
		p.Annotations[batchv1.JobCompletionIndexAnnotation], p.Labels[batchv1.JobCompletionIndexAnnotation] = n, n
		if c.job.Spec.BackoffLimitPerIndex != nil {
			p.Annotations[batchv1.JobIndexFailureCountAnnotation] = strconv.Itoa(d.r.IntN(3))
			if d.odds(4) {
				p.Annotations[batchv1.JobIndexIgnoredFailureCountAnnotation] = "1"
			}
		}
	}
	c.w.Create(p)
	c.w.Advance(time.Second) // of pods of the same age any may go
	p = fixture.Get[*corev1.Pod](c.w, fixture.Pod, "default", p.Name)
	if phase != corev1.PodPending || d.odds(2) {
		c.w.Bind(p, "n")
	}
	if phase != corev1.PodPending {
		fixture.Change(c.w, fixture.Pod, "default", p.Name, registry.Status, func(p *corev1.Pod) { c.progress(d, p, phase) })
	}
	if phase != corev1.PodPending && d.odds(6) {
		c.w.Delete(fixture.Pod, "default", p.Name, metav1.DeletePropagationBackground)
	}
}

// progress fills a pod's status.
func (c *jobCase) progress(d dice, p *corev1.Pod, phase corev1.PodPhase) {
	p.Status.Phase = phase
	then := metav1.NewTime(c.w.Now().Add(-2 * time.Hour))
	ready := corev1.ConditionFalse
	st := corev1.ContainerStatus{Name: p.Spec.Containers[0].Name, Image: "x"}
	switch phase {
	case corev1.PodRunning:
		st.State.Running = &corev1.ContainerStateRunning{StartedAt: then}
		if c.job.Spec.Template.Spec.RestartPolicy == corev1.RestartPolicyOnFailure {
			st.RestartCount = int32(oneOf(d, 0, 0, 1, 2))
		}
		if !d.odds(3) {
			ready = corev1.ConditionTrue
		}
	case corev1.PodSucceeded:
		st.State.Terminated = &corev1.ContainerStateTerminated{FinishedAt: then, StartedAt: then}
	case corev1.PodFailed:
		st.State.Terminated = &corev1.ContainerStateTerminated{FinishedAt: then, StartedAt: then, ExitCode: int32(1 + d.r.IntN(3))}
		if d.odds(3) {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: oneOf(d, corev1.DisruptionTarget, "example.com/Broken"), Status: oneOf(d, corev1.ConditionTrue, corev1.ConditionFalse), LastTransitionTime: then})
		}
	}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{st}
	p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: ready, LastTransitionTime: metav1.NewTime(then.Add(time.Duration(d.r.IntN(3)) * time.Second))})
}

func indexOf(p *corev1.Pod) int {
	n, err := strconv.Atoi(p.Annotations[batchv1.JobCompletionIndexAnnotation])
	if err != nil {
		return -1
	}
	return n
}

func (c *jobCase) has(index int32) bool {
	return slices.ContainsFunc(c.pods, func(p *corev1.Pod) bool { return indexOf(p) == int(index) })
}

// doubled: an index that is done, or may fail for good, has another pod. If
// that one works, Dunlin ends it at once, and upstream gives it a place until
// it ends; if it failed, the index that is done has failed as well, to
// upstream, and has not, to Dunlin.
func (c *jobCase) doubled() bool {
	if !isIndexed(&c.job.Spec) {
		return false
	}
	done, _ := manifests.ParseIndexes(c.job.Status.CompletedIndexes, *c.job.Spec.Completions) // it is ours
	for _, p := range c.pods {
		if n := indexOf(p); p.Status.Phase == corev1.PodSucceeded && n >= 0 && len(p.Finalizers) > 0 {
			done = done.With(int32(n))
		}
	}
	if c.job.Spec.BackoffLimitPerIndex != nil {
		for _, p := range c.pods {
			if n := indexOf(p); n >= 0 && len(p.Finalizers) > 0 && (p.Status.Phase == corev1.PodFailed || p.DeletionTimestamp != nil) && slices.ContainsFunc(c.pods, func(q *corev1.Pod) bool { return q != p && indexOf(q) == n }) {
				return true
			}
		}
	}
	return slices.ContainsFunc(c.pods, func(p *corev1.Pod) bool {
		return p.Status.Phase != corev1.PodSucceeded && done.Has(int32(indexOf(p)))
	})
}

// status is the Job's from a look before.
func (c *jobCase) status(d dice) {
	if d.odds(3) {
		return
	}
	fixture.Change(c.w, jobKind, "default", "j", registry.Status, func(j *batchv1.Job) {
		st := &j.Status
		at := metav1.NewTime(c.now.Add(-time.Hour))
		if st.StartTime = &at; *j.Spec.Suspend {
			st.StartTime = nil
		}
		if c.more.odds(4) { // it was suspended, or resumed, before
			x := batchv1.JobCondition{Type: batchv1.JobSuspended, Status: corev1.ConditionFalse, Reason: "JobResumed", Message: "Job resumed", LastTransitionTime: at}
			if *j.Spec.Suspend || c.more.odds(2) {
				x.Status, x.Reason, x.Message = corev1.ConditionTrue, "JobSuspended", "Job suspended"
				st.StartTime = nil // as the controller that suspended it left it
			}
			st.Conditions = append(st.Conditions, x)
		}
		st.Failed = int32(d.r.IntN(3))
		st.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{}
		if isIndexed(&j.Spec) {
			var done, broken manifests.Indexes
			rare := oneOf(d, 2, 2, 5) // how many of two kinds of indexes there are
			for i := range *j.Spec.Completions {
				switch n := d.r.IntN(rare); {
				case n == 0:
					done = done.With(i)
				case n == 1 && !c.has(i): // else one that succeeds late has not failed, to Dunlin
					broken = broken.With(i)
				}
			}
			st.CompletedIndexes, st.Succeeded = done.String(), int32(done.Len())
			if j.Spec.BackoffLimitPerIndex != nil {
				text := broken.String()
				st.FailedIndexes = &text
			}
		} else if j.Spec.Completions != nil {
			st.Succeeded = int32(d.r.IntN(int(*j.Spec.Completions)))
		}
		for _, p := range c.pods { // some stand in the status already
			switch {
			case !d.odds(3):
			case p.Status.Phase == corev1.PodSucceeded && !isIndexed(&j.Spec):
				st.UncountedTerminatedPods.Succeeded = append(st.UncountedTerminatedPods.Succeeded, p.UID)
			case p.Status.Phase == corev1.PodFailed:
				st.UncountedTerminatedPods.Failed = append(st.UncountedTerminatedPods.Failed, p.UID)
			}
		}
	})
}

// String tells the case, for whoever reads a failure.
func (c *jobCase) String() string {
	s := &c.job.Spec
	text := fmt.Sprintf("parallelism %d", *s.Parallelism)
	say := func(name string, p *int32) {
		if p != nil {
			text += fmt.Sprintf(", %s %d", name, *p)
		}
	}
	say("completions", s.Completions)
	say("backoffLimit", s.BackoffLimit)
	say("perIndex", s.BackoffLimitPerIndex)
	say("maxFailed", s.MaxFailedIndexes)
	text += fmt.Sprintf(", %s %s restart %s suspend %t", *s.CompletionMode, *s.PodReplacementPolicy, s.Template.Spec.RestartPolicy, *s.Suspend)
	if s.ActiveDeadlineSeconds != nil {
		text += fmt.Sprintf(", deadline %d", *s.ActiveDeadlineSeconds)
	}
	if s.SuccessPolicy != nil {
		for _, r := range s.SuccessPolicy.Rules {
			text += fmt.Sprintf("\n   success %v", r.String())
		}
	}
	if s.PodFailurePolicy != nil {
		for _, r := range s.PodFailurePolicy.Rules {
			text += fmt.Sprintf("\n   failure %v", r.String())
		}
	}
	text += "\n   " + jobCounts(&c.job.Status)
	for _, p := range c.pods {
		text += fmt.Sprintf("\n   %s %s on %q index %s failures %s+%s, held %t leaving %t", p.Name, p.Status.Phase, p.Spec.NodeName, p.Annotations[batchv1.JobCompletionIndexAnnotation],
			p.Annotations[batchv1.JobIndexFailureCountAnnotation], p.Annotations[batchv1.JobIndexIgnoredFailureCountAnnotation], len(p.Finalizers) > 0, p.DeletionTimestamp != nil)
		for _, x := range p.Status.ContainerStatuses {
			text += fmt.Sprintf(" restarts %d", x.RestartCount)
			if x.State.Terminated != nil {
				text += fmt.Sprintf(" exit %d", x.State.Terminated.ExitCode)
			}
		}
		for _, x := range p.Status.Conditions {
			text += fmt.Sprintf(" %s=%s", x.Type, x.Status)
		}
	}
	return text
}
