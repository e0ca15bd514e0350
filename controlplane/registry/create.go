package registry

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// Attempts of one request before it gives up.
const (
	nameAttempts   = 8  // generated names that were taken: upstream's figure
	claimAttempts  = 16 // allocated addresses or ports that another request took
	updateAttempts = 32 // lost races of an update
)

func setUID(m metav1.Object, uid string) { m.SetUID(types.UID(uid)) }

// servedOf finds the kind of a typed object.
func servedOf(obj runtime.Object) (served, stored *manifests.Kind, err error) {
	gvks, _, err := manifests.Scheme().ObjectKinds(obj)
	if err != nil {
		return nil, nil, apierrors.NewBadRequest(err.Error())
	}
	for _, gvk := range gvks {
		if k := manifests.ByGVK(gvk); k != nil {
			return resolve(k.GroupKind())
		}
	}
	return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("%s is not served", gvks[0]))
}

// Create implements Store. The object is not modified.
func (r *Registry) Create(ctx context.Context, obj runtime.Object, o WriteOptions) (runtime.Object, error) {
	served, stored, err := servedOf(obj)
	if err != nil {
		return nil, err
	}
	obj = toStored(obj.DeepCopyObject())
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	if m.GetResourceVersion() != "" {
		return nil, apierrors.NewBadRequest("resourceVersion should not be set on objects to be created")
	}
	if stored.Namespaced && m.GetNamespace() == "" {
		return nil, apierrors.NewBadRequest("Namespace parameter required.")
	}
	if !stored.Namespaced {
		m.SetNamespace("")
	}
	generate := m.GetName() == "" && m.GetGenerateName() != ""
	for attempt := 1; ; attempt++ {
		work := obj
		if generate {
			work = obj.DeepCopyObject()
			wm, err := meta.Accessor(work)
			if err != nil {
				return nil, apierrors.NewInternalError(err)
			}
			name, err := r.generateName(m.GetGenerateName())
			if err != nil {
				return nil, apierrors.NewInternalError(err)
			}
			wm.SetName(name)
		}
		out, err := r.create(ctx, served, stored, work, o)
		if generate && attempt < nameAttempts && apierrors.IsAlreadyExists(err) {
			continue
		}
		return out, err
	}
}

func (r *Registry) create(ctx context.Context, served, stored *manifests.Kind, obj runtime.Object, o WriteOptions) (runtime.Object, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	if stored.Namespaced {
		if err := r.namespaceOpen(stored, m.GetNamespace(), m.GetName()); err != nil {
			return nil, err
		}
	}
	manifests.Default(obj)
	a := r.attributes(admission.Create, stored, m, Main, obj, nil, o)
	if err := r.cfg.Admission.Admit(ctx, a); err != nil {
		return nil, err
	}
	obj = a.Object
	if m, err = meta.Accessor(obj); err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	if err := r.prepareCreate(stored, obj, m); err != nil {
		return nil, err
	}
	manifests.Default(obj)
	for attempt := 1; ; attempt++ {
		work := obj
		var chosen []string
		if svc, ok := obj.(*corev1.Service); ok {
			alloc := svc.DeepCopy()
			if chosen, err = r.allocate(alloc, nil); err != nil {
				return nil, err
			}
			work = alloc
		}
		out, claim, err := r.insert(ctx, served, stored, work, a, o)
		if claim != "" && slices.Contains(chosen, claim) && attempt < claimAttempts {
			continue
		}
		return out, err
	}
}

