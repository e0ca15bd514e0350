package registry

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// Update implements Store. With sub Scale, the mutation receives and returns
// an autoscaling/v1 Scale, and so does the caller.
func (r *Registry) Update(ctx context.Context, gk schema.GroupKind, namespace, name string, sub Subresource, mutate Mutate, o WriteOptions) (out runtime.Object, err error) {
	err = r.surely(ctx, gk, namespace, o.Term, func() error {
		out, err = r.update(ctx, gk, namespace, name, sub, mutate, o)
		return err
	})
	return out, err
}

func (r *Registry) update(ctx context.Context, gk schema.GroupKind, namespace, name string, sub Subresource, mutate Mutate, o WriteOptions) (runtime.Object, error) {
	served, stored, err := resolve(gk)
	if err != nil {
		return nil, err
	}
	if sub == Binding {
		return nil, apierrors.NewBadRequest("a binding is made with Bind, not Update")
	}
	if sub == Scale {
		return r.updateScale(ctx, served, namespace, name, mutate, o)
	}
	attempt := func() (out runtime.Object, again bool, err error) {
		if err := ctx.Err(); err != nil {
			return nil, false, proposeError(err)
		}
		rec, ok := r.find(stored, namespace, name)
		if !ok {
			return nil, false, notFound(served, name)
		}
		return r.tryUpdate(ctx, served, stored, rec, sub, mutate, o)
	}
	key := keyOf(stored, namespace, name)
	if !r.writers.contended(key) {
		if out, again, err := attempt(); !again {
			return out, err
		}
	}
	done, err := r.writers.take(ctx, key)
	if err != nil {
		return nil, proposeError(err)
	}
	defer done()
	for range updateAttempts {
		if out, again, err := attempt(); !again {
			return out, err
		}
	}
	return nil, conflict(served, name, errModified)
}

// tryUpdate runs one attempt on one version; again is true when it lost a
// race that a fresh version may win.
func (r *Registry) tryUpdate(ctx context.Context, served, stored *manifests.Kind, rec *state.Record, sub Subresource, mutate Mutate, o WriteOptions) (out runtime.Object, again bool, err error) {
	cur, err := r.Decode(rec)
	if err != nil {
		return nil, false, apierrors.NewInternalError(err)
	}
	given, err := toServed(served, cur)
	if err != nil {
		return nil, false, apierrors.NewInternalError(err)
	}
	obj, err := mutate(given.DeepCopyObject())
	if err != nil {
		return nil, false, err
	}
	obj = toStored(obj)
	if err := precheck(served, rec, obj); err != nil {
		return nil, false, err
	}
	obj, chosen, err := r.admitUpdate(ctx, stored, sub, obj, cur, o)
	if err != nil {
		return nil, false, err
	}
	if err := r.noteIgnored(obj, cur); err != nil {
		return nil, false, apierrors.NewInternalError(err)
	}
	next, unchanged, err := r.nextRecord(stored, sub, obj, cur, rec)
	if err != nil {
		return nil, false, err
	}
	switch {
	case unchanged && !removable(obj):
		out, err = r.DecodeAs(served, rec)
		return out, false, err
	case o.DryRun:
		if claim := r.heldClaim(next); claim != "" {
			return nil, false, claimed(served, obj, rec.Header.Key.Name, claim)
		}
		next.Header.ResourceVersion = rec.Header.ResourceVersion
		out, err = r.decodeDry(served, next)
		return out, false, err
	case removable(obj):
		return r.finishDelete(ctx, served, stored, rec, next, o.Term)
	}
	res, err := r.propose(ctx, stored, rec.Header.Key.Namespace, replace(next, rec, o.Term))
	if err != nil {
		return nil, false, err
	}
	switch res.Reason {
	case state.ReasonNone:
		out, err = r.written(served, res.Record)
		return out, false, err
	case state.ReasonConflict:
		return nil, true, nil
	case state.ReasonClaim:
		// An address or port that allocate chose is gone: choose again.
		return nil, slices.Contains(chosen, res.Detail), claimed(served, obj, rec.Header.Key.Name, res.Detail)
	}
	return nil, false, refused(served, rec.Header.Key.Namespace, rec.Header.Key.Name, res)
}

