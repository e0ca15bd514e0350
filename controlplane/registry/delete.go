package registry

import (
	"context"
	"errors"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// Delete implements Store. obj is the object as it was when it went, or what
// remains of it.
func (r *Registry) Delete(ctx context.Context, gk schema.GroupKind, namespace, name string, o DeleteOptions) (obj runtime.Object, gone bool, err error) {
	err = r.surely(ctx, gk, namespace, o.Term, func() error {
		obj, gone, err = r.delete(ctx, gk, namespace, name, o)
		return err
	})
	return obj, gone, err
}

func (r *Registry) delete(ctx context.Context, gk schema.GroupKind, namespace, name string, o DeleteOptions) (obj runtime.Object, gone bool, err error) {
	served, stored, err := resolve(gk)
	if err != nil {
		return nil, false, err
	}
	for range updateAttempts {
		if err := ctx.Err(); err != nil {
			return nil, false, proposeError(err)
		}
		rec, ok := r.find(stored, namespace, name)
		if !ok {
			return nil, false, notFound(served, name)
		}
		obj, gone, again, err := r.tryDelete(ctx, served, stored, rec, o)
		if !again {
			return obj, gone, err
		}
	}
	return nil, false, conflict(served, name, errModified)
}

func (r *Registry) tryDelete(ctx context.Context, served, stored *manifests.Kind, rec *state.Record, o DeleteOptions) (obj runtime.Object, gone, again bool, err error) {
	h := &rec.Header
	if o.UID != nil && string(*o.UID) != h.UID {
		return nil, false, false, uidConflict(served, h.Key.Name, string(*o.UID), h.UID)
	}
	if o.ResourceVersion != nil && *o.ResourceVersion != formatRV(h.ResourceVersion) {
		return nil, false, false, versionConflict(served, h.Key.Name, *o.ResourceVersion, formatRV(h.ResourceVersion))
	}
	cur, err := r.Decode(rec)
	if errors.Is(err, errNoSealer) && !o.DryRun {
		// Nobody can read it any more; to delete it is all that is left.
		return r.removeAs(ctx, served, stored, rec, o, nameOnly(served, h))
	}
	if err != nil {
		return nil, false, false, apierrors.NewInternalError(err)
	}
	next := cur.DeepCopyObject()
	m, err := meta.Accessor(next)
	if err != nil {
		return nil, false, false, apierrors.NewInternalError(err)
	}
	if err := r.admitDelete(ctx, stored, m, cur, o); err != nil {
		return nil, false, false, err
	}
	switch markDeleted(next, m, o, r.now()) {
	case pending:
		obj, err = toServed(served, cur)
		return obj, false, false, err
	case remove:
		if o.DryRun {
			obj, err = toServed(served, cur)
			return obj, true, false, err
		}
		return r.remove(ctx, served, stored, rec, o)
	}
	enc, err := r.codec.Encode(stored, next)
	if err != nil {
		return nil, false, false, apierrors.NewInternalError(err)
	}
	if sameRecord(enc, rec) {
		obj, err = toServed(served, cur)
		return obj, false, false, err
	}
	if o.DryRun {
		enc.Header.ResourceVersion = h.ResourceVersion
		obj, err = r.decodeDry(served, enc)
		return obj, false, false, err
	}
	if removable(next) { // this request took the last finalizer, one of the collector's
		obj, again, err = r.finishDelete(ctx, served, stored, rec, enc, o.Term)
		return obj, err == nil && !again, again, err
	}
	res, err := r.propose(ctx, stored, h.Key.Namespace, replace(enc, rec, o.Term))
	switch {
	case err != nil:
		return nil, false, false, err
	case res.Reason == state.ReasonConflict:
		return nil, false, true, nil
	case res.Reason != state.ReasonNone:
		return nil, false, false, refused(served, h.Key.Namespace, h.Key.Name, res)
	}
	obj, err = r.written(served, res.Record)
	return obj, false, false, err
}

func (r *Registry) admitDelete(ctx context.Context, stored *manifests.Kind, m metav1.Object, cur runtime.Object, o DeleteOptions) error {
	if len(r.cfg.Admission) == 0 {
		return nil
	}
	a := r.attributes(admission.Delete, stored, m, Main, nil, cur, WriteOptions{DryRun: o.DryRun, Warn: o.Warn, User: o.User})
	if err := r.cfg.Admission.Admit(ctx, a); err != nil {
		return err
	}
	return r.cfg.Admission.Validate(ctx, a)
}

func (r *Registry) remove(ctx context.Context, served, stored *manifests.Kind, rec *state.Record, o DeleteOptions) (obj runtime.Object, gone, again bool, err error) {
	if obj, err = r.DecodeAs(served, rec); err != nil {
		return nil, false, false, apierrors.NewInternalError(err)
	}
	return r.removeAs(ctx, served, stored, rec, o, obj)
}

// nameOnly is an object of which nothing but the header can be read.
func nameOnly(k *manifests.Kind, h *state.Header) runtime.Object {
	obj := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: h.Key.Namespace, Name: h.Key.Name, UID: types.UID(h.UID), ResourceVersion: formatRV(h.ResourceVersion),
	}}
	obj.SetGroupVersionKind(k.GVK)
	return obj
}

