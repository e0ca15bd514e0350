// Package cronjob starts Jobs by the calendar.
//
// Owned fields: the existence of the CronJob's Jobs, and its status.
//
// A nominal time is started at most once: it is stamped into the status,
// together with the name of the Job, before the Job is made, and the Job's
// name is made of it. A kill between the two is carried on from the stamp.
// After an outage at most one run is caught up with. While this server's
// clock jumped nothing is started.
package cronjob

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

var (
	gk    = schema.GroupKind{Group: batchv1.GroupName, Kind: "CronJob"}
	gvk   = batchv1.SchemeGroupVersion.WithKind("CronJob")
	jobGK = schema.GroupKind{Group: batchv1.GroupName, Kind: "Job"}
)

const (
	// lookEvery bounds the wait for the next time: the wall clock may be put
	// forward meanwhile.
	lookEvery = time.Minute
	// untrustedWait is how long nothing is looked at while the clock is wrong.
	untrustedWait = 30 * time.Second
	// resumeWithin is how old a stamp may be whose Job was not made.
	resumeWithin = 10 * time.Minute
	// remarkEvery is how often it is said that times are left out.
	remarkEvery = 6 * time.Hour
)

type controller struct {
	env loop.Env

	mu   sync.Mutex
	caps map[state.Key]*startCap
	said map[state.Key]string // the last complaint, so that it is said once
	// crowded is which schedule was last said to be too frequent, and when.
	crowded map[state.Key]remark
	// ahead is since when a CronJob has a stamp that lies far ahead.
	ahead map[state.Key]time.Time
}

// remark is when something was said of a schedule.
type remark struct {
	schedule string
	at       time.Time // monotonic
}

// New makes the CronJob controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env, caps: map[state.Key]*startCap{}, said: map[state.Key]string{},
		crowded: map[state.Key]remark{}, ahead: map[state.Key]time.Time{}}
	return &loop.Controller{
		Name: "cronjob", Workers: 2,
		Sources:   []loop.Source{loop.Self(gk.String()), loop.Controlled(jobGK.String(), gk.String())},
		Reconcile: c.reconcile,
	}
}

// round is one reconcile.
type round struct {
	c    *controller
	cj   *batchv1.CronJob // as stored: read only
	key  state.Key
	now  time.Time
	jobs []*batchv1.Job // by name: the oldest nominal time first
	st   batchv1.CronJobStatus
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(gk, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.caps, key)
		delete(c.said, key)
		delete(c.crowded, key)
		delete(c.ahead, key)
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	cj, ok := obj.(*batchv1.CronJob)
	if !ok {
		return 0, loop.Terminal(fmt.Errorf("not a CronJob: %T", obj))
	}
	r := &round{c: c, cj: cj, key: key, now: c.env.Clock.Now(), st: *cj.Status.DeepCopy()}
	if err := r.look(); err != nil {
		return 0, err
	}
	resume := r.refresh()
	if err := r.write(ctx); err != nil {
		return 0, err
	}
	if cj.DeletionTimestamp != nil {
		return 0, nil
	}
	if err := r.clean(ctx); err != nil {
		return 0, err
	}
	return r.schedule(ctx, resume)
}

// look reads the Jobs that the CronJob controls.
func (r *round) look() error {
	var failed error
	uid := string(r.cj.UID)
	r.c.env.Reader.Snapshot().ByOwner(uid, func(rec *state.Record) bool {
		o, ok := loop.ControllerOf(rec)
		if !ok || o.UID != uid || rec.Header.Key.Kind != jobGK.String() {
			return true
		}
		obj, err := r.c.env.Store.Decode(rec)
		if err != nil {
			failed = fmt.Errorf("decode job %s: %w", rec.Header.Key.Name, err)
			return false
		}
		if j, ok := obj.(*batchv1.Job); ok {
			r.jobs = append(r.jobs, j)
		}
		return true
	})
	slices.SortFunc(r.jobs, func(a, b *batchv1.Job) int {
		if c := a.CreationTimestamp.Compare(b.CreationTimestamp.Time); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	return failed
}

func over(j *batchv1.Job) (done, succeeded bool) {
	for _, c := range j.Status.Conditions {
		if c.Status == corev1.ConditionTrue && (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) {
			return true, c.Type == batchv1.JobComplete
		}
	}
	return false, false
}

// refresh brings the list of running Jobs up to date. resume is the name of a
// Job that was stamped and not made.
func (r *round) refresh() (resume string) {
	byName := map[string]*batchv1.Job{}
	for _, j := range r.jobs {
		byName[j.Name] = j
		if _, ok := over(j); ok && j.Status.CompletionTime != nil &&
			(r.st.LastSuccessfulTime == nil || j.Status.CompletionTime.After(r.st.LastSuccessfulTime.Time)) {
			r.st.LastSuccessfulTime = j.Status.CompletionTime
		}
	}
	var active []corev1.ObjectReference
	for _, ref := range r.st.Active {
		j := byName[ref.Name]
		switch {
		case j != nil && (ref.UID == "" || ref.UID == j.UID):
			if done, ok := over(j); done {
				condition := batchv1.JobFailed
				if ok {
					condition = batchv1.JobComplete
				}
				r.note(events.Normal, "SawCompletedJob", "Saw completed job: %s, condition: %v", j.Name, condition)
				continue
			}
			if j.DeletionTimestamp == nil {
				active = append(active, reference(j.Namespace, j.Name, j.UID))
			}
		case ref.UID == "" && r.resumable(ref.Name):
			resume = ref.Name
			active = append(active, ref)
		default:
			r.note(events.Normal, "MissingJob", "Active job went missing: %v", ref.Name)
		}
	}
	r.st.Active = active
	return resume
}

// resumable: the Job of the last stamp was not made, and it is not too late.
func (r *round) resumable(name string) bool {
	last := r.st.LastScheduleTime
	if last == nil || jobName(r.cj, last.Time) != name || (r.cj.Spec.Suspend != nil && *r.cj.Spec.Suspend) {
		return false
	}
	within := resumeWithin
	if s := r.cj.Spec.StartingDeadlineSeconds; s != nil {
		within = time.Duration(*s) * time.Second
	}
	return r.now.Sub(last.Time) <= within
}

func reference(namespace, name string, uid types.UID) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: batchv1.SchemeGroupVersion.String(), Kind: "Job", Namespace: namespace, Name: name, UID: uid}
}