// precheck compares what the caller returned with what is stored.
func precheck(served *manifests.Kind, rec *state.Record, obj runtime.Object) error {
	m, err := meta.Accessor(obj)
	if err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	h := &rec.Header
	if m.GetName() != "" && m.GetName() != h.Key.Name {
		return apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s) does not match the name on the URL (%s)", m.GetName(), h.Key.Name))
	}
	if ns := m.GetNamespace(); ns != "" && ns != h.Key.Namespace {
		return apierrors.NewBadRequest("the namespace of the provided object does not match the namespace sent on the request")
	}
	if uid := string(m.GetUID()); uid != "" && uid != h.UID {
		return uidConflict(served, h.Key.Name, uid, h.UID)
	}
	if rv := m.GetResourceVersion(); rv != "" && rv != "0" && rv != formatRV(h.ResourceVersion) {
		return conflict(served, h.Key.Name, errModified)
	}
	return nil
}

// admitUpdate runs the strategy, admission, defaults and validation. chosen
// are the claims that were allocated on the way.
func (r *Registry) admitUpdate(ctx context.Context, stored *manifests.Kind, sub Subresource, obj, cur runtime.Object, o WriteOptions) (out runtime.Object, chosen []string, err error) {
	if obj, err = prepareUpdate(stored, sub, obj, cur); err != nil {
		return nil, nil, err
	}
	if sub == Main {
		manifests.Default(obj)
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, nil, apierrors.NewInternalError(err)
	}
	a := r.attributes(admission.Update, stored, m, sub, obj, cur, o)
	if err := r.cfg.Admission.Admit(ctx, a); err != nil {
		return nil, nil, err
	}
	obj = a.Object
	if sub == Main {
		manifests.Default(obj)
		if svc, ok := obj.(*corev1.Service); ok {
			prev, _ := cur.(*corev1.Service)
			if chosen, err = r.allocate(svc, prev); err != nil {
				return nil, nil, err
			}
		}
	}
	if m, err = meta.Accessor(obj); err != nil {
		return nil, nil, apierrors.NewInternalError(err)
	}
	if errs := manifests.ValidateUpdate(obj, cur); len(errs) > 0 {
		return nil, nil, apierrors.NewInvalid(stored.GVK.GroupKind(), m.GetName(), errs)
	}
	if sub == Main || sub == Ephemeral {
		if err := r.unsupported(stored, obj, m.GetName(), o); err != nil {
			return nil, nil, err
		}
	}
	if err := r.cfg.Admission.Validate(ctx, a); err != nil {
		return nil, nil, err
	}
	return a.Object, chosen, nil
}

// nextRecord encodes the object, raises its generation if its spec changed,
// and says whether there is anything to write.
func (r *Registry) nextRecord(stored *manifests.Kind, sub Subresource, obj, cur runtime.Object, rec *state.Record) (next *state.Record, unchanged bool, err error) {
	next, err = r.codec.Encode(stored, obj)
	if err != nil {
		return nil, false, apierrors.NewInternalError(err)
	}
	if sub == Status && !same(next.Spec, rec.Spec) {
		// Only an encoding that an older version wrote can differ here.
		next.Spec = rec.Spec
	}
	if sub != Status && !same(next.Status, rec.Status) && stored.Status {
		next.Status = rec.Status
	}
	if stored.Generation && !same(next.Spec, rec.Spec) {
		next.Header.Generation = rec.Header.Generation + 1
	}
	if sameRecord(next, rec) {
		return next, true, nil
	}
	// Field managers' times alone are not a change.
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, false, apierrors.NewInternalError(err)
	}
	cm, err := meta.Accessor(cur)
	if err != nil {
		return nil, false, apierrors.NewInternalError(err)
	}
	if len(m.GetManagedFields()) > 0 && onlyTimes(m, cm) {
		mf := m.GetManagedFields()
		m.SetManagedFields(cm.GetManagedFields())
		again, err := r.codec.Encode(stored, obj)
		m.SetManagedFields(mf)
		if err != nil {
			return nil, false, apierrors.NewInternalError(err)
		}
		probe := *next
		probe.Meta = again.Meta
		if sameRecord(&probe, rec) {
			return next, true, nil
		}
	}
	return next, false, nil
}

