// Package deployment rolls the pods of a Deployment from one template to the
// next, through ReplicaSets.
//
// Owned fields: the existence of the Deployment's ReplicaSets, their size
// and annotations, and the Deployment's status and revision annotation.
// What to do is decided by pure functions of (Deployment, ReplicaSets, now)
// in rolling.go, revision.go and status.go; this file reads and writes.
package deployment

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/readiness"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

var (
	deploymentGK = schema.GroupKind{Group: appsv1.GroupName, Kind: "Deployment"}
	replicaSetGK = schema.GroupKind{Group: appsv1.GroupName, Kind: "ReplicaSet"}
	podGK        = schema.GroupKind{Kind: "Pod"}
)

type controller struct {
	env loop.Env
	// ready is since when pods are, by Deployment; of those alone that may be
	// rolled back, while that is under way.
	ready *readiness.Tracker
}

// New makes the Deployment controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env, readiness.New()}
	return &loop.Controller{
		Name:    "deployment",
		Workers: 4,
		Sources: []loop.Source{
			loop.Self(deploymentGK.String()),
			loop.Controlled(replicaSetGK.String(), deploymentGK.String()),
			{Kind: replicaSetGK.String(), Keys: c.orphanSet},
			{Kind: podGK.String(), Keys: c.endedPod},
		},
		Reconcile: c.reconcile,
	}
}

// orphanSet wakes the Deployments that could adopt a ReplicaSet.
func (c *controller) orphanSet(ev state.Event, add func(state.Key)) {
	if _, owned := loop.ControllerOf(ev.Record); owned || ev.Type == state.Deleted {
		return
	}
	ns := ev.Record.Header.Key.Namespace
	c.env.Reader.Snapshot().Range(deploymentGK.String(), ns, state.Key{}, func(r *state.Record) bool {
		if obj, err := c.env.Store.Decode(r); err == nil {
			if d, ok := obj.(*appsv1.Deployment); ok {
				if sel, err := metav1.LabelSelectorAsSelector(d.Spec.Selector); err == nil && !sel.Empty() && sel.Matches(labels.Set(ev.Record.Header.Labels)) {
					add(r.Header.Key)
				}
			}
		}
		return true
	})
}

// endedPod wakes the Deployment of a pod that ended: Recreate waits for that.
func (c *controller) endedPod(ev state.Event, add func(state.Key)) {
	if ev.Type == state.Added || (ev.Type == state.Modified && !ended(ev.Record)) {
		return
	}
	o, ok := loop.ControllerOf(ev.Record)
	if !ok || o.Kind != replicaSetGK.String() {
		return
	}
	rs, ok := c.env.Reader.Snapshot().Get(state.Key{Kind: o.Kind, Namespace: ev.Record.Header.Key.Namespace, Name: o.Name})
	if !ok {
		return
	}
	if o, ok := loop.ControllerOf(rs); ok && o.Kind == deploymentGK.String() {
		add(state.Key{Kind: o.Kind, Namespace: rs.Header.Key.Namespace, Name: o.Name})
	}
}

