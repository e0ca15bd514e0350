package job

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/claim"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// class is where a pod stands, as its Job sees it.
type class uint8

const (
	active class = iota
	succeeded
	failed
	leaving // being deleted, and not over
	missing // lost: its node was silent too long; replaced, but may come back
)

// Annotations of ours on pods: which lost pod this one replaces, and why this
// one is not wanted any more. The latter is written before the pod is
// deleted, so that its end never counts as a failure.
const (
	replacesAnnotation   = manifests.AnnotationReplaces
	supersededAnnotation = manifests.AnnotationSuperseded
	byPair               = "pair"    // the other pod of the pair succeeded: a success of this one does not count
	bySurplus            = "surplus" // suspended, or more than are wanted
)

// none is the index of a pod that has none.
const none = int32(-1)

// member is one pod of a Job.
type member struct {
	rec     *state.Record
	uid     string
	class   class
	tracked bool // has the finalizer: not counted and let go yet
	ready   bool
	index   int32
	keep    int // lost.Keep
	// replaces is the uid of the lost pod that this one stands in for.
	replaces   string
	superseded bool      // byPair
	unwanted   bool      // superseded for whatever reason
	restarts   int32     // of all containers
	worst      int32     // of the one that restarted most
	readyAt    time.Time // of ready pods
	// Of failed pods, and of those that leave and are not over:
	counts    bool   // towards the back-off limit
	failsJob  string // the message of a rule that fails the Job
	failIndex bool
	// failures of the index before this pod, and those that did not count.
	failures, ignored int32
}

// read classifies a pod.
func read(j *batchv1.Job, r *state.Record, decode func(*state.Record) (*corev1.Pod, error)) (member, error) {
	h := &r.Header
	m := member{rec: r, uid: h.UID, ready: h.Ready, index: none, tracked: slices.Contains(h.Finalizers, batchv1.JobTrackingFinalizer)}
	if n, err := strconv.ParseInt(h.Labels[batchv1.JobCompletionIndexAnnotation], 10, 32); err == nil && n >= 0 {
		m.index = int32(n)
	}
	p, err := decode(r)
	if err != nil {
		return m, err
	}
	gone := h.Deleted != 0 && h.DeletionGrace != nil && *h.DeletionGrace == 0 // nothing of it runs any more
	switch {
	case h.Phase == string(corev1.PodSucceeded):
		m.class = succeeded
	case h.Phase == string(corev1.PodFailed), gone:
		m.class = failed
	case lost.Is(p):
		m.class = missing
	case h.Deleted != 0 && !onlyFailed(j):
		m.class = failed
	case h.Deleted != 0:
		m.class = leaving
	}
	m.keep = lost.Keep(p)
	m.superseded, m.unwanted = p.Annotations[supersededAnnotation] == byPair, p.Annotations[supersededAnnotation] != ""
	m.replaces = p.Annotations[replacesAnnotation]
	m.failures, m.ignored = number(p, batchv1.JobIndexFailureCountAnnotation), number(p, batchv1.JobIndexIgnoredFailureCountAnnotation)
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for i := range list {
			m.restarts += list[i].RestartCount
		}
	}
	for i := range p.Status.ContainerStatuses {
		m.worst = max(m.worst, p.Status.ContainerStatuses[i].RestartCount)
	}
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; m.ready && c.Type == corev1.PodReady {
			m.readyAt = c.LastTransitionTime.Time
		}
	}
	if (m.class == failed || m.class == leaving) && !m.unwanted {
		m.counts, m.failsJob, m.failIndex = match(j.Spec.PodFailurePolicy, p)
		if m.class == leaving { // it fails nothing before it is over
			m.failsJob, m.failIndex = "", false
		}
	}
	return m, nil
}

// belongs: it is of an index that the Job has (any pod, without indexes). What
// is of another is of a Job that was larger, and never counts.
func (m *member) belongs(j *batchv1.Job) bool {
	return !indexed(j) || m.index != none && m.index < *j.Spec.Completions
}

func number(p *corev1.Pod, annotation string) int32 {
	n, err := strconv.ParseInt(p.Annotations[annotation], 10, 32)
	if err != nil {
		return 0
	}
	return int32(n)
}

// onlyFailed: a pod is replaced when it has ended, not when its deletion
// begins.
func onlyFailed(j *batchv1.Job) bool {
	return j.Spec.PodReplacementPolicy != nil && *j.Spec.PodReplacementPolicy == batchv1.Failed
}

func indexed(j *batchv1.Job) bool {
	return j.Spec.CompletionMode != nil && *j.Spec.CompletionMode == batchv1.IndexedCompletion
}

func perIndex(j *batchv1.Job) bool { return indexed(j) && j.Spec.BackoffLimitPerIndex != nil }

// match asks the pod failure policy about a failed pod: whether the failure
// counts, the message if it fails the whole Job, and whether it fails the
// index. The first rule that matches decides. Pure.
func match(policy *batchv1.PodFailurePolicy, p *corev1.Pod) (counts bool, failsJob string, failsIndex bool) {
	if policy == nil {
		return true, "", false
	}
	for i := range policy.Rules {
		r := &policy.Rules[i]
		what := ""
		if r.OnExitCodes != nil {
			if c := exited(&p.Status, r.OnExitCodes); c != nil {
				what = fmt.Sprintf("Container %s for pod %s/%s failed with exit code %d", c.Name, p.Namespace, p.Name, c.State.Terminated.ExitCode)
			}
		} else if c := conditioned(&p.Status, r.OnPodConditions); c != "" {
			what = fmt.Sprintf("Pod %s/%s has condition %s", p.Namespace, p.Name, c)
		}
		if what == "" {
			continue
		}
		switch r.Action {
		case batchv1.PodFailurePolicyActionIgnore:
			return false, "", false
		case batchv1.PodFailurePolicyActionFailJob:
			return true, fmt.Sprintf("%s matching %s rule at index %d", what, r.Action, i), false
		case batchv1.PodFailurePolicyActionFailIndex:
			return true, "", true
		}
		return true, "", false
	}
	return true, "", false
}

func exited(s *corev1.PodStatus, r *batchv1.PodFailurePolicyOnExitCodesRequirement) *corev1.ContainerStatus {
	for _, list := range [][]corev1.ContainerStatus{s.ContainerStatuses, s.InitContainerStatuses} {
		for i := range list {
			t := list[i].State.Terminated
			if t == nil || t.ExitCode == 0 || (r.ContainerName != nil && *r.ContainerName != list[i].Name) {
				continue
			}
			if slices.Contains(r.Values, t.ExitCode) == (r.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn) {
				return &list[i]
			}
		}
	}
	return nil
}

func conditioned(s *corev1.PodStatus, patterns []batchv1.PodFailurePolicyOnPodConditionsPattern) corev1.PodConditionType {
	for i := range s.Conditions {
		for _, want := range patterns {
			if s.Conditions[i].Type == want.Type && s.Conditions[i].Status == want.Status {
				return want.Type
			}
		}
	}
	return ""
}

// members reads all pods.
func (r *round) members(recs []*state.Record) error {
	r.pods = make([]member, 0, len(recs))
	for _, rec := range recs {
		m, err := read(r.job, rec, func(rec *state.Record) (*corev1.Pod, error) { return claim.Decode(r.c.env, rec) })
		if err != nil {
			return err
		}
		r.pods = append(r.pods, m)
	}
	return nil
}