// insert validates and proposes. claim names the value that another object
// holds, if that is why it failed.
func (r *Registry) insert(ctx context.Context, served, stored *manifests.Kind, obj runtime.Object, a *admission.Attributes, o WriteOptions) (out runtime.Object, claim string, err error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, "", apierrors.NewInternalError(err)
	}
	if errs := manifests.Validate(obj); len(errs) > 0 {
		return nil, "", apierrors.NewInvalid(stored.GVK.GroupKind(), m.GetName(), errs)
	}
	if err := r.unsupported(stored, obj, m.GetName(), o); err != nil {
		return nil, "", err
	}
	a.Object, a.Name = obj, m.GetName()
	if err := r.cfg.Admission.Validate(ctx, a); err != nil {
		return nil, "", err
	}
	if err := r.noteIgnored(obj, nil); err != nil {
		return nil, "", apierrors.NewInternalError(err)
	}
	rec, err := r.codec.Encode(stored, obj)
	if err != nil {
		return nil, "", apierrors.NewInternalError(err)
	}
	if o.DryRun {
		if _, ok := r.find(stored, m.GetNamespace(), m.GetName()); ok {
			return nil, "", apierrors.NewAlreadyExists(gr(served), m.GetName())
		}
		if claim = r.heldClaim(rec); claim != "" {
			return nil, claim, claimed(served, obj, m.GetName(), claim)
		}
		out, err := r.decodeDry(served, rec)
		return out, "", err
	}
	res, err := r.propose(ctx, stored, m.GetNamespace(), state.Op{Type: state.OpCreate, Record: rec, Term: o.Term})
	if err != nil {
		return nil, "", err
	}
	if res.Reason != state.ReasonNone {
		if res.Reason == state.ReasonClaim {
			return nil, res.Detail, claimed(served, obj, m.GetName(), res.Detail)
		}
		return nil, "", r.refusedCreate(served, m, res)
	}
	out, err = r.written(served, res.Record)
	return out, "", err
}

// heldClaim names a claim of a record that another object holds; "" is none.
// Only a dry run asks: else the state machine does.
func (r *Registry) heldClaim(rec *state.Record) (held string) {
	if len(rec.Header.Claims) == 0 {
		return ""
	}
	r.cfg.Durable.Snapshot().Range(rec.Header.Key.Kind, "", state.Key{}, func(o *state.Record) bool {
		if o.Header.Key == rec.Header.Key {
			return true
		}
		for _, c := range rec.Header.Claims {
			if slices.Contains(o.Header.Claims, c) {
				held = c
				return false
			}
		}
		return true
	})
	return held
}

// decodeDry shows what a dry run would have stored.
func (r *Registry) decodeDry(served *manifests.Kind, rec *state.Record) (runtime.Object, error) {
	out, err := r.codec.Decode(rec)
	if err == nil {
		out, err = toServed(served, out)
	}
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	return out, nil
}

// refusedCreate tells a missing namespace from a terminating one.
func (r *Registry) refusedCreate(k *manifests.Kind, m metav1.Object, res state.Result) error {
	if res.Reason == state.ReasonNamespace {
		if err := r.namespaceOpen(k, m.GetNamespace(), m.GetName()); err != nil {
			return err
		}
	}
	return refused(k, m.GetNamespace(), m.GetName(), res)
}

// namespaceOpen refuses what belongs to no namespace or to one that is being
// deleted. The state machine checks durable creates again.
func (r *Registry) namespaceOpen(k *manifests.Kind, namespace, name string) error {
	rec, ok := r.cfg.Durable.Snapshot().Get(state.Key{Kind: "Namespace", Name: namespace})
	if !ok {
		return apierrors.NewNotFound(corev1.Resource("namespaces"), namespace)
	}
	if rec.Header.Deleted != 0 || rec.Header.Phase == string(corev1.NamespaceTerminating) {
		return terminating(k, namespace, name)
	}
	return nil
}

func (r *Registry) attributes(op admission.Operation, k *manifests.Kind, m metav1.Object, sub Subresource, obj, old runtime.Object, o WriteOptions) *admission.Attributes {
	warn := o.Warn
	if warn == nil {
		warn = func(string) {}
	}
	return &admission.Attributes{
		Operation: op, Kind: k, Namespace: m.GetNamespace(), Name: m.GetName(), Subresource: string(sub),
		Object: obj, Old: old, User: o.User, DryRun: o.DryRun, Warn: warn, Read: r,
	}
}

func (r *Registry) unsupported(k *manifests.Kind, obj runtime.Object, name string, o WriteOptions) error {
	warnings, errs := manifests.Unsupported(obj)
	if len(errs) > 0 {
		return apierrors.NewInvalid(k.GVK.GroupKind(), name, errs)
	}
	if o.Warn != nil {
		for _, w := range warnings {
			o.Warn(w)
		}
	}
	return nil
}

// written decodes what the state machine now holds.
func (r *Registry) written(served *manifests.Kind, rec *state.Record) (runtime.Object, error) {
	if rec == nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("registry: a write of %s returned no record", served.GVK.Kind))
	}
	obj, err := r.DecodeAs(served, rec)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	return obj, nil
}
