package api

import (
	"fmt"
	"net/http"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	policyv1beta1 "k8s.io/api/policy/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/dunlin-project/dunlin/controlplane/api/auth/reviews"
	"github.com/dunlin-project/dunlin/controlplane/eviction"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

var scaleGVK = autoscalingv1.SchemeGroupVersion.WithKind("Scale")

// getScale answers GET on scale.
func (s *Server) getScale(rq *request) error {
	at, err := s.codecs.negotiate(rq.Request, false, false)
	if err != nil {
		return err
	}
	obj, err := s.read(rq, rq.URL.Query().Get("resourceVersion"))
	if err != nil {
		return err
	}
	sc, err := registry.ScaleOf(obj)
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	return s.answer(rq, at, http.StatusOK, sc)
}

// replicasPaths is where each scalable kind keeps the number, by its group
// version.
func replicasPaths(k *manifests.Kind) managedfields.ResourcePathMappings {
	return managedfields.ResourcePathMappings{k.GVK.GroupVersion().String(): fieldpath.MakePathOrDie("spec", "replicas")}
}

// ownScale records who changed a Scale, in the managedFields of its parent,
// which the registry hands over in the Scale.
func (s *Server) ownScale(k *manifests.Kind, cur, obj runtime.Object, mgr string) (runtime.Object, error) {
	fm, err := s.managers.get(scaleGVK, "scale")
	if err != nil || fm == nil {
		return obj, err
	}
	return throughParent(k, cur, func(live runtime.Object) (runtime.Object, error) {
		obj.GetObjectKind().SetGroupVersionKind(scaleGVK)
		return fm.UpdateNoErrors(live, obj, mgr), nil
	})
}

func (s *Server) applyScale(k *manifests.Kind, fm *managedfields.FieldManager, cur runtime.Object, intent *unstructured.Unstructured, mgr string, force bool) (runtime.Object, error) {
	return throughParent(k, cur, func(live runtime.Object) (runtime.Object, error) {
		out, err := fm.Apply(live, intent, mgr, force)
		if err != nil {
			return nil, applyError(err)
		}
		return out, nil
	})
}

// throughParent runs f on the Scale with the parent's managedFields turned
// into those of the Scale, and turns the result's back.
func throughParent(k *manifests.Kind, cur runtime.Object, f func(live runtime.Object) (runtime.Object, error)) (runtime.Object, error) {
	live, m, err := shallow(cur)
	if err != nil {
		return nil, err
	}
	h := managedfields.NewScaleHandler(m.GetManagedFields(), k.GVK.GroupVersion(), replicasPaths(k))
	entries, err := h.ToSubresource()
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	m.SetManagedFields(entries)
	out, err := f(live)
	if err != nil {
		return nil, err
	}
	om, err := accessor(out)
	if err != nil {
		return nil, err
	}
	if entries, err = h.ToParent(om.GetManagedFields()); err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	om.SetManagedFields(entries)
	return out, nil
}

// evict answers POST on eviction: a delete that a disruption budget may
// refuse.
func (s *Server) evict(rq *request) error {
	at, err := s.codecs.negotiate(rq.Request, false, false)
	if err != nil {
		return err
	}
	info, body, err := s.rawBody(rq)
	if err != nil {
		return err
	}
	gvk := policyv1.SchemeGroupVersion.WithKind("Eviction")
	obj, got, err := info.Serializer.Decode(body, &gvk, nil)
	if err != nil {
		return decodeError(err, gvk, got, body)
	}
	var meta metav1.ObjectMeta
	var o *metav1.DeleteOptions
	switch e := obj.(type) {
	case *policyv1.Eviction:
		meta, o = e.ObjectMeta, e.DeleteOptions
	case *policyv1beta1.Eviction:
		meta, o = e.ObjectMeta, e.DeleteOptions
	default:
		return apierrors.NewBadRequest(fmt.Sprintf("not an Eviction: %T", obj))
	}
	if meta.Name != "" && meta.Name != rq.info.name {
		return apierrors.NewBadRequest("name in URL does not match name in Eviction object")
	}
	if o == nil {
		o = &metav1.DeleteOptions{}
	}
	if errs := metav1validation.ValidateDeleteOptions(o); len(errs) > 0 {
		return invalidOptions("DeleteOptions", errs)
	}
	if dry := rq.URL.Query()["dryRun"]; len(dry) > 0 {
		o.DryRun = dry
	}
	// A pod or a budget that this server has not read yet counts.
	if err := s.cfg.Registry.Current(rq.Context(), rq.kind.GroupKind(), rq.info.namespace); err != nil {
		return err
	}
	if err := eviction.Evict(rq.Context(), s.cfg.Registry, rq.info.namespace, rq.info.name, toRegistryDelete(rq, o), s.cfg.Clock.Now); err != nil {
		return err
	}
	return s.answer(rq, at, http.StatusCreated, success())
}

func success() *metav1.Status {
	return &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusSuccess, Code: http.StatusCreated}
}

