package deployment

import (
	"context"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

var (
	// errMoved says that an object is no longer what the decision was about.
	errMoved = loop.ErrMoved
	// errNamespaceEnds ends a round without complaint.
	errNamespaceEnds = errors.New("the namespace is being deleted")
)

// claim reads the Deployment's ReplicaSets, after adopting and releasing.
func (r *round) claim(ctx context.Context, sel labels.Selector) error {
	snap := r.c.env.Reader.Snapshot()
	uid := string(r.d.UID)
	var mine, moves []*state.Record
	snap.ByOwner(uid, func(rec *state.Record) bool {
		o, ok := loop.ControllerOf(rec)
		if !ok || o.UID != uid || rec.Header.Key.Kind != replicaSetGK.String() {
			return true
		}
		if sel.Matches(labels.Set(rec.Header.Labels)) || rec.Header.Deleted != 0 {
			mine = append(mine, rec)
		} else {
			moves = append(moves, rec)
		}
		return true
	})
	if r.d.DeletionTimestamp == nil {
		snap.Range(replicaSetGK.String(), r.d.Namespace, state.Key{}, func(rec *state.Record) bool {
			if _, owned := loop.ControllerOf(rec); !owned && rec.Header.Deleted == 0 && sel.Matches(labels.Set(rec.Header.Labels)) {
				moves = append(moves, rec)
			}
			return true
		})
		for _, rec := range moves {
			adopted, err := r.setController(ctx, rec, sel)
			if err != nil {
				return err
			}
			if adopted != nil {
				r.sets = append(r.sets, adopted)
			}
		}
	}
	for _, rec := range mine {
		obj, err := r.c.env.Store.Decode(rec)
		if err != nil {
			return fmt.Errorf("decode replica set %s: %w", rec.Header.Key.Name, err)
		}
		if rs, ok := obj.(*appsv1.ReplicaSet); ok {
			r.sets = append(r.sets, rs)
		}
	}
	return nil
}

// setController adopts the set if it matches and has no controller, and
// releases it if it is ours and does not match. adopted is nil on release.
func (r *round) setController(ctx context.Context, rec *state.Record, sel labels.Selector) (adopted *appsv1.ReplicaSet, err error) {
	obj, err := r.c.env.Store.Update(ctx, replicaSetGK, rec.Header.Key.Namespace, rec.Header.Key.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		rs, ok := cur.(*appsv1.ReplicaSet)
		if !ok || string(rs.UID) != rec.Header.UID || rs.DeletionTimestamp != nil {
			return nil, errMoved
		}
		refs := rs.OwnerReferences[:0:0]
		for _, o := range rs.OwnerReferences {
			if o.UID != r.d.UID {
				refs = append(refs, o)
			}
		}
		if sel.Matches(labels.Set(rs.Labels)) {
			if o := metav1.GetControllerOf(rs); o != nil && o.UID != r.d.UID {
				return nil, errMoved
			}
			refs = append(refs, *metav1.NewControllerRef(r.d, appsv1.SchemeGroupVersion.WithKind("Deployment")))
		}
		rs.OwnerReferences = refs
		return rs, nil
	}, r.c.env.Write())
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("adopt or release replica set %s: %w", rec.Header.Key.Name, err)
	}
	if rs, ok := obj.(*appsv1.ReplicaSet); ok && metav1.IsControlledBy(rs, r.d) {
		return rs, nil
	}
	return nil, nil
}

// updateNewSet gives the existing new set its revision, annotations and
// minReadySeconds.
func (r *round) updateNewSet(ctx context.Context) error {
	if r.newRS == nil {
		return nil
	}
	rev := nextRevision(r.old)
	probe := r.newRS.DeepCopy()
	changed := annotate(r.d, probe, rev, true)
	if changed || probe.Spec.MinReadySeconds != minReady(r.d) {
		rs, err := r.updateSet(ctx, r.newRS, func(rs *appsv1.ReplicaSet) {
			annotate(r.d, rs, rev, true)
			rs.Spec.MinReadySeconds = minReady(r.d)
		})
		if err != nil {
			return err
		}
		r.renewed = rs.Annotations[revisionAnnotation] != r.newRS.Annotations[revisionAnnotation]
		r.newRS = rs
	}
	if hasDeadline(r.d) && condition(&r.d.Status, appsv1.DeploymentProgressing) == nil {
		setCondition(&r.d.Status, appsv1.DeploymentProgressing, corev1.ConditionTrue, reasonFoundSet,
			fmt.Sprintf("Found new replica set %q", r.newRS.Name), r.now)
	}
	return nil
}