// clean deletes finished Jobs beyond the history limits.
func (r *round) clean(ctx context.Context) error {
	var good, bad []*batchv1.Job
	for _, j := range r.jobs {
		switch done, ok := over(j); {
		case !done:
		case ok:
			good = append(good, j)
		default:
			bad = append(bad, j)
		}
	}
	for _, j := range append(surplus(good, r.cj.Spec.SuccessfulJobsHistoryLimit), surplus(bad, r.cj.Spec.FailedJobsHistoryLimit)...) {
		if err := r.remove(ctx, j); err != nil {
			return err
		}
	}
	return nil
}

func (r *round) remove(ctx context.Context, j *batchv1.Job) error {
	uid := j.UID
	_, _, err := r.c.env.Store.Delete(ctx, jobGK, j.Namespace, j.Name, registry.DeleteOptions{UID: &uid, Propagation: metav1.DeletePropagationBackground, Term: r.c.env.Term})
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
		return nil
	case err != nil:
		r.note(events.Warning, "FailedDelete", "Deleted job: %v", err)
		return fmt.Errorf("delete job %s: %w", j.Name, err)
	}
	r.note(events.Normal, "SuccessfulDelete", "Deleted job %v", j.Name)
	return nil
}

// schedule starts what is due. resume is a Job that was stamped and not made.
func (r *round) schedule(ctx context.Context, resume string) (time.Duration, error) {
	if r.c.env.Trust != nil && r.c.env.Trust() != nil {
		r.once("ClockJumped", "This server's clock jumped: nothing is started until it is believed again")
		return untrustedWait, nil
	}
	if resume != "" {
		return lookEvery, r.create(ctx, resume, r.st.LastScheduleTime.Time)
	}
	if r.cj.Spec.Suspend != nil && *r.cj.Spec.Suspend {
		return 0, nil
	}
	cal, err := newCalendar(r.cj)
	if err != nil {
		r.once("UnparseableSchedule", "%v", err)
		return 0, nil // validation lets none through; a change wakes us
	}
	d := decide(r.cj, cal, len(r.st.Active), r.c.since(r.key, stamp(r.cj), r.now), r.now)
	if d.crowded {
		r.tellCrowded()
	}
	switch {
	case !d.missed.IsZero():
		r.once("MissSchedule", "Missed scheduled time to start a job: %s", d.missed.UTC().Format(time.RFC1123Z))
	case !d.blocked.IsZero():
		r.onceFor("JobAlreadyActive", fmt.Sprint(minute(d.blocked)), "Not starting job because prior execution is running and concurrency policy is Forbid (scheduled for %s)",
			d.blocked.UTC().Format(time.RFC1123Z))
	case !d.start.IsZero():
		if wait := r.c.wait(r.key); wait > 0 {
			r.once("TooManyStarts", "Not starting more than %d jobs in %s, whatever the schedule says", capStarts, capWindow)
			return wait, nil
		}
		if err := r.start(ctx, d); err != nil {
			return 0, err
		}
	}
	if d.next.IsZero() {
		return 0, nil
	}
	return min(max(d.next.Sub(r.now), 10*time.Millisecond), lookEvery), nil
}

// start stamps the nominal time, then makes its Job.
func (r *round) start(ctx context.Context, d decision) error {
	if d.replace {
		for _, ref := range r.st.Active {
			for _, j := range r.jobs {
				if j.Name == ref.Name {
					if err := r.remove(ctx, j); err != nil {
						return err
					}
				}
			}
		}
		r.st.Active = nil
	}
	name := jobName(r.cj, d.start)
	at := metav1.NewTime(d.start).Rfc3339Copy()
	r.st.LastScheduleTime = &at
	exists := slices.ContainsFunc(r.jobs, func(j *batchv1.Job) bool { return j.Name == name })
	if !exists {
		r.st.Active = append(r.st.Active, reference(r.cj.Namespace, name, ""))
	}
	if err := r.write(ctx); err != nil || exists {
		return err
	}
	return r.create(ctx, name, d.start)
}