// bind answers POST on pods/binding and on bindings.
func (s *Server) bind(rq *request) error {
	at, err := s.codecs.negotiate(rq.Request, false, false)
	if err != nil {
		return err
	}
	o, err := createOptions(rq)
	if err != nil {
		return err
	}
	gvk := corev1.SchemeGroupVersion.WithKind("Binding")
	obj, err := s.decodeBody(rq, gvk, &corev1.Binding{}, o.FieldValidation)
	if err != nil {
		return err
	}
	b, ok := obj.(*corev1.Binding)
	if !ok {
		return apierrors.NewBadRequest(fmt.Sprintf("not a Binding object: %T", obj))
	}
	name := rq.info.name
	if name == "" {
		name = b.Name
	}
	switch {
	case b.Name != "" && b.Name != name:
		return apierrors.NewBadRequest("name in URL does not match name in Binding object")
	case b.Namespace != "" && b.Namespace != rq.info.namespace:
		return apierrors.NewBadRequest("the namespace of the provided object does not match the namespace sent on the request")
	case b.Target.Kind != "" && b.Target.Kind != "Node":
		return apierrors.NewInvalid(gvk.GroupKind(), name, field.ErrorList{field.NotSupported(field.NewPath("target", "kind"), b.Target.Kind, []string{"Node", "<empty>"})})
	case b.Target.Name == "":
		return apierrors.NewInvalid(gvk.GroupKind(), name, field.ErrorList{field.Required(field.NewPath("target", "name"), "")})
	}
	if err := s.bindTo(rq, b, name, len(o.DryRun) > 0); err != nil {
		return err
	}
	return s.answer(rq, at, http.StatusCreated, success())
}

func (s *Server) bindTo(rq *request, b *corev1.Binding, name string, dryRun bool) error {
	node, err := s.cfg.Registry.Get(schema.GroupKind{Kind: "Node"}, "", b.Target.Name)
	if err != nil {
		return err
	}
	pod, err := s.cfg.Registry.Get(schema.GroupKind{Kind: "Pod"}, rq.info.namespace, name)
	if err != nil {
		return err
	}
	nm, err := accessor(node)
	if err != nil {
		return err
	}
	pm, err := accessor(pod)
	if err != nil {
		return err
	}
	uid := pm.GetUID()
	if b.UID != "" {
		uid = b.UID
	}
	if dryRun {
		return nil
	}
	errs, err := s.cfg.Registry.Bind(rq.Context(), []registry.PodBinding{{
		Namespace: rq.info.namespace, Name: name, PodUID: uid, Node: b.Target.Name, NodeUID: nm.GetUID(),
	}}, 0)
	if err != nil {
		return err
	}
	return errs[0]
}

// review answers a kind that is computed and never stored.
func (s *Server) review(rq *request, rk reviews.Entry) error {
	at, err := s.codecs.negotiate(rq.Request, false, false)
	if err != nil {
		return err
	}
	o, err := createOptions(rq)
	if err != nil {
		return err
	}
	into, err := manifests.Scheme().New(rk.GVK)
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	obj, err := s.decodeBody(rq, rk.GVK, into, o.FieldValidation)
	if err != nil {
		return err
	}
	out, err := rk.Review(rq.Context(), rq.info.namespace, rq.info.name, obj)
	if err != nil {
		return err
	}
	out.GetObjectKind().SetGroupVersionKind(rk.GVK)
	return s.answer(rq, at, http.StatusCreated, out)
}
