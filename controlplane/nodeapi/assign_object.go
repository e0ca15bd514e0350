package nodeapi

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/controllers/endpoints"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
)

// entry is one object of an assignment, for one version of its record. There
// is one for each pod of the cluster, so it holds what cannot be had from the
// record cheaply, and nothing else.
type entry struct {
	rec     *state.Record
	version uint64      // what the node keeps as the object's resourceVersion
	refs    []state.Key // shared with the entry before, where equal
	tokens  []tokenWant
	skip    bool // the node has no use for it: a mirror pod, a Namespace without a policy
}

func (e *entry) uid() string { return e.rec.Header.UID }

func (e *entry) ref() wire.Ref {
	k := &e.rec.Header.Key
	return wire.Ref{Kind: k.Kind, Namespace: k.Namespace, Name: k.Name}
}

// describe decodes a record once and keeps what the assignment needs of it.
func (a *assigner) describe(rec *state.Record) (entry, error) {
	e := entry{rec: rec, version: rec.Header.ResourceVersion}
	switch rec.Header.Key.Kind {
	case "Pod", "Node", "Namespace", claimKind, volumeKind:
		obj, err := a.s.cfg.Store.Decode(rec)
		if err != nil {
			return entry{}, err
		}
		if pod, ok := obj.(*corev1.Pod); ok {
			if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
				e.skip = true
				return e, nil
			}
			e.refs = podRefs(pod)
			e.tokens = podTokens(pod)
		}
		if ns, ok := obj.(*corev1.Namespace); ok && ns.Annotations[manifests.ImagePolicyAnnotation] == "" {
			e.skip = true
			return e, nil
		}
		if c, ok := obj.(*corev1.PersistentVolumeClaim); ok && c.Spec.VolumeName != "" {
			e.refs = []state.Key{{Kind: volumeKind, Name: c.Spec.VolumeName}}
		}
		b, err := encodeFor(obj)
		if err != nil {
			return entry{}, err
		}
		sum := sha256.Sum256(b)
		e.version = binary.BigEndian.Uint64(sum[:8])
	}
	return e, nil
}

// podRefs are the keys of what a pod's node needs for it.
func podRefs(pod *corev1.Pod) []state.Key {
	out := []state.Key{{Kind: "Namespace", Name: pod.Namespace}}
	for _, r := range auth.PodReferences(pod) {
		kind := ""
		switch r.Resource {
		case "secrets":
			kind = "Secret"
		case "configmaps":
			kind = "ConfigMap"
		case "serviceaccounts":
			kind = "ServiceAccount"
		case "persistentvolumeclaims":
			kind = claimKind
		case "runtimeclasses":
			kind = "RuntimeClass.node.k8s.io"
		default:
			continue // the node does not need it
		}
		out = append(out, state.Key{Kind: kind, Namespace: r.Namespace, Name: r.Name})
	}
	return out
}

// encodeFor is the object as the node gets it, deterministically.
func encodeFor(obj runtime.Object) ([]byte, error) {
	obj = strip(obj)
	b, err := direct.Marshal(obj)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return b, nil
}

// strip removes what the node does not need or wrote itself. The result is
// private.
func strip(obj runtime.Object) runtime.Object {
	obj = obj.DeepCopyObject()
	if m, ok := obj.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	switch o := obj.(type) {
	case *corev1.Pod:
		o.ResourceVersion = ""
		o.Status = foreignStatus(&o.Status)
		delete(o.Annotations, endpoints.PortsAnnotation)
	case *corev1.PersistentVolumeClaim:
		o.ResourceVersion = ""
		o.Status = corev1.PersistentVolumeClaimStatus{}
	case *corev1.PersistentVolume:
		o.ResourceVersion = ""
		o.Status = corev1.PersistentVolumeStatus{}
	case *corev1.Namespace:
		policy := map[string]string{manifests.ImagePolicyAnnotation: o.Annotations[manifests.ImagePolicyAnnotation]}
		o.ObjectMeta = metav1.ObjectMeta{Name: o.Name, UID: o.UID, Annotations: policy}
		o.Spec, o.Status = corev1.NamespaceSpec{}, corev1.NamespaceStatus{}
	case *corev1.Node:
		o.ResourceVersion = ""
		o.Status = corev1.NodeStatus{}
	}
	if kinds, _, err := manifests.Scheme().ObjectKinds(obj); err == nil && len(kinds) > 0 {
		obj.GetObjectKind().SetGroupVersionKind(kinds[0])
	}
	return obj
}

// foreignStatus is what others than the node decide in a pod's status: that
// it is over, and conditions that the node's own verdict counts in
// (readiness gates, a mark for disruption).
func foreignStatus(st *corev1.PodStatus) corev1.PodStatus {
	var out corev1.PodStatus
	if st.Phase == corev1.PodFailed || st.Phase == corev1.PodSucceeded {
		out.Phase, out.Reason, out.Message = st.Phase, st.Reason, st.Message
	}
	out.QOSClass = st.QOSClass
	for _, c := range st.Conditions {
		if !nodeOwnsCondition(c.Type) {
			c.LastProbeTime = metav1.Time{}
			out.Conditions = append(out.Conditions, c)
		}
	}
	return out
}
