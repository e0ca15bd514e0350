package api

import (
	"errors"
	"fmt"
	"math"
	"net/http"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// create answers POST on a collection.
func (s *Server) create(rq *request) error {
	at, err := s.codecs.negotiate(rq.Request, true, false)
	if err != nil {
		return err
	}
	o, err := createOptions(rq)
	if err != nil {
		return err
	}
	obj, _, err := s.decodeObject(rq, rq.kind.GVK, rq.kind.New(), o.FieldValidation)
	if err != nil {
		return err
	}
	mgr := manager(rq.Request, o.FieldManager)
	if obj, err = s.ownCreated(rq.kind, obj, mgr); err != nil {
		return err
	}
	out, err := s.cfg.Registry.Create(rq.Context(), obj, rq.writeOptions(mgr, o.DryRun))
	if err != nil {
		return err
	}
	return s.answer(rq, at, http.StatusCreated, out)
}

// ownCreated records who set the fields of a new object, defaults included.
func (s *Server) ownCreated(k *manifests.Kind, obj runtime.Object, mgr string) (runtime.Object, error) {
	if err := checkEntries(k.GroupKind(), obj); err != nil {
		return nil, err
	}
	fm, err := s.managers.get(k.GVK, "")
	if err != nil || fm == nil {
		return obj, err
	}
	manifests.Default(obj)
	live := k.New()
	live.GetObjectKind().SetGroupVersionKind(k.GVK)
	return fm.UpdateNoErrors(live, obj, mgr), nil
}

// ownUpdated records who changed the fields of cur; those of a Scale stand
// with its parent.
func (s *Server) ownUpdated(k *manifests.Kind, sub registry.Subresource, cur, obj runtime.Object, mgr string) (runtime.Object, error) {
	if sub == registry.Scale {
		return s.ownScale(k, cur, obj, mgr)
	}
	if err := checkEntries(k.GroupKind(), obj); err != nil {
		return nil, err
	}
	fm, err := s.managers.get(k.GVK, string(sub))
	if err != nil || fm == nil {
		return obj, err
	}
	if sub == registry.Main {
		manifests.Default(obj)
	}
	obj.GetObjectKind().SetGroupVersionKind(k.GVK)
	return fm.UpdateNoErrors(cur, obj, mgr), nil
}

// Kinds whose PUT creates what does not exist, as upstream allows.
var createOnUpdate = map[string]bool{"Service": true, "Endpoints": true, "Event": true, "LimitRange": true, "Lease.coordination.k8s.io": true}

// Kinds whose PUT must name the version that it replaces.
var needsVersion = map[string]bool{"Lease.coordination.k8s.io": true, "RuntimeClass.node.k8s.io": true}

// bodyOf is what stands in the body of a request to an object or one of its
// sub-resources: the kind itself, or its Scale.
func bodyOf(k *manifests.Kind, sub registry.Subresource) (schema.GroupVersionKind, runtime.Object) {
	if sub == registry.Scale {
		return scaleGVK, &autoscalingv1.Scale{}
	}
	return k.GVK, k.New()
}

// update answers PUT on an object or its status, scale, finalize or
// ephemeralcontainers.
func (s *Server) update(rq *request, sub registry.Subresource) error {
	at, err := s.codecs.negotiate(rq.Request, sub != registry.Scale, false)
	if err != nil {
		return err
	}
	o, err := updateOptions(rq)
	if err != nil {
		return err
	}
	gvk, into := bodyOf(rq.kind, sub)
	obj, m, err := s.decodeObject(rq, gvk, into, o.FieldValidation)
	if err != nil {
		return err
	}
	if sub != registry.Scale {
		if err := s.checkPut(rq, m); err != nil {
			return err
		}
	}
	mgr := manager(rq.Request, o.FieldManager)
	opts := rq.writeOptions(mgr, o.DryRun)
	out, err := s.cfg.Registry.Update(rq.Context(), rq.kind.GroupKind(), rq.info.namespace, rq.info.name, sub,
		func(cur runtime.Object) (runtime.Object, error) {
			return s.ownUpdated(rq.kind, sub, cur, obj.DeepCopyObject(), mgr)
		}, opts)
	code := http.StatusOK
	if apierrors.IsNotFound(err) && sub == registry.Main && createOnUpdate[rq.kind.GroupKind().String()] && m.GetUID() == "" && m.GetResourceVersion() == "" {
		if obj, err = s.ownCreated(rq.kind, obj, mgr); err != nil {
			return err
		}
		out, err = s.cfg.Registry.Create(rq.Context(), obj, opts)
		code = http.StatusCreated
	}
	if err != nil {
		return err
	}
	return s.answer(rq, at, code, out)
}

// checkPut refuses a body that is not about the object of the address, or
// that lacks a version which its kind must name.
func (s *Server) checkPut(rq *request, m metav1.Object) error {
	switch m.GetName() {
	case rq.info.name:
	case "":
		return apierrors.NewBadRequest("name must be provided")
	default:
		return apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s) does not match the name on the URL (%s)", m.GetName(), rq.info.name))
	}
	gk := rq.kind.GroupKind()
	if m.GetResourceVersion() != "" || !needsVersion[gk.String()] {
		return nil
	}
	if _, err := s.cfg.Registry.Get(gk, rq.info.namespace, rq.info.name); err != nil {
		return nil //nolint:nilerr // what does not exist has no version to name
	}
	return apierrors.NewInvalid(gk, rq.info.name, field.ErrorList{
		field.Invalid(field.NewPath("metadata", "resourceVersion"), 0, "must be specified for an update"),
	})
}