// replace is the op that puts next in place of rec. Bodies that did not
// change stay out of the log.
func replace(next, rec *state.Record, term uint64) state.Op {
	op := state.Op{Type: state.OpUpdate, UID: rec.Header.UID, ResourceVersion: rec.Header.ResourceVersion, Term: term}
	slim := *next
	if same(next.Meta, rec.Meta) {
		slim.Meta, op.Keep = nil, op.Keep|state.KeepMeta
	}
	if same(next.Spec, rec.Spec) {
		slim.Spec, op.Keep = nil, op.Keep|state.KeepSpec
	}
	if same(next.Status, rec.Status) {
		slim.Status, op.Keep = nil, op.Keep|state.KeepStatus
	}
	op.Record = &slim
	return op
}

// removable says whether an object that is being deleted has nothing left to
// wait for, so that this update ends it.
func removable(obj runtime.Object) bool {
	m, err := meta.Accessor(obj)
	if err != nil || m.GetDeletionTimestamp() == nil || len(m.GetFinalizers()) > 0 {
		return false
	}
	if g := m.GetDeletionGracePeriodSeconds(); g != nil && *g != 0 {
		return false
	}
	if ns, ok := obj.(*corev1.Namespace); ok && slices.Contains(ns.Spec.Finalizers, corev1.FinalizerKubernetes) {
		return false
	}
	return true
}

// finishDelete deletes what an update released. The state machine refuses to
// delete while the stored header has finalizers, so the update that removes
// the last one and the deletion travel together; if the update lost a race,
// the deletion is refused for the finalizers that are left.
func (r *Registry) finishDelete(ctx context.Context, served, stored *manifests.Kind, rec, next *state.Record, term uint64) (out runtime.Object, again bool, err error) {
	key := rec.Header.Key
	ops := []state.Op{{Type: state.OpDelete, Key: &key, UID: rec.Header.UID, Term: term}}
	if sameRecord(next, rec) {
		ops[0].ResourceVersion = rec.Header.ResourceVersion
	} else {
		ops = []state.Op{replace(next, rec, term), ops[0]}
	}
	res, err := awaited(ctx, r.proposer(stored, key.Namespace), ops)
	if err != nil {
		return nil, false, proposeError(err)
	}
	if len(res) != len(ops) {
		return nil, false, fmt.Errorf("registry: %d ops proposed, %d results", len(ops), len(res))
	}
	last := rec
	for i := range res {
		switch res[i].Reason {
		case state.ReasonNone:
			if res[i].Record != nil {
				last = res[i].Record
			}
		case state.ReasonConflict:
			return nil, true, nil
		case state.ReasonNotFound:
			if i == 0 {
				return nil, false, notFound(served, key.Name)
			}
		case state.ReasonFinalizers:
			return nil, true, nil
		default:
			return nil, false, refused(served, key.Namespace, key.Name, res[i])
		}
	}
	out, err = r.written(served, last)
	return out, false, err
}

// Bind implements Store.
func (r *Registry) Bind(ctx context.Context, b []PodBinding, term uint64) ([]error, error) {
	if len(b) == 0 {
		return nil, nil
	}
	pods := manifests.ByGroupKind(schema.GroupKind{Kind: "Pod"})
	ops := make([]state.Op, len(b))
	for i := range b {
		ops[i] = state.Op{
			Type: state.OpBind, Term: term, UID: string(b[i].PodUID), Node: b[i].Node, NodeUID: string(b[i].NodeUID),
			Key: &state.Key{Kind: pods.StorageKind(), Namespace: b[i].Namespace, Name: b[i].Name},
		}
	}
	res, err := r.cfg.Proposer.Propose(ctx, ops)
	if err != nil {
		return nil, proposeError(err)
	}
	if len(res) != len(ops) {
		return nil, fmt.Errorf("registry: %d ops proposed, %d results", len(ops), len(res))
	}
	errs := make([]error, len(b))
	for i := range res {
		if res[i].Reason != state.ReasonNone {
			errs[i] = &BindError{Reason: res[i].Reason, Detail: res[i].Detail, err: refused(pods, b[i].Namespace, b[i].Name, res[i])} //nolint:gosec // one result an op: checked above
		}
	}
	return errs, nil
}

// BindError is the refusal of one binding. It unwraps to the Kubernetes
// error; the scheduler decides on Reason.
type BindError struct {
	Reason state.Reason
	Detail string
	err    error
}

func (e *BindError) Error() string { return e.err.Error() }

// Unwrap returns the *apierrors.StatusError.
func (e *BindError) Unwrap() error { return e.err }

func formatRV(rv uint64) string { return strconv.FormatUint(rv, 10) }