// removeAs removes the record and answers with obj.
func (r *Registry) removeAs(ctx context.Context, served, stored *manifests.Kind, rec *state.Record, o DeleteOptions, obj runtime.Object) (_ runtime.Object, gone, again bool, err error) {
	key := rec.Header.Key
	res, err := r.propose(ctx, stored, key.Namespace, state.Op{
		Type: state.OpDelete, Key: &key, UID: rec.Header.UID, ResourceVersion: rec.Header.ResourceVersion, Term: o.Term,
	})
	switch {
	case err != nil:
		return nil, false, false, err
	case res.Reason == state.ReasonNone:
		return obj, true, false, nil
	case res.Reason == state.ReasonConflict, res.Reason == state.ReasonFinalizers, res.Reason == state.ReasonUID:
		// Someone was faster; the preconditions are checked again.
		return nil, false, true, nil
	}
	return nil, false, false, refused(served, key.Namespace, key.Name, res)
}

// deletion is what a delete request leads to.
type deletion uint8

const (
	mark    deletion = iota // write the marked object
	remove                  // nothing to wait for
	pending                 // already under way, nothing new is asked
)

// markDeleted decides a delete request on a private copy: pure, and the
// heart of upstream's deletion rules.
func markDeleted(obj runtime.Object, m metav1.Object, o DeleteOptions, now metav1.Time) deletion {
	if ns, ok := obj.(*corev1.Namespace); ok {
		return markNamespace(ns, now)
	}
	grace, graceful := gracePeriod(obj, o)
	if m.GetDeletionTimestamp() != nil {
		old := m.GetDeletionGracePeriodSeconds()
		switch {
		case !graceful || old == nil || *old == 0:
			graceful = false // force the end of what was asked before
		case o.GracePeriodSeconds == nil || grace >= *old:
			return pending
		default: // only a shorter period may be asked
			t := metav1.NewTime(m.GetDeletionTimestamp().Add(time.Duration(grace-*old) * time.Second))
			m.SetDeletionTimestamp(&t)
			m.SetDeletionGracePeriodSeconds(&grace)
			if grace == 0 && len(m.GetFinalizers()) == 0 {
				return remove
			}
			return mark
		}
	}
	had := len(m.GetFinalizers()) > 0
	m.SetFinalizers(collectionFinalizers(m.GetFinalizers(), o.Propagation))
	waits := len(m.GetFinalizers()) > 0
	if (!graceful || grace == 0) && !waits && !had {
		return remove
	}
	if m.GetDeletionTimestamp() == nil {
		t := metav1.NewTime(now.Add(time.Duration(grace) * time.Second))
		m.SetDeletionTimestamp(&t)
		if g := m.GetGeneration(); g > 0 {
			m.SetGeneration(g + 1)
		}
		m.SetDeletionGracePeriodSeconds(&grace)
	}
	return mark
}

// gracePeriod is how long the object may take to go; graceful is false for
// kinds that have nothing to shut down.
func gracePeriod(obj runtime.Object, o DeleteOptions) (seconds int64, graceful bool) {
	p, ok := obj.(*corev1.Pod)
	if !ok {
		return 0, false
	}
	switch {
	case o.GracePeriodSeconds != nil:
		seconds = *o.GracePeriodSeconds
	case p.Spec.TerminationGracePeriodSeconds != nil:
		seconds = *p.Spec.TerminationGracePeriodSeconds
	}
	if seconds < 0 {
		seconds = 1
	}
	if p.Spec.NodeName == "" || p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodSucceeded {
		seconds = 0
	}
	return seconds, true
}

// markNamespace starts the deletion of a namespace, which its controller
// ends by emptying it and removing spec.finalizers.
func markNamespace(ns *corev1.Namespace, now metav1.Time) deletion {
	if ns.DeletionTimestamp == nil {
		ns.DeletionTimestamp = &now
		ns.Status.Phase = corev1.NamespaceTerminating
		if ns.Generation > 0 {
			ns.Generation++
		}
	}
	if len(ns.Spec.Finalizers) == 0 && len(ns.Finalizers) == 0 {
		return remove
	}
	return mark
}

// collectionFinalizers adds and removes the finalizers by which the garbage
// collector is told how to treat dependents.
func collectionFinalizers(have []string, p metav1.DeletionPropagation) []string {
	orphan := slices.Contains(have, metav1.FinalizerOrphanDependents)
	foreground := slices.Contains(have, metav1.FinalizerDeleteDependents)
	switch p {
	case metav1.DeletePropagationOrphan:
		orphan, foreground = true, false
	case metav1.DeletePropagationForeground:
		orphan, foreground = false, true
	case metav1.DeletePropagationBackground:
		orphan, foreground = false, false
	}
	var out []string
	for _, f := range have {
		switch f {
		case metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents:
		default:
			out = append(out, f)
		}
	}
	if orphan {
		out = append(out, metav1.FinalizerOrphanDependents)
	}
	if foreground {
		out = append(out, metav1.FinalizerDeleteDependents)
	}
	return out
}
