package job

import (
	"context"
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// settle moves the uids of pods that were let go (or are gone) from the
// uncounted ones into the counters.
func (r *round) settle() {
	held := map[types.UID]bool{}
	for i := range r.pods {
		if r.pods[i].tracked {
			held[types.UID(r.pods[i].uid)] = true
		}
	}
	un := r.st.UncountedTerminatedPods
	keep := func(list []types.UID, counter *int32) []types.UID {
		return slices.DeleteFunc(list, func(uid types.UID) bool {
			if held[uid] {
				return false
			}
			*counter++
			return true
		})
	}
	un.Succeeded = keep(un.Succeeded, &r.st.Succeeded)
	un.Failed = keep(un.Failed, &r.st.Failed)
}

// track counts the pods that are over and lets them go: first the status
// with their uids, then the finalizers, then the counters. e is how the Job
// ends, nil if it goes on.
func (r *round) track(ctx context.Context, e *end) error {
	t := count(r.job, &r.st, r.pods)
	r.st.Active, r.st.Ready, r.st.Terminating = t.active, &t.ready, &t.leaving
	if e != nil && condition(&r.st, e.t) == nil {
		ensure(&r.st, e.t, corev1.ConditionTrue, e.reason, e.message, r.now)
	}
	release, more := r.tally(t, e)
	if indexed(r.job) {
		r.st.CompletedIndexes, r.st.Succeeded = t.done.String(), int32(t.done.Len())
		if perIndex(r.job) {
			s := t.broken.String()
			r.st.FailedIndexes = &s
		}
	}
	if err := r.write(ctx); err != nil {
		return err
	}
	let := make([]bool, len(release))
	failed := loop.Parallel(ctx, len(release), func(ctx context.Context, i int) error {
		err := r.c.release(ctx, r.pods[release[i]].rec)
		let[i] = err == nil
		return err
	})
	for i, k := range release {
		r.pods[k].tracked = r.pods[k].tracked && !let[i]
	}
	r.settle()
	if e != nil && failed == nil && !more && t.active == 0 && t.leaving == 0 {
		r.finish(e)
	}
	if err := r.write(ctx); err != nil {
		return err
	}
	return failed
}

// tally puts the uids of the pods that are over into the status, and returns
// the pods to let go. more says that others must wait for the next round.
func (r *round) tally(t tally, e *end) (release []int, more bool) {
	un := r.st.UncountedTerminatedPods
	busy := map[int32]bool{}
	for i := range r.pods {
		if r.pods[i].class == active {
			busy[r.pods[i].index] = true
		}
	}
	last := lastFailed(r.pods)
	for i := range r.pods {
		m := &r.pods[i]
		if !m.tracked || (e == nil && m.class != succeeded && m.class != failed) {
			continue
		}
		if len(un.Succeeded)+len(un.Failed) >= maxUncounted {
			return release, true
		}
		switch m.class {
		case succeeded:
			if !indexed(r.job) && !m.superseded && !has(un.Failed, m.uid) && !has(un.Succeeded, m.uid) {
				un.Succeeded = append(un.Succeeded, types.UID(m.uid))
			}
		case failed:
			if e == nil && perIndex(r.job) && last[m.index] == m && !busy[m.index] && !t.done.Has(m.index) && !t.broken.Has(m.index) &&
				m.index < *r.job.Spec.Completions {
				continue // the next pod of the index carries its count on
			}
			if m.counts && !has(un.Failed, m.uid) && m.belongs(r.job) {
				un.Failed = append(un.Failed, types.UID(m.uid))
			}
		case leaving: // somebody deleted it; of a Job that has failed it is not waited for
			if e != nil && e.t == batchv1.JobFailureTarget && m.counts && !has(un.Failed, m.uid) && m.belongs(r.job) {
				un.Failed = append(un.Failed, types.UID(m.uid))
			}
		}
		release = append(release, i)
	}
	return release, false
}

// finish writes how the Job ended into its status.
func (r *round) finish(e *end) {
	t := batchv1.JobFailed
	if e.t == batchv1.JobSuccessCriteriaMet {
		t = batchv1.JobComplete
		at := metav1.NewTime(r.now).Rfc3339Copy()
		r.st.CompletionTime = &at
	}
	if r.st.StartTime == nil {
		at := metav1.NewTime(r.now).Rfc3339Copy()
		r.st.StartTime = &at
	}
	ensure(&r.st, t, corev1.ConditionTrue, e.reason, e.message, r.now)
	if t == batchv1.JobComplete {
		r.note(events.Normal, "Completed", "Job completed")
	} else {
		r.note(events.Warning, e.reason, "%s", e.message)
	}
}

// write stores the status if it changed.
func (r *round) write(ctx context.Context) error {
	st := *r.st.DeepCopy()
	if apiequality.Semantic.DeepEqual(st, r.job.Status) {
		return nil
	}
	obj, err := r.c.env.Store.Update(ctx, gk, r.job.Namespace, r.job.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		j, ok := cur.(*batchv1.Job)
		if !ok || j.UID != r.job.UID || !apiequality.Semantic.DeepEqual(j.Status, r.job.Status) {
			return nil, loop.ErrMoved // counters are only ever moved on from what was read
		}
		j.Status = st
		return j, nil
	}, r.c.env.Write())
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	if j, ok := obj.(*batchv1.Job); ok {
		r.job = j
	}
	return nil
}