func ended(r *state.Record) bool {
	return r.Header.Phase == string(corev1.PodSucceeded) || r.Header.Phase == string(corev1.PodFailed)
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(deploymentGK, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		c.ready.Forget(key)
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	shared, ok := obj.(*appsv1.Deployment)
	if !ok {
		return 0, loop.Terminal(fmt.Errorf("not a Deployment: %T", obj))
	}
	r := &round{c: c, d: shared.DeepCopy(), before: shared, now: c.env.Clock.Now()}
	sel, err := metav1.LabelSelectorAsSelector(r.d.Spec.Selector)
	if err != nil {
		return 0, loop.Terminal(fmt.Errorf("selector: %w", err))
	}
	if sel.Empty() {
		r.note(events.Warning, "SelectingAll", "This deployment is selecting all pods. A non-empty selector is required.")
		st := *r.d.Status.DeepCopy()
		st.ObservedGeneration = r.d.Generation
		return 0, r.writeStatus(ctx, st)
	}
	if err := r.claim(ctx, sel); err != nil {
		return 0, err
	}
	return r.run(ctx)
}

// round is one reconcile of one Deployment. d is private; d.Status collects
// the conditions of this round and is written once, at the end.
type round struct {
	c      *controller
	d      *appsv1.Deployment
	before *appsv1.Deployment // as read
	now    time.Time
	sets   []*appsv1.ReplicaSet
	newRS  *appsv1.ReplicaSet
	old    []*appsv1.ReplicaSet
	// renewed: the new set was there before and just became the newest.
	renewed bool
	watch   watch
}

func (r *round) run(ctx context.Context) (time.Duration, error) {
	r.newRS, r.old = split(r.d, r.sets)
	if r.d.DeletionTimestamp != nil {
		return 0, r.writeStatus(ctx, countStatus(r.d, r.old, r.newRS, r.now))
	}
	if err := r.nameGood(ctx); err != nil {
		return 0, err
	}
	pauseCondition(r.d, &r.d.Status, r.now)
	if r.d.Spec.Paused || isScaling(r.d, r.sets) {
		return 0, r.scaleOnly(ctx)
	}
	err := r.lookAtNewest(ctx)
	if err != nil {
		return 0, err
	}
	if isRolling(r.d) {
		err = r.rolling(ctx)
	} else {
		err = r.recreate(ctx)
	}
	if err != nil {
		if errors.Is(err, errNamespaceEnds) {
			return 0, nil
		}
		// The trouble shows in the status, which is written all the same.
		st, _ := r.status()
		return 0, errors.Join(err, r.writeStatus(ctx, st))
	}
	r.restartProgress()
	st, again := r.status()
	back, soon, err := r.rollBack(ctx, &st)
	if back && err == nil {
		return 0, nil // the next round is about another template
	}
	for _, soon := range []time.Duration{soon, r.watch.left} {
		if soon > 0 && (again == 0 || soon < again) {
			again = soon
		}
	}
	return again, errors.Join(err, r.writeStatus(ctx, st))
}

// status is rolloutStatus, in which no deadline passes by a clock that nobody
// trusts: it is looked at again.
func (r *round) status() (st appsv1.DeploymentStatus, again time.Duration) {
	st, again = rolloutStatus(r.d, r.old, r.newRS, r.watch, r.now)
	before, after := condition(&r.d.Status, appsv1.DeploymentProgressing), condition(&st, appsv1.DeploymentProgressing)
	if r.c.env.Trust == nil || r.c.env.Trust() == nil || before == nil || after == nil || after.Reason != reasonTimedOut || before.Reason == reasonTimedOut {
		return st, again
	}
	st, _ = rolloutStatus(r.d, r.old, r.newRS, r.watch, before.LastUpdateTime.Time)
	return st, time.Minute
}

// scaleOnly changes sizes but never starts or continues a rollout.
func (r *round) scaleOnly(ctx context.Context) error {
	if err := r.updateNewSet(ctx); err != nil {
		return err
	}
	if err := r.resize(ctx, spare(r.d, r.old, r.newRS, rescale(r.d, r.old, r.newRS))...); err != nil {
		return err
	}
	if r.d.Spec.Paused {
		if err := r.cleanup(ctx); err != nil {
			return err
		}
	}
	return r.writeStatus(ctx, countStatus(r.d, r.old, r.newRS, r.now))
}

func (r *round) rolling(ctx context.Context) error {
	if err := r.ensureNewSet(ctx); err != nil {
		return err
	}
	if up, ok := growNew(r.d, r.old, r.newRS); ok {
		return r.resize(ctx, up)
	}
	if down := shrinkOld(r.d, r.old, r.newRS); len(down) > 0 {
		return r.resize(ctx, down...)
	}
	return r.cleanupIfComplete(ctx)
}

func (r *round) recreate(ctx context.Context) error {
	if r.newRS != nil {
		if err := r.updateNewSet(ctx); err != nil {
			return err
		}
	}
	if active := withReplicas(r.old); len(active) > 0 {
		var zero []resize
		for _, rs := range active {
			zero = append(zero, resize{rs, 0})
		}
		return r.resize(ctx, zero...)
	}
	if running, err := r.oldPodsRun(); err != nil || running {
		return err
	}
	if err := r.ensureNewSet(ctx); err != nil {
		return err
	}
	if replicas(r.newRS.Spec.Replicas) != wanted(r.d) {
		if err := r.resize(ctx, resize{r.newRS, wanted(r.d)}); err != nil {
			return err
		}
	}
	return r.cleanupIfComplete(ctx)
}

func (r *round) cleanupIfComplete(ctx context.Context) error {
	if !complete(r.d, &r.d.Status) {
		return nil
	}
	return r.cleanup(ctx)
}

// cleanup removes old sets beyond the history limit.
func (r *round) cleanup(ctx context.Context) error {
	for _, rs := range surplus(r.d, r.old) {
		uid, rv := rs.UID, rs.ResourceVersion
		_, _, err := r.c.env.Store.Delete(ctx, replicaSetGK, rs.Namespace, rs.Name, registry.DeleteOptions{UID: &uid, ResourceVersion: &rv, Term: r.c.env.Term})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("remove old replica set %s: %w", rs.Name, err)
		}
	}
	return nil
}

// writeStatus writes the status and the revision annotation if they differ
// from what was read.
func (r *round) writeStatus(ctx context.Context, st appsv1.DeploymentStatus) error {
	if err := r.writeRevision(ctx); err != nil {
		return err
	}
	if apiequality.Semantic.DeepEqual(st, r.before.Status) {
		return nil
	}
	_, err := r.c.env.Store.Update(ctx, deploymentGK, r.d.Namespace, r.d.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		d, ok := cur.(*appsv1.Deployment)
		if !ok || d.UID != r.d.UID {
			return nil, errMoved
		}
		d.Status = st
		return d, nil
	}, r.c.env.Write())
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("status: %w", err)
	}
	return nil
}

func (r *round) writeRevision(ctx context.Context) error {
	if r.newRS == nil || r.d.DeletionTimestamp != nil {
		return nil
	}
	rev := r.newRS.Annotations[revisionAnnotation]
	if rev == "" || r.d.Annotations[revisionAnnotation] == rev {
		return nil
	}
	if _, err := strconv.ParseInt(rev, 10, 64); err != nil {
		return nil // edited by hand; the next new set mends it
	}
	_, err := r.c.env.Store.Update(ctx, deploymentGK, r.d.Namespace, r.d.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		d, ok := cur.(*appsv1.Deployment)
		if !ok || d.UID != r.d.UID {
			return nil, errMoved
		}
		if d.Annotations == nil {
			d.Annotations = map[string]string{}
		}
		d.Annotations[revisionAnnotation] = rev
		return d, nil
	}, r.c.env.Write())
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("revision annotation: %w", err)
	}
	return nil
}

func (r *round) note(eventType, reason, format string, args ...any) {
	r.c.env.Events.Event(events.Ref(deploymentGK, r.d), eventType, reason, fmt.Sprintf(format, args...))
}
