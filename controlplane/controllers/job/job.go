// Package job runs the pods of Jobs until as many have succeeded as shall.
//
// Owned fields: the existence of a Job's pods, their controller reference,
// the finalizer by which they are tracked, and the Job's status.
//
// No pod is counted twice, and none is lost: a pod that is over keeps its
// finalizer until its uid (or its index) stands in the Job's status, which is
// durable before the finalizer goes, and it is moved into the counters only
// once the finalizer is gone. A kill between any two of these writes is
// carried on from what is stored.
package job

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/claim"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

const (
	burst = 500 // pods made or deleted in one round
	// maxUncounted uids stand in a status at most: some 20 KB.
	maxUncounted = 500
	// managedByUs is the value of spec.managedBy that means this controller.
	managedByUs = "kubernetes.io/job-controller"
)

var (
	gk  = schema.GroupKind{Group: batchv1.GroupName, Kind: "Job"}
	gvk = batchv1.SchemeGroupVersion.WithKind("Job")
)

type controller struct {
	env     loop.Env
	orphans *claim.Orphans
	back    *backoffs
}

// New makes the Job controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env, orphans: claim.NewOrphans(), back: newBackoffs()}
	return &loop.Controller{
		Name: "job", Workers: 4,
		Sources: []loop.Source{
			loop.Self(gk.String()),
			loop.Controlled(claim.PodGK.String(), gk.String()),
			c.orphans.Source(env, gk.String(), c.selector),
			{Kind: claim.PodGK.String(), Keys: stray},
		},
		Reconcile: c.reconcile,
	}
}

// stray gives the keys of pods that are tracked and belong to no Job any
// more: their finalizer must not keep them for ever.
func stray(ev state.Event, add func(state.Key)) {
	if _, owned := loop.ControllerOf(ev.Record); !owned && ev.Type != state.Deleted && tracked(ev.Record) {
		add(ev.Record.Header.Key)
	}
}

func tracked(r *state.Record) bool {
	return slices.Contains(r.Header.Finalizers, batchv1.JobTrackingFinalizer)
}

func (c *controller) selector(r *state.Record) labels.Selector {
	obj, err := c.env.Store.Decode(r)
	if err != nil {
		return nil
	}
	if j, ok := obj.(*batchv1.Job); ok && ours(j) && j.DeletionTimestamp == nil {
		if s, err := metav1.LabelSelectorAsSelector(j.Spec.Selector); err == nil {
			return s
		}
	}
	return nil
}

func ours(j *batchv1.Job) bool { return j.Spec.ManagedBy == nil || *j.Spec.ManagedBy == managedByUs }

// round is one reconcile.
type round struct {
	c    *controller
	job  *batchv1.Job // as stored: read only
	key  state.Key
	sel  labels.Selector
	now  time.Time
	st   batchv1.JobStatus // what it shall become
	pods []member
	wait time.Duration
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	if key.Kind == claim.PodGK.String() {
		return 0, c.releaseStray(ctx, key)
	}
	obj, err := c.env.Store.Get(gk, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		c.back.forget(key)
		return 0, c.releaseOf(ctx, key, "")
	}
	if err != nil {
		return 0, err
	}
	j, ok := obj.(*batchv1.Job)
	if !ok {
		return 0, loop.Terminal(fmt.Errorf("not a Job: %T", obj))
	}
	if !ours(j) {
		return 0, nil // whoever is named there does all of it
	}
	if j.DeletionTimestamp != nil {
		return 0, c.releaseOf(ctx, key, string(j.UID))
	}
	if f := finished(&j.Status); f != nil {
		c.back.forget(key)
		return c.expire(ctx, key, j, f)
	}
	sel, err := metav1.LabelSelectorAsSelector(j.Spec.Selector)
	if err != nil || sel.Empty() {
		return 0, loop.Terminal(fmt.Errorf("selector of %s selects everything or is broken: %w", j.Name, err))
	}
	r := &round{c: c, job: j, key: key, sel: sel, now: c.env.Clock.Now(), st: *j.Status.DeepCopy()}
	if r.st.UncountedTerminatedPods == nil {
		r.st.UncountedTerminatedPods = &batchv1.UncountedTerminatedPods{}
	}
	return r.run(ctx)
}

func (r *round) run(ctx context.Context) (time.Duration, error) {
	if err := r.look(ctx); err != nil {
		return 0, err
	}
	r.settle()
	r.start()
	r.c.back.observe(r.key, r.pods)
	t := count(r.job, &r.st, r.pods)
	e, wait := evaluate(r.job, &r.st, r.pods, t, r.now, r.c.trusted())
	r.later(wait)
	var failed error
	if e != nil {
		if err := r.settleOn(ctx, e); err != nil {
			return 0, err
		}
		failed = r.stop(ctx, e.t != batchv1.JobFailureTarget, func(m *member) bool { return m.class == active || m.class == missing })
	} else {
		r.suspension(t)
		failed = r.manage(ctx, t)
	}
	if err := r.look(ctx); err != nil { // what was just done shows at once
		return 0, errors.Join(failed, err)
	}
	err := r.track(ctx, e)
	return r.wait, errors.Join(failed, err)
}

