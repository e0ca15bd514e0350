package replicaset

import (
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// set is what ReplicaSet and ReplicationController have in common.
type set struct {
	meta     metav1.Object
	object   runtime.Object // shared: read only
	replicas int
	selector labels.Selector
	template *corev1.PodTemplateSpec
	minReady int32
	status   appsv1.ReplicaSetStatus
}

// flavor is one of the two kinds.
type flavor struct {
	name      string
	gk        schema.GroupKind
	gv        schema.GroupVersion
	read      func(runtime.Object) (set, error)
	setStatus func(runtime.Object, appsv1.ReplicaSetStatus)
}

var replicaSet = flavor{
	name: "replicaset", gk: schema.GroupKind{Group: appsv1.GroupName, Kind: "ReplicaSet"}, gv: appsv1.SchemeGroupVersion,
	read: func(o runtime.Object) (set, error) {
		rs, ok := o.(*appsv1.ReplicaSet)
		if !ok {
			return set{}, fmt.Errorf("not a ReplicaSet: %T", o)
		}
		sel, err := metav1.LabelSelectorAsSelector(rs.Spec.Selector)
		if err != nil {
			return set{}, fmt.Errorf("selector: %w", err)
		}
		return set{rs, rs, deref(rs.Spec.Replicas), sel, &rs.Spec.Template, rs.Spec.MinReadySeconds, rs.Status}, nil
	},
	setStatus: func(o runtime.Object, st appsv1.ReplicaSetStatus) {
		if rs, ok := o.(*appsv1.ReplicaSet); ok {
			rs.Status = st
		}
	},
}

var replicationController = flavor{
	name: "replicationcontroller", gk: schema.GroupKind{Kind: "ReplicationController"}, gv: corev1.SchemeGroupVersion,
	read: func(o runtime.Object) (set, error) {
		rc, ok := o.(*corev1.ReplicationController)
		if !ok {
			return set{}, fmt.Errorf("not a ReplicationController: %T", o)
		}
		if rc.Spec.Template == nil {
			return set{}, fmt.Errorf("spec.template is missing")
		}
		st := appsv1.ReplicaSetStatus{Replicas: rc.Status.Replicas, FullyLabeledReplicas: rc.Status.FullyLabeledReplicas,
			ReadyReplicas: rc.Status.ReadyReplicas, AvailableReplicas: rc.Status.AvailableReplicas, ObservedGeneration: rc.Status.ObservedGeneration}
		for _, c := range rc.Status.Conditions {
			st.Conditions = append(st.Conditions, appsv1.ReplicaSetCondition{Type: appsv1.ReplicaSetConditionType(c.Type),
				Status: c.Status, LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message})
		}
		return set{rc, rc, deref(rc.Spec.Replicas), labels.SelectorFromSet(rc.Spec.Selector), rc.Spec.Template, rc.Spec.MinReadySeconds, st}, nil
	},
	setStatus: func(o runtime.Object, st appsv1.ReplicaSetStatus) {
		rc, ok := o.(*corev1.ReplicationController)
		if !ok {
			return
		}
		rc.Status = corev1.ReplicationControllerStatus{Replicas: st.Replicas, FullyLabeledReplicas: st.FullyLabeledReplicas,
			ReadyReplicas: st.ReadyReplicas, AvailableReplicas: st.AvailableReplicas, ObservedGeneration: st.ObservedGeneration}
		for _, c := range st.Conditions {
			rc.Status.Conditions = append(rc.Status.Conditions, corev1.ReplicationControllerCondition{Type: corev1.ReplicationControllerConditionType(c.Type),
				Status: c.Status, LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message})
		}
	},
}

func deref(n *int32) int {
	if n == nil {
		return 1
	}
	return int(*n)
}
