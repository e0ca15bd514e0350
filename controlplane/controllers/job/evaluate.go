package job

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/manifests"
)

// tally is what the pods and the status come to together: nothing in it was
// counted twice, since a pod is counted by its uid (or index) until it is let
// go.
type tally struct {
	succeeded, failed int32
	// done and broken are the indexes that succeeded and that failed for good.
	done, broken manifests.Indexes
	active       int32
	ready        int32
	leaving      int32
}

// count adds up. st has the counters so far. Pure.
func count(j *batchv1.Job, st *batchv1.JobStatus, pods []member) tally {
	var t tally
	un := st.UncountedTerminatedPods
	t.succeeded, t.failed = st.Succeeded+int32(len(un.Succeeded)), st.Failed+int32(len(un.Failed))
	var done, broken []int32
	failing := isTrue(condition(st, batchv1.JobFailureTarget))
	n := int32(0)
	if indexed(j) {
		n = *j.Spec.Completions
		t.done = parse(st.CompletedIndexes, n)
		if perIndex(j) && st.FailedIndexes != nil {
			t.broken = parse(*st.FailedIndexes, n)
		}
	}
	for i := range pods {
		m := &pods[i]
		switch {
		case m.class == active:
			t.active++
			if m.ready {
				t.ready++
			}
		case m.class == leaving, m.class == failed && m.rec.Header.Deleted != 0 && !over(m):
			t.leaving++
		}
		if !m.tracked {
			continue
		}
		switch m.class {
		case succeeded:
			if indexed(j) {
				if m.belongs(j) {
					done = append(done, m.index)
				}
			} else if !m.superseded && !has(un.Succeeded, m.uid) && !has(un.Failed, m.uid) {
				t.succeeded++
			}
		case failed:
			if m.counts && m.belongs(j) && !has(un.Failed, m.uid) {
				t.failed++
			}
			// One that had no node yet when the Job, which fails, deleted it.
			stopped := failing && m.rec.Header.Deleted != 0 && m.rec.Header.NodeName == ""
			if perIndex(j) && m.belongs(j) && !stopped && (m.failIndex || m.counts && m.failures >= *j.Spec.BackoffLimitPerIndex) {
				broken = append(broken, m.index)
			}
		}
	}
	if indexed(j) {
		t.done = t.done.With(done...)
		t.succeeded = int32(t.done.Len())
		t.broken = without(t.broken.With(broken...), t.done)
	}
	return t
}

// over: ended, or nothing of it runs any more.
func over(m *member) bool {
	h := &m.rec.Header
	return h.Phase == string(corev1.PodSucceeded) || h.Phase == string(corev1.PodFailed) || (h.DeletionGrace != nil && *h.DeletionGrace == 0)
}

// parse reads indexes of a status; what is not less than n was of a Job that
// was larger.
func parse(text string, n int32) manifests.Indexes {
	x, err := manifests.ParseIndexes(text, 1<<31-1)
	if err != nil {
		return nil // written by somebody else, and not checked then
	}
	return x.Below(n)
}

// without drops what is in b: an index that succeeded late has not failed.
func without(a, b manifests.Indexes) manifests.Indexes {
	var left []int32
	for _, r := range a {
		for i := r.First; i <= r.Last; i++ {
			if !b.Has(i) {
				left = append(left, i)
			}
		}
	}
	return manifests.Indexes(nil).With(left...)
}

func has(list []types.UID, uid string) bool { return slices.Contains(list, types.UID(uid)) }

func condition(st *batchv1.JobStatus, t batchv1.JobConditionType) *batchv1.JobCondition {
	for i := range st.Conditions {
		if st.Conditions[i].Type == t {
			return &st.Conditions[i]
		}
	}
	return nil
}

func isTrue(c *batchv1.JobCondition) bool { return c != nil && c.Status == corev1.ConditionTrue }