func (c *controller) trusted() bool { return c.env.Trust == nil || c.env.Trust() == nil }

// later asks for another look after d at the latest.
func (r *round) later(d time.Duration) {
	if d > 0 && (r.wait == 0 || d < r.wait) {
		r.wait = d
	}
}

// look reads the Job's pods. Of two that stand for the same work (one was
// lost, the other replaced it) only one counts: the other is marked before
// anything is counted.
func (r *round) look(ctx context.Context) error {
	recs, err := r.c.orphans.Pods(ctx, r.c.env, claim.Owner{Object: r.job, GVK: gvk, Selector: r.sel})
	if err != nil {
		return err
	}
	if err := r.members(recs); err != nil || indexed(r.job) {
		return err
	}
	for _, i := range superseded(r.pods, r.st.UncountedTerminatedPods) {
		if err := r.mark(ctx, &r.pods[i], byPair); err != nil {
			return err
		}
		r.pods[i].superseded, r.pods[i].unwanted = true, true
	}
	return nil
}

// superseded finds the pods whose counterpart succeeded. Pure.
func superseded(pods []member, un *batchv1.UncountedTerminatedPods) (out []int) {
	at := map[string]int{}
	for i := range pods {
		at[pods[i].uid] = i
	}
	for i := range pods {
		k, ok := at[pods[i].replaces]
		if pods[i].replaces == "" || !ok || pods[i].superseded || pods[k].superseded {
			continue
		}
		a, b := k, i // the original counts, unless the other one does already
		if pods[a].class != succeeded || has(un.Succeeded, pods[b].uid) {
			a, b = b, a
		}
		if pods[a].class == succeeded && !has(un.Succeeded, pods[b].uid) {
			out = append(out, b)
		}
	}
	return out
}

// start sets the start time, anew when the Job is resumed.
func (r *round) start() {
	resumed := isTrue(condition(&r.st, batchv1.JobSuspended))
	if !suspended(r.job) && (r.st.StartTime == nil || resumed) {
		at := metav1.NewTime(r.now).Rfc3339Copy()
		r.st.StartTime = &at
	}
}

// suspension says in the status of a Job that goes on whether it is suspended.
// One that is complete without its last pods, which go now, does not: it ends
// with them.
func (r *round) suspension(t tally) {
	last := suspended(r.job) || r.job.Spec.Completions != nil // else they go on
	if last && complete(r.job, tally{succeeded: t.succeeded}) {
		return
	}
	if suspended(r.job) {
		if ensure(&r.st, batchv1.JobSuspended, corev1.ConditionTrue, "JobSuspended", "Job suspended", r.now) {
			r.note(events.Normal, "Suspended", "Job suspended")
			r.st.StartTime = nil
		}
		return
	}
	if ensure(&r.st, batchv1.JobSuspended, corev1.ConditionFalse, "JobResumed", "Job resumed", r.now) {
		r.note(events.Normal, "Resumed", "Job resumed")
	}
}

// manage makes or deletes pods.
func (r *round) manage(ctx context.Context, t tally) error {
	p := manage(r.job, r.pods, t)
	if len(p.remove) > 0 {
		chosen := map[string]bool{}
		for _, i := range p.remove {
			chosen[r.pods[i].uid] = true
		}
		return r.stop(ctx, true, func(m *member) bool { return chosen[m.uid] })
	}
	if p.create == 0 {
		return nil
	}
	if !perIndex(r.job) {
		if left := r.c.back.left(r.key); left > 0 {
			r.later(left)
			return nil
		}
		return r.create(ctx, p.create, p.indexes, nil)
	}
	last := lastFailed(r.pods)
	var due []int32
	for _, i := range p.indexes {
		if m := last[i]; m != nil {
			if left := r.c.back.leftOf(r.key, m.uid, m.failures+m.ignored+1); left > 0 {
				r.later(left)
				continue
			}
		}
		due = append(due, i)
	}
	return r.create(ctx, len(due), due, last)
}

// settleOn writes that the Job fails before a pod is deleted for it: what ends
// then must not become another reason.
func (r *round) settleOn(ctx context.Context, e *end) error {
	if e.t != batchv1.JobFailureTarget || condition(&r.st, e.t) != nil {
		return nil
	}
	ensure(&r.st, e.t, corev1.ConditionTrue, e.reason, e.message, r.now)
	return r.write(ctx)
}

