package registry

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/manifests"
)

// ScaleOf projects an object to its Scale (autoscaling/v1).
func ScaleOf(obj runtime.Object) (*autoscalingv1.Scale, error) {
	var (
		m        metav1.ObjectMeta
		want     *int32
		have     int32
		selector *metav1.LabelSelector
	)
	switch o := obj.(type) {
	case *appsv1.Deployment:
		m, want, have, selector = o.ObjectMeta, o.Spec.Replicas, o.Status.Replicas, o.Spec.Selector
	case *appsv1.ReplicaSet:
		m, want, have, selector = o.ObjectMeta, o.Spec.Replicas, o.Status.Replicas, o.Spec.Selector
	case *appsv1.StatefulSet:
		m, want, have, selector = o.ObjectMeta, o.Spec.Replicas, o.Status.Replicas, o.Spec.Selector
	case *corev1.ReplicationController:
		m, want, have = o.ObjectMeta, o.Spec.Replicas, o.Status.Replicas
		selector = metav1.SetAsLabelSelector(labels.Set(o.Spec.Selector))
	default:
		return nil, fmt.Errorf("registry: %T has no scale", obj)
	}
	s := &autoscalingv1.Scale{
		TypeMeta: metav1.TypeMeta{APIVersion: "autoscaling/v1", Kind: "Scale"},
		ObjectMeta: metav1.ObjectMeta{
			Name: m.Name, Namespace: m.Namespace, UID: m.UID, ResourceVersion: m.ResourceVersion, CreationTimestamp: m.CreationTimestamp,
		},
		Status: autoscalingv1.ScaleStatus{Replicas: have},
	}
	if want != nil {
		s.Spec.Replicas = *want
	}
	if selector != nil {
		sel, err := metav1.LabelSelectorAsSelector(selector)
		if err != nil {
			return nil, fmt.Errorf("registry: scale of %s/%s: %w", m.Namespace, m.Name, err)
		}
		s.Status.Selector = sel.String()
	}
	return s, nil
}

// setReplicas writes a Scale back into the object it came from.
func setReplicas(obj runtime.Object, n int32) error {
	switch o := obj.(type) {
	case *appsv1.Deployment:
		o.Spec.Replicas = &n
	case *appsv1.ReplicaSet:
		o.Spec.Replicas = &n
	case *appsv1.StatefulSet:
		o.Spec.Replicas = &n
	case *corev1.ReplicationController:
		o.Spec.Replicas = &n
	default:
		return fmt.Errorf("registry: %T has no scale", obj)
	}
	return nil
}

// updateScale is an ordinary update of the main resource, seen through its
// Scale. The Scale that the mutation gets and returns carries the parent's
// managedFields; the one that is returned to the caller has none.
func (r *Registry) updateScale(ctx context.Context, served *manifests.Kind, namespace, name string, mutate Mutate, o WriteOptions) (runtime.Object, error) {
	if !served.Scale {
		return nil, apierrors.NewNotFound(gr(served), name+"/scale")
	}
	out, err := r.update(ctx, served.GroupKind(), namespace, name, Main, func(cur runtime.Object) (runtime.Object, error) {
		before, err := ScaleOf(cur)
		if err != nil {
			return nil, apierrors.NewInternalError(err)
		}
		parent, err := meta.Accessor(cur)
		if err != nil {
			return nil, apierrors.NewInternalError(err)
		}
		given := before.DeepCopy()
		given.ManagedFields = parent.GetManagedFields()
		ret, err := mutate(given)
		if err != nil {
			return nil, err
		}
		s, ok := ret.(*autoscalingv1.Scale)
		if !ok {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("expected input object type to be Scale, but %T", ret))
		}
		switch {
		case s.Spec.Replicas < 0:
			return nil, apierrors.NewInvalid(autoscalingv1.SchemeGroupVersion.WithKind("Scale").GroupKind(), name, field.ErrorList{
				field.Invalid(field.NewPath("spec", "replicas"), s.Spec.Replicas, "must be greater than or equal to 0").WithOrigin("minimum"),
			})
		case s.Name != "" && s.Name != name:
			return nil, apierrors.NewBadRequest(fmt.Sprintf("the name of the object (%s) does not match the name on the URL (%s)", s.Name, name))
		case s.UID != "" && s.UID != before.UID:
			return nil, uidConflict(served, name, string(s.UID), string(before.UID))
		case s.ResourceVersion != "" && s.ResourceVersion != before.ResourceVersion:
			return nil, conflict(served, name, errModified)
		}
		if err := setReplicas(cur, s.Spec.Replicas); err != nil {
			return nil, apierrors.NewInternalError(err)
		}
		parent.SetManagedFields(s.ManagedFields)
		return cur, nil
	}, o)
	if err != nil {
		return nil, err
	}
	return ScaleOf(out)
}