// create makes the Job of a stamped time.
func (r *round) create(ctx context.Context, name string, nominal time.Time) error {
	t := r.cj.Spec.JobTemplate.DeepCopy()
	if t.Annotations == nil {
		t.Annotations = map[string]string{}
	}
	if cal, err := newCalendar(r.cj); err == nil {
		t.Annotations[batchv1.CronJobScheduledTimestampAnnotation] = nominal.In(cal.zone).Format(time.RFC3339)
	}
	obj, err := r.c.env.Store.Create(ctx, &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: r.cj.Namespace, Labels: t.Labels, Annotations: t.Annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(r.cj, gvk)}},
		Spec: t.Spec,
	}, r.c.env.Write())
	switch {
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil
	case apierrors.IsAlreadyExists(err):
		r.once("FailedCreate", "Error creating job: %v", err) // somebody else's of the same name
		return nil
	case err != nil:
		r.note(events.Warning, "FailedCreate", "Error creating job: %v", err)
		return fmt.Errorf("create job %s: %w", name, err)
	}
	r.c.started(r.key)
	r.note(events.Normal, "SuccessfulCreate", "Created job %v", name)
	if j, ok := obj.(*batchv1.Job); ok {
		for i := range r.st.Active {
			if r.st.Active[i].Name == name {
				r.st.Active[i].UID = j.UID
			}
		}
	}
	return r.write(ctx)
}

// jobName is upstream's: the nominal time in minutes.
func jobName(c *batchv1.CronJob, nominal time.Time) string {
	return fmt.Sprintf("%s-%d", c.Name, minute(nominal))
}

// write stores the status if it changed.
func (r *round) write(ctx context.Context) error {
	st := *r.st.DeepCopy()
	if apiequality.Semantic.DeepEqual(st, r.cj.Status) {
		return nil
	}
	obj, err := r.c.env.Store.Update(ctx, gk, r.cj.Namespace, r.cj.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		cj, ok := cur.(*batchv1.CronJob)
		if !ok || cj.UID != r.cj.UID || !apiequality.Semantic.DeepEqual(cj.Status, r.cj.Status) {
			return nil, loop.ErrMoved
		}
		cj.Status = st
		return cj, nil
	}, r.c.env.Write())
	if apierrors.IsNotFound(err) {
		return errors.Join(loop.ErrMoved, err) // nothing may be started for it
	}
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	if cj, ok := obj.(*batchv1.CronJob); ok {
		r.cj = cj
	}
	return nil
}

// once says something that stays true for many looks.
func (r *round) once(reason, format string, args ...any) {
	r.onceFor(reason, fmt.Sprintf(format, args...), format, args...)
}

// onceFor says it once for each subject.
func (r *round) onceFor(reason, subject, format string, args ...any) {
	message := fmt.Sprintf(format, args...)
	r.c.mu.Lock()
	known := r.c.said[r.key] == reason+subject
	r.c.said[r.key] = reason + subject
	r.c.mu.Unlock()
	if !known {
		r.note(events.Warning, reason, "%s", message)
	}
}

// tellCrowded says that times are left out, again while that goes on, as
// events do not stay.
func (r *round) tellCrowded() {
	now := time.Now()
	r.c.mu.Lock()
	told, known := r.c.crowded[r.key]
	known = known && told.schedule == r.cj.Spec.Schedule && now.Sub(told.at) < remarkEvery
	if !known {
		r.c.crowded[r.key] = remark{r.cj.Spec.Schedule, now}
	}
	r.c.mu.Unlock()
	if !known {
		r.note(events.Warning, "TooFrequent", "The schedule %q has several times a minute: not more than one job a minute is started, the other runs are left out", r.cj.Spec.Schedule)
	}
}

func (r *round) note(eventType, reason, format string, args ...any) {
	r.c.env.Events.Event(events.Ref(gk, r.cj), eventType, reason, fmt.Sprintf(format, args...))
}

// since is when the stamp was first seen to lie far ahead, by a clock that
// does not lie behind that; now if it does not.
func (c *controller) since(key state.Key, stamp, now time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if stamp.Sub(now) <= maxAhead {
		delete(c.ahead, key)
		return now
	}
	t, ok := c.ahead[key]
	if !ok || t.After(now) {
		c.ahead[key], t = now, now
	}
	return t
}

func (c *controller) wait(key state.Key) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if x := c.caps[key]; x != nil {
		return x.wait(time.Now())
	}
	return 0
}

func (c *controller) started(key state.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.caps[key]
	if x == nil {
		x = &startCap{}
		c.caps[key] = x
	}
	x.note(time.Now())
}