// stop deletes the chosen pods, marked first where they have not failed: those
// of a Job that goes on, or has what it wants. Of one that fails they have, as
// upstream counts.
func (r *round) stop(ctx context.Context, mark bool, chosen func(*member) bool) error {
	var victims []*member
	for i := range r.pods {
		if m := &r.pods[i]; m.rec.Header.Deleted == 0 && chosen(m) {
			victims = append(victims, m)
		}
	}
	return loop.Parallel(ctx, len(victims), func(ctx context.Context, i int) error {
		m := victims[i]
		if mark && !m.unwanted {
			if err := r.mark(ctx, m, bySurplus); err != nil {
				return err
			}
		}
		if err := claim.Delete(ctx, r.c.env, m.rec); err != nil {
			r.note(events.Warning, "FailedDelete", "Error deleting: %v", err)
			return err
		}
		r.note(events.Normal, "SuccessfulDelete", "Deleted pod: %s", m.rec.Header.Key.Name)
		return nil
	})
}

func (r *round) mark(ctx context.Context, m *member, why string) error {
	return r.c.change(ctx, m.rec, func(p *corev1.Pod) {
		if p.Annotations == nil {
			p.Annotations = map[string]string{}
		}
		p.Annotations[supersededAnnotation] = why
	})
}

// change updates a pod, if it is still that one.
func (c *controller) change(ctx context.Context, rec *state.Record, f func(*corev1.Pod)) error {
	_, err := c.env.Store.Update(ctx, claim.PodGK, rec.Header.Key.Namespace, rec.Header.Key.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		p, ok := cur.(*corev1.Pod)
		if !ok || string(p.UID) != rec.Header.UID {
			return nil, loop.ErrMoved
		}
		f(p)
		return p, nil
	}, c.env.Write())
	if apierrors.IsNotFound(err) || errors.Is(err, loop.ErrMoved) {
		return nil // gone
	}
	if err != nil {
		return fmt.Errorf("update pod %s: %w", rec.Header.Key.Name, err)
	}
	return nil
}

// release takes the finalizer away.
func (c *controller) release(ctx context.Context, rec *state.Record) error {
	return c.change(ctx, rec, func(p *corev1.Pod) {
		p.Finalizers = slices.DeleteFunc(slices.Clone(p.Finalizers), func(f string) bool { return f == batchv1.JobTrackingFinalizer })
	})
}

// releaseOf lets the pods of a Job go that is being deleted, or of all that
// had the name and are gone (uid "").
func (c *controller) releaseOf(ctx context.Context, key state.Key, uid string) error {
	var recs []*state.Record
	snap := c.env.Reader.Snapshot()
	take := func(r *state.Record) bool {
		o, ok := loop.ControllerOf(r)
		if ok && r.Header.Key.Kind == claim.PodGK.String() && o.Kind == gk.String() && o.Name == key.Name && (uid == "" || o.UID == uid) && tracked(r) {
			recs = append(recs, r)
		}
		return true
	}
	if uid != "" {
		snap.ByOwner(uid, take)
	} else {
		snap.Range(claim.PodGK.String(), key.Namespace, state.Key{}, take)
	}
	return loop.Parallel(ctx, len(recs), func(ctx context.Context, i int) error { return c.release(ctx, recs[i]) })
}

// releaseStray lets a pod go that no Job controls and none will adopt.
func (c *controller) releaseStray(ctx context.Context, key state.Key) error {
	snap := c.env.Reader.Snapshot()
	r, ok := snap.Get(key)
	if !ok || !tracked(r) {
		return nil
	}
	if _, owned := loop.ControllerOf(r); owned {
		return nil
	}
	wanted := false
	snap.Range(gk.String(), key.Namespace, state.Key{}, func(job *state.Record) bool {
		s := c.selector(job)
		wanted = s != nil && claim.Active(r) && s.Matches(labels.Set(r.Header.Labels))
		return !wanted
	})
	if wanted {
		return nil
	}
	return c.release(ctx, r)
}

// expire deletes a finished Job whose time to live is over, and lets go what
// came back from silent nodes after its end.
func (c *controller) expire(ctx context.Context, key state.Key, j *batchv1.Job, f *batchv1.JobCondition) (time.Duration, error) {
	if err := c.releaseOf(ctx, key, string(j.UID)); err != nil {
		return 0, err
	}
	ttl := j.Spec.TTLSecondsAfterFinished
	if ttl == nil {
		return 0, nil
	}
	if !c.trusted() {
		return untrustedWait, nil
	}
	// An end in the future was written under a wrong clock; it counts as now.
	left := time.Duration(*ttl)*time.Second - max(c.env.Clock.Now().Sub(f.LastTransitionTime.Time), 0)
	if left > 0 {
		return left, nil
	}
	uid := j.UID
	_, _, err := c.env.Store.Delete(ctx, gk, j.Namespace, j.Name, registry.DeleteOptions{UID: &uid, Propagation: metav1.DeletePropagationForeground, Term: c.env.Term})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return 0, fmt.Errorf("delete finished job: %w", err)
	}
	return 0, nil
}

func (r *round) note(eventType, reason, format string, args ...any) {
	r.c.env.Events.Event(events.Ref(gk, r.job), eventType, reason, fmt.Sprintf(format, args...))
}