func finished(st *batchv1.JobStatus) *batchv1.JobCondition {
	for i := range st.Conditions {
		if c := &st.Conditions[i]; (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

func suspended(j *batchv1.Job) bool { return j.Spec.Suspend != nil && *j.Spec.Suspend }

// end is how a Job ends: a condition of type FailureTarget or
// SuccessCriteriaMet.
type end struct {
	t               batchv1.JobConditionType
	reason, message string
}

// evaluate says whether the Job ends, and how: in upstream's order. wait is
// when the active deadline is due, 0 if none. trusted says whether the wall
// clock may be acted on. Pure.
func evaluate(j *batchv1.Job, st *batchv1.JobStatus, pods []member, t tally, now time.Time, trusted bool) (e *end, wait time.Duration) {
	if c := condition(st, batchv1.JobSuccessCriteriaMet); isTrue(c) {
		return &end{c.Type, c.Reason, c.Message}, 0
	}
	if c := condition(st, batchv1.JobFailureTarget); isTrue(c) {
		return &end{c.Type, c.Reason, c.Message}, 0
	}
	fail := func(reason, message string) (*end, time.Duration) {
		return &end{batchv1.JobFailureTarget, reason, message}, 0
	}
	restarts := int32(0)
	for i := range pods {
		if pods[i].failsJob != "" {
			return fail(batchv1.JobReasonPodFailurePolicy, pods[i].failsJob)
		}
		if m := &pods[i]; m.class == active || m.class != missing && !over(m) && !m.unwanted {
			restarts += m.restarts
		}
	}
	limit := *j.Spec.BackoffLimit
	onFailure := j.Spec.Template.Spec.RestartPolicy == corev1.RestartPolicyOnFailure
	if t.failed > limit || onFailure && restarts > 0 && restarts >= limit {
		return fail(batchv1.JobReasonBackoffLimitExceeded, "Job has reached the specified backoff limit")
	}
	if d := j.Spec.ActiveDeadlineSeconds; d != nil && !suspended(j) && st.StartTime != nil {
		left := time.Duration(*d)*time.Second - max(now.Sub(st.StartTime.Time), 0)
		switch {
		case !trusted:
			wait = untrustedWait
		case left <= 0:
			return fail(batchv1.JobReasonDeadlineExceeded, "Job was active longer than specified deadline")
		default:
			wait = left
		}
	}
	if perIndex(j) {
		if m := j.Spec.MaxFailedIndexes; m != nil && t.broken.Len() > int(*m) {
			return fail(batchv1.JobReasonMaxFailedIndexesExceeded, "Job has exceeded the specified maximal number of failed indexes")
		}
		if n := t.broken.Len(); n > 0 && n+t.done.Len() >= int(*j.Spec.Completions) {
			return fail(batchv1.JobReasonFailedIndexes, "Job has failed indexes")
		}
	}
	if indexed(j) {
		if rule, ok := policyMet(j.Spec.SuccessPolicy, *j.Spec.Completions, t.done); ok {
			return &end{batchv1.JobSuccessCriteriaMet, batchv1.JobReasonSuccessPolicy, fmt.Sprintf("Matched rules at index %d", rule)}, wait
		}
	}
	if complete(j, t) {
		return &end{batchv1.JobSuccessCriteriaMet, batchv1.JobReasonCompletionsReached, "Reached expected number of succeeded pods"}, wait
	}
	return nil, wait
}

// untrustedWait is how long a date is not looked at while the clock is wrong.
const untrustedWait = 30 * time.Second

func complete(j *batchv1.Job, t tally) bool {
	if j.Spec.Completions == nil { // any success ends it, once all pods are over
		return t.succeeded > 0 && t.active == 0
	}
	return t.succeeded >= *j.Spec.Completions && t.active == 0
}

func policyMet(p *batchv1.SuccessPolicy, n int32, done manifests.Indexes) (rule int, met bool) {
	if p == nil || len(done) == 0 {
		return 0, false
	}
	for i, r := range p.Rules {
		if r.SucceededIndexes == nil {
			if r.SucceededCount != nil && done.Len() >= int(*r.SucceededCount) {
				return i, true
			}
			continue
		}
		of := parse(*r.SucceededIndexes, n)
		got := 0
		for _, x := range of {
			for k := x.First; k <= x.Last; k++ {
				if done.Has(k) {
					got++
				}
			}
		}
		if len(of) > 0 && (got == of.Len() || r.SucceededCount != nil && got >= int(*r.SucceededCount)) {
			return i, true
		}
	}
	return 0, false
}

// plan of a Job that goes on: pods to delete, or else pods to make.
type plan struct {
	remove  []int // of the members
	create  int
	indexes []int32 // for each pod to make, of an indexed Job
}

// manage decides how many pods there shall be. Pure.
func manage(j *batchv1.Job, pods []member, t tally) plan {
	var live []int
	for i := range pods {
		if pods[i].class == active {
			live = append(live, i)
		}
	}
	if suspended(j) {
		return plan{remove: live}
	}
	slices.SortFunc(live, func(a, b int) int { return disposable(&pods[a], &pods[b]) })
	want := *j.Spec.Parallelism
	if j.Spec.Completions == nil {
		if t.succeeded > 0 {
			want = t.active
		}
	} else {
		want = max(min(want, *j.Spec.Completions-t.succeeded-int32(t.broken.Len())), 0)
	}
	var p plan
	busy := map[int32]bool{}
	var left []int
	if indexed(j) {
		for k := len(live) - 1; k >= 0; k-- { // the best of each index stays
			m := &pods[live[k]]
			if m.index == none || m.index >= *j.Spec.Completions || busy[m.index] || t.done.Has(m.index) || t.broken.Has(m.index) {
				p.remove = append(p.remove, live[k])
				continue
			}
			busy[m.index] = true
			left = append(left, live[k])
		}
		slices.Reverse(left)
	} else {
		for _, i := range live {
			if pods[i].superseded {
				p.remove = append(p.remove, i)
			} else {
				left = append(left, i)
			}
		}
	}
	if n := len(left) - int(want); n > 0 {
		p.remove = append(p.remove, left[:n]...)
	}
	if len(p.remove) > 0 {
		p.remove = p.remove[:min(len(p.remove), burst)]
		return p
	}
	diff := int(want) - len(left)
	if onlyFailed(j) {
		diff -= int(t.leaving)
	}
	p.create = max(min(diff, burst), 0)
	if indexed(j) {
		for i := range pods {
			if pods[i].class == leaving {
				busy[pods[i].index] = true
			}
		}
		for i := int32(0); i < *j.Spec.Completions && len(p.indexes) < p.create; i++ {
			if !busy[i] && !t.done.Has(i) && !t.broken.Has(i) {
				p.indexes = append(p.indexes, i)
			}
		}
		p.create = len(p.indexes)
	}
	return p
}

// disposable sorts the pods that may best be deleted first, as upstream does:
// those that are not on a node, not running, not ready, ready for the shortest
// time, restarted most often, the newest. As their return from a silent node
// says comes before the time.
func disposable(a, b *member) int {
	rank := func(m *member) int {
		switch h := &m.rec.Header; {
		case h.NodeName == "":
			return 0
		case h.Phase != string(corev1.PodRunning):
			return 1
		case !h.Ready:
			return 2
		}
		return 4 + m.keep
	}
	return cmp.Or(rank(a)-rank(b), b.readyAt.Compare(a.readyAt), cmp.Compare(b.worst, a.worst), cmp.Compare(b.rec.Header.Created, a.rec.Header.Created), cmp.Compare(a.rec.Header.Key.Name, b.rec.Header.Key.Name))
}

// ensure sets a condition and reports whether that changed anything. A
// condition that would be False from the start is left out.
func ensure(st *batchv1.JobStatus, t batchv1.JobConditionType, status corev1.ConditionStatus, reason, message string, now time.Time) bool {
	at := metav1.NewTime(now).Rfc3339Copy()
	fresh := batchv1.JobCondition{Type: t, Status: status, Reason: reason, Message: message, LastProbeTime: at, LastTransitionTime: at}
	c := condition(st, t)
	switch {
	case c == nil && status != corev1.ConditionTrue:
		return false
	case c == nil:
		st.Conditions = append(st.Conditions, fresh)
		return true
	case c.Status == status && c.Reason == reason && c.Message == message:
		return false
	}
	*c = fresh
	return true
}
