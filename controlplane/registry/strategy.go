package registry

import (
	"bytes"
	"reflect"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// prepareCreate sets what only the server may set on a new object, and
// clears what a client may not.
func (r *Registry) prepareCreate(k *manifests.Kind, obj runtime.Object, m metav1.Object) error {
	uid, err := r.uid()
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	m.SetUID("")
	setUID(m, uid)
	m.SetCreationTimestamp(r.now())
	m.SetDeletionTimestamp(nil)
	m.SetDeletionGracePeriodSeconds(nil)
	m.SetSelfLink("")
	m.SetGeneration(0)
	if k.Generation {
		m.SetGeneration(1)
	}
	// A node registers itself together with its status.
	if k.Status && k.GVK.Kind != "Node" {
		clearStatus(obj)
	}
	switch o := obj.(type) {
	case *corev1.Pod:
		o.Status = corev1.PodStatus{Phase: corev1.PodPending, QOSClass: manifests.QOSClass(o)}
		manifests.ApplyLabelKeys(o)
	case *corev1.Namespace:
		o.Status = corev1.NamespaceStatus{Phase: corev1.NamespaceActive}
		if !slices.Contains(o.Spec.Finalizers, corev1.FinalizerKubernetes) {
			o.Spec.Finalizers = append(o.Spec.Finalizers, corev1.FinalizerKubernetes)
		}
		labelNamespace(o)
	case *corev1.Service:
		o.Status = corev1.ServiceStatus{}
	case *corev1.PersistentVolume:
		now := r.now()
		o.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumePending, LastPhaseTransitionTime: &now}
	case *batchv1.Job:
		manifests.GenerateJobSelector(o)
	}
	return nil
}

func labelNamespace(ns *corev1.Namespace) {
	if ns.Name == "" {
		return // its name is not known before it is generated
	}
	if ns.Labels == nil {
		ns.Labels = map[string]string{}
	}
	ns.Labels[corev1.LabelMetadataName] = ns.Name
}

// prepareUpdate applies the write path's rules: what this sub-resource may
// change is taken from obj, everything else from old. obj is modified; the
// result may be another object.
func prepareUpdate(k *manifests.Kind, sub Subresource, obj, old runtime.Object) (runtime.Object, error) {
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	om, err := meta.Accessor(old)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	switch sub {
	case Status:
		out := old.DeepCopyObject()
		nm, err := meta.Accessor(out)
		if err != nil {
			return nil, apierrors.NewInternalError(err)
		}
		copyField(out, obj, "Status")
		nm.SetAnnotations(m.GetAnnotations())
		nm.SetManagedFields(m.GetManagedFields())
		return out, nil
	case Finalize:
		ns, ok := obj.(*corev1.Namespace)
		if !ok {
			return nil, apierrors.NewBadRequest("finalize is for namespaces")
		}
		out, _ := old.DeepCopyObject().(*corev1.Namespace)
		out.Spec.Finalizers = ns.Spec.Finalizers
		out.ManagedFields = ns.ManagedFields
		return out, nil
	case Ephemeral:
		p, ok := obj.(*corev1.Pod)
		if !ok {
			return nil, apierrors.NewBadRequest("ephemeralcontainers is for pods")
		}
		out, _ := old.DeepCopyObject().(*corev1.Pod)
		out.Spec.EphemeralContainers = p.Spec.EphemeralContainers
		out.ManagedFields = p.ManagedFields
		return out, nil
	}
	// What is taken over below is written to by defaults and admission, and
	// others read the old object meanwhile.
	old = old.DeepCopyObject()
	m.SetName(om.GetName())
	m.SetNamespace(om.GetNamespace())
	m.SetUID(om.GetUID())
	m.SetCreationTimestamp(om.GetCreationTimestamp())
	m.SetDeletionTimestamp(om.GetDeletionTimestamp())
	m.SetDeletionGracePeriodSeconds(om.GetDeletionGracePeriodSeconds())
	m.SetGeneration(om.GetGeneration())
	m.SetSelfLink("")
	if m.GetGenerateName() == "" {
		m.SetGenerateName(om.GetGenerateName())
	}
	if k.Status {
		copyField(obj, old, "Status")
	}
	switch o := obj.(type) {
	case *corev1.Namespace:
		if prev, ok := old.(*corev1.Namespace); ok {
			o.Spec.Finalizers = prev.Spec.Finalizers
		}
		labelNamespace(o)
	case *corev1.Service:
		if prev, ok := old.(*corev1.Service); ok {
			keepAllocated(o, prev)
		}
	case *corev1.Pod:
		if prev, ok := old.(*corev1.Pod); ok {
			o.Spec.EphemeralContainers = prev.Spec.EphemeralContainers
		}
	}
	return obj, nil
}

func clearStatus(obj runtime.Object) {
	if f := reflect.ValueOf(obj).Elem().FieldByName("Status"); f.IsValid() {
		f.SetZero()
	}
}

// copyField copies one top-level field, by reference: both sides are private
// to the request.
func copyField(to, from runtime.Object, name string) {
	t, f := reflect.ValueOf(to).Elem().FieldByName(name), reflect.ValueOf(from).Elem().FieldByName(name)
	if t.IsValid() && f.IsValid() && t.Type() == f.Type() {
		t.Set(f)
	}
}

// same says whether two bodies are equal.
func same(a, b *state.Body) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a == b || (a.Codec == b.Codec && bytes.Equal(a.Data, b.Data))
}

// sameRecord says whether writing next over cur would change nothing.
func sameRecord(next, cur *state.Record) bool {
	h := next.Header
	h.ResourceVersion = cur.Header.ResourceVersion
	h.Version = cur.Header.Version
	return same(next.Spec, cur.Spec) && same(next.Status, cur.Status) && same(next.Meta, cur.Meta) && reflect.DeepEqual(h, cur.Header)
}

// onlyTimes says whether managedFields of two objects differ in nothing but
// their times.
func onlyTimes(a, b metav1.Object) bool {
	x, y := a.GetManagedFields(), b.GetManagedFields()
	if len(x) != len(y) {
		return false
	}
	for i := range x {
		p, q := x[i], y[i]
		p.Time, q.Time = nil, nil
		if !reflect.DeepEqual(p, q) {
			return false
		}
	}
	return true
}
