package auth

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// Objects is what the node policy reads; registry.Store satisfies it.
type Objects interface {
	Getter
	// Decode turns a record into its typed, shared object.
	Decode(*state.Record) (runtime.Object, error)
	// Reader gives the store that holds the kind.
	Reader(gk schema.GroupKind) state.Reader
}

// nodePolicy is what a node may read. Nodes need the API for little: their
// work comes through the node protocol. So it is computed when asked, from
// the pods bound to the node in the newest snapshot, and nothing is cached.
type nodePolicy struct{ objects Objects }

var podKind = schema.GroupKind{Kind: "Pod"}

// authorize decides for a node.
func (n *nodePolicy) authorize(node string, a Attributes) (bool, string) {
	const own = "a node may only read its own Node, the pods bound to it and what those refer to"
	if a.Path != "" || (a.Verb != "get" && a.Verb != "list" && a.Verb != "watch") {
		return false, own + " (it writes through the node protocol)"
	}
	name := a.Name
	if name == "" {
		name = exact(a.Fields, "metadata.name")
	}
	switch {
	case a.APIGroup == "" && a.Resource == "nodes" && (a.Subresource == "" || a.Subresource == "status"):
		if name == node {
			return true, "the node's own object"
		}
		return false, own
	case a.APIGroup == "" && a.Resource == "pods":
		if a.Subresource != "" && a.Subresource != "status" {
			return false, own
		}
		if a.Name == "" && exact(a.Fields, "spec.nodeName") == node {
			return true, "the pods bound to the node"
		}
		if name != "" && n.bound(node, a.Namespace, name) {
			return true, "the pod is bound to the node"
		}
		return false, own + " (lists of pods need the field selector spec.nodeName=" + node + ")"
	}
	if name == "" || a.Subresource != "" {
		return false, own
	}
	if n.refers(node, Reference{Group: a.APIGroup, Resource: a.Resource, Namespace: a.Namespace, Name: name}) {
		return true, "a pod bound to the node refers to it"
	}
	return false, own
}

// exact returns the value a selector demands of a field, "" if none.
func exact(f fields.Selector, field string) string {
	if f == nil {
		return ""
	}
	for _, r := range f.Requirements() {
		if r.Field == field && (r.Operator == selection.Equals || r.Operator == selection.DoubleEquals) {
			return r.Value
		}
	}
	return ""
}

func (n *nodePolicy) bound(node, namespace, name string) bool {
	rec, ok := n.objects.Reader(podKind).Snapshot().Get(state.Key{Kind: podKind.String(), Namespace: namespace, Name: name})
	return ok && rec.Header.NodeName == node
}

func (n *nodePolicy) refers(node string, want Reference) bool {
	found := false
	n.objects.Reader(podKind).Snapshot().PodsOnNode(node, func(rec *state.Record) bool {
		if want.Namespace != "" && rec.Header.Key.Namespace != want.Namespace {
			return true
		}
		obj, err := n.objects.Decode(rec)
		if err != nil {
			return true // what cannot be decoded grants nothing
		}
		if pod, ok := obj.(*corev1.Pod); ok {
			for _, r := range PodReferences(pod) {
				if r == want {
					found = true
					return false
				}
			}
		}
		return true
	})
	return found
}

// Reference names an object by its resource.
type Reference struct{ Group, Resource, Namespace, Name string }

// PodReferences lists the objects that a pod's spec names and that its node
// therefore needs: Secrets, ConfigMaps, the ServiceAccount, claims, the
// RuntimeClass and the PriorityClass. Names may repeat.
func PodReferences(pod *corev1.Pod) []Reference {
	var list []Reference
	add := func(resource, name string) {
		if name != "" {
			list = append(list, Reference{Resource: resource, Namespace: pod.Namespace, Name: name})
		}
	}
	s := &pod.Spec
	add("serviceaccounts", s.ServiceAccountName)
	for _, p := range s.ImagePullSecrets {
		add("secrets", p.Name)
	}
	if s.RuntimeClassName != nil {
		list = append(list, Reference{Group: "node.k8s.io", Resource: "runtimeclasses", Name: *s.RuntimeClassName})
	}
	if s.PriorityClassName != "" {
		list = append(list, Reference{Group: "scheduling.k8s.io", Resource: "priorityclasses", Name: s.PriorityClassName})
	}
	for i := range s.Volumes {
		volumeReferences(pod, &s.Volumes[i], add)
	}
	for i := range s.InitContainers {
		envReferences(s.InitContainers[i].Env, s.InitContainers[i].EnvFrom, add)
	}
	for i := range s.Containers {
		envReferences(s.Containers[i].Env, s.Containers[i].EnvFrom, add)
	}
	for i := range s.EphemeralContainers {
		envReferences(s.EphemeralContainers[i].Env, s.EphemeralContainers[i].EnvFrom, add)
	}
	return list
}

func volumeReferences(pod *corev1.Pod, v *corev1.Volume, add func(resource, name string)) {
	switch {
	case v.Secret != nil:
		add("secrets", v.Secret.SecretName)
	case v.ConfigMap != nil:
		add("configmaps", v.ConfigMap.Name)
	case v.PersistentVolumeClaim != nil:
		add("persistentvolumeclaims", v.PersistentVolumeClaim.ClaimName)
	case v.Ephemeral != nil:
		add("persistentvolumeclaims", manifests.EphemeralClaimName(pod, v.Name))
	case v.CSI != nil && v.CSI.NodePublishSecretRef != nil:
		add("secrets", v.CSI.NodePublishSecretRef.Name)
	case v.Projected != nil:
		for _, src := range v.Projected.Sources {
			if src.Secret != nil {
				add("secrets", src.Secret.Name)
			}
			if src.ConfigMap != nil {
				add("configmaps", src.ConfigMap.Name)
			}
		}
	}
}

func envReferences(env []corev1.EnvVar, from []corev1.EnvFromSource, add func(resource, name string)) {
	for _, e := range env {
		if e.ValueFrom == nil {
			continue
		}
		if r := e.ValueFrom.SecretKeyRef; r != nil {
			add("secrets", r.Name)
		}
		if r := e.ValueFrom.ConfigMapKeyRef; r != nil {
			add("configmaps", r.Name)
		}
	}
	for _, f := range from {
		if f.SecretRef != nil {
			add("secrets", f.SecretRef.Name)
		}
		if f.ConfigMapRef != nil {
			add("configmaps", f.ConfigMapRef.Name)
		}
	}
}