// remove answers DELETE on an object.
func (s *Server) remove(rq *request) error {
	at, err := s.codecs.negotiate(rq.Request, true, false)
	if err != nil {
		return err
	}
	o, err := s.deleteOptions(rq)
	if err != nil {
		return err
	}
	obj, gone, err := s.cfg.Registry.Delete(rq.Context(), rq.kind.GroupKind(), rq.info.namespace, rq.info.name, toRegistryDelete(rq, &o))
	if err != nil {
		return err
	}
	if gone && !rq.kind.ReturnDeleted {
		m, err := accessor(obj)
		if err != nil {
			return err
		}
		at.form = formObject
		return s.answer(rq, at, http.StatusOK, &metav1.Status{
			TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess,
			Details: &metav1.StatusDetails{Name: rq.info.name, Group: rq.info.gvr.Group, Kind: rq.info.gvr.Resource, UID: m.GetUID()},
		})
	}
	code := http.StatusOK
	foreground := o.PropagationPolicy != nil && *o.PropagationPolicy == metav1.DeletePropagationForeground
	if !gone && (foreground || (o.OrphanDependents != nil && !*o.OrphanDependents)) {
		code = http.StatusAccepted
	}
	return s.answer(rq, at, code, obj)
}

// removeCollection answers DELETE on a collection with what it deleted. Each
// object is deleted by itself; the first error ends it.
func (s *Server) removeCollection(rq *request) error {
	at, err := s.codecs.negotiate(rq.Request, true, false)
	if err != nil {
		return err
	}
	o, err := s.deleteOptions(rq)
	if err != nil {
		return err
	}
	q, err := parseListQuery(rq)
	if err != nil {
		return err
	}
	k, ns := rq.kind, rq.info.namespace
	reader := s.cfg.Registry.ReaderFor(k.GroupKind(), ns)
	if err := s.cfg.Registry.Current(rq.Context(), k.GroupKind(), ns); err != nil { // or what is new would stay
		return err
	}
	snap := reader.Snapshot()
	limit := int64(math.MaxInt64)
	if q.Limit > 0 {
		limit = q.Limit
	}
	items, _, _, err := s.collect(k, snap, ns, state.Key{}, limit, q.match)
	if err != nil {
		return err
	}
	ro := toRegistryDelete(rq, &o)
	deleted := make([]runtime.Object, 0, len(items))
	for _, it := range items {
		m, err := accessor(it)
		if err != nil {
			return err
		}
		obj, _, err := s.cfg.Registry.Delete(rq.Context(), k.GroupKind(), m.GetNamespace(), m.GetName(), ro)
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return err
		default:
			deleted = append(deleted, obj)
		}
	}
	list, err := listOf(k, deleted, metav1.ListMeta{ResourceVersion: formatRV(snap.ResourceVersion())})
	if err != nil {
		return err
	}
	return s.answer(rq, at, http.StatusOK, list)
}

var errNoManager = errors.New("server-side apply is switched off on this server")