// ensureNewSet makes the ReplicaSet of the current template if there is none.
func (r *round) ensureNewSet(ctx context.Context) error {
	if r.newRS != nil {
		return r.updateNewSet(ctx)
	}
	rs, err := newSet(r.d, nextRevision(r.old))
	if err != nil {
		return loop.Terminal(err)
	}
	size := newReplicas(r.d, r.old, 0)
	rs.Spec.Replicas = &size
	obj, err := r.c.env.Store.Create(ctx, rs, r.c.env.Write())
	switch {
	case apierrors.IsAlreadyExists(err):
		return r.collide(ctx, rs.Name)
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return errNamespaceEnds
	case err != nil:
		message := fmt.Sprintf("Failed to create new replica set %q: %v", rs.Name, err)
		if hasDeadline(r.d) {
			setCondition(&r.d.Status, appsv1.DeploymentProgressing, corev1.ConditionFalse, reasonSetError, message, r.now)
		}
		r.note(events.Warning, reasonSetError, "%s", message)
		return fmt.Errorf("create replica set: %w", err)
	}
	made, ok := obj.(*appsv1.ReplicaSet)
	if !ok {
		return fmt.Errorf("create replica set: got a %T", obj)
	}
	r.newRS = made
	if size > 0 {
		r.note(events.Normal, "ScalingReplicaSet", "Scaled up replica set %s from 0 to %d", made.Name, size)
	}
	if hasDeadline(r.d) {
		setCondition(&r.d.Status, appsv1.DeploymentProgressing, corev1.ConditionTrue, reasonNewSet,
			fmt.Sprintf("Created new replica set %q", made.Name), r.now)
	}
	return nil
}

// collide handles a name that is taken: by a set that was made a moment ago
// for this very template (then the next round finds it), or by another
// template with the same hash (then the collision count changes the name).
func (r *round) collide(ctx context.Context, name string) error {
	obj, err := r.c.env.Store.Get(replicaSetGK, r.d.Namespace, name)
	if err != nil {
		return fmt.Errorf("replica set %s: %w", name, err)
	}
	rs, ok := obj.(*appsv1.ReplicaSet)
	if ok && metav1.IsControlledBy(rs, r.d) && sameTemplate(&rs.Spec.Template, &r.d.Spec.Template) {
		r.newRS = rs
		return r.updateNewSet(ctx)
	}
	n := int32(1)
	if c := r.d.Status.CollisionCount; c != nil {
		n = *c + 1
	}
	r.d.Status.CollisionCount = &n
	st := *r.before.Status.DeepCopy()
	st.CollisionCount = &n
	if err := r.writeStatus(ctx, st); err != nil {
		return err
	}
	r.before = r.before.DeepCopy()
	r.before.Status = st
	return fmt.Errorf("replica set %s: the name is taken by another template; trying another", name)
}

// resize writes new sizes, and the annotations that say what they were
// computed from.
func (r *round) resize(ctx context.Context, list ...resize) error {
	for _, z := range list {
		from := replicas(z.rs.Spec.Replicas)
		if from == z.to && !setReplicaAnnotations(r.d, z.rs.DeepCopy()) {
			continue
		}
		rs, err := r.updateSet(ctx, z.rs, func(rs *appsv1.ReplicaSet) {
			to := z.to
			rs.Spec.Replicas = &to
			setReplicaAnnotations(r.d, rs)
		})
		if err != nil {
			return err
		}
		if from != z.to {
			way := "up"
			if z.to < from {
				way = "down"
			}
			r.note(events.Normal, "ScalingReplicaSet", "Scaled %s replica set %s from %d to %d", way, rs.Name, from, z.to)
		}
		r.replace(z.rs, rs)
	}
	return nil
}

func (r *round) replace(was, is *appsv1.ReplicaSet) {
	if r.newRS == was {
		r.newRS = is
	}
	for i := range r.old {
		if r.old[i] == was {
			r.old[i] = is
		}
	}
}

// updateSet changes a set that is still what the decision saw: another
// spec means that the sizes were computed from something else.
func (r *round) updateSet(ctx context.Context, was *appsv1.ReplicaSet, change func(*appsv1.ReplicaSet)) (*appsv1.ReplicaSet, error) {
	obj, err := r.c.env.Store.Update(ctx, replicaSetGK, was.Namespace, was.Name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		rs, ok := cur.(*appsv1.ReplicaSet)
		if !ok || rs.UID != was.UID || rs.Generation != was.Generation {
			return nil, errMoved
		}
		change(rs)
		return rs, nil
	}, r.c.env.Write())
	if err != nil {
		return nil, fmt.Errorf("update replica set %s: %w", was.Name, err)
	}
	rs, ok := obj.(*appsv1.ReplicaSet)
	if !ok {
		return nil, fmt.Errorf("update replica set %s: got a %T", was.Name, obj)
	}
	return rs, nil
}

// oldPodsRun says whether pods of old sets are still there: Recreate waits
// for them. A lost pod may run on for as long as its node is silent, and is
// not waited for.
func (r *round) oldPodsRun() (bool, error) {
	snap := r.c.env.Reader.Snapshot()
	for _, rs := range r.old {
		running := false
		var failed error
		snap.ByOwner(string(rs.UID), func(rec *state.Record) bool {
			if rec.Header.Key.Kind != podGK.String() || ended(rec) {
				return true
			}
			obj, err := r.c.env.Store.Decode(rec)
			if err != nil {
				failed = fmt.Errorf("decode pod %s: %w", rec.Header.Key.Name, err)
				return false
			}
			if pod, ok := obj.(*corev1.Pod); ok && !lost.Is(pod) {
				running = true
			}
			return !running
		})
		if running || failed != nil {
			return running, failed
		}
	}
	return false, nil
}
