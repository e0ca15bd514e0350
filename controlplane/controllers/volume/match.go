package volume

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/manifests"
)

// unfit says why a volume cannot be a claim's, wherever its pods are; "" if it
// can. Pure.
func unfit(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) string {
	asks, has := c.Spec.Resources.Requests[corev1.ResourceStorage], v.Spec.Capacity[corev1.ResourceStorage]
	switch {
	case v.DeletionTimestamp != nil:
		return "the volume is being deleted"
	case modeOf(c.Spec.VolumeMode) != modeOf(v.Spec.VolumeMode):
		return "the volume has another volumeMode"
	case manifests.ClaimClass(c) != manifests.VolumeClass(v):
		return "the volume has another storageClassName"
	case has.Cmp(asks) < 0:
		return "the volume is smaller than requested"
	}
	for _, m := range c.Spec.AccessModes {
		if !slices.Contains(v.Spec.AccessModes, m) {
			return "the volume does not have the access mode " + string(m)
		}
	}
	return ""
}

func modeOf(m *corev1.PersistentVolumeMode) corev1.PersistentVolumeMode {
	if m == nil {
		return corev1.PersistentVolumeFilesystem
	}
	return *m
}

// reservedFor says whether a volume names the claim, by whoever's wish, and
// no other claim of that name.
func reservedFor(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) bool {
	r := v.Spec.ClaimRef
	return r != nil && r.Namespace == c.Namespace && r.Name == c.Name && (r.UID == "" || r.UID == c.UID)
}

// Candidate says whether a volume that exists could be bound to a claim that
// has none: it is free, or reserved for it, and fits. Pure.
func Candidate(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) bool {
	if v.Spec.ClaimRef != nil && !reservedFor(c, v) || unfit(c, v) != "" {
		return false
	}
	if c.Spec.Selector == nil || v.Spec.ClaimRef != nil {
		return true
	}
	sel, err := metav1.LabelSelectorAsSelector(c.Spec.Selector)
	return err == nil && sel.Matches(labels.Set(v.Labels))
}

// Reachable is the selector of the nodes that reach a volume; nil is all.
func Reachable(v *corev1.PersistentVolume) *corev1.NodeSelector {
	if v.Spec.NodeAffinity == nil {
		return nil
	}
	return v.Spec.NodeAffinity.Required
}

// reaches says whether a node can use a volume: it is where the volume says,
// and the machine that has the data.
func reaches(v *corev1.PersistentVolume, n *corev1.Node) bool {
	want := v.Annotations[manifests.AnnotationMachine]
	if want != "" && n.Spec.ProviderID != "" && want != n.Spec.ProviderID {
		return false
	}
	return plan.Reaches(Reachable(v), &plan.Node{Name: n.Name, Labels: n.Labels})
}

// best picks the volume for a claim: one that is reserved for it, else the
// smallest that does, then by name. Only those that node reaches count, if it
// is not nil. Pure.
func best(c *corev1.PersistentVolumeClaim, volumes []*corev1.PersistentVolume, node *corev1.Node) *corev1.PersistentVolume {
	var out *corev1.PersistentVolume
	better := func(a, b *corev1.PersistentVolume) bool {
		if mine, his := a.Spec.ClaimRef != nil, b.Spec.ClaimRef != nil; mine != his {
			return mine
		}
		x, y := a.Spec.Capacity[corev1.ResourceStorage], b.Spec.Capacity[corev1.ResourceStorage]
		if d := x.Cmp(y); d != 0 {
			return d < 0
		}
		return a.Name < b.Name
	}
	for _, v := range volumes {
		if Candidate(c, v) && (node == nil || reaches(v, node)) && (out == nil || better(v, out)) {
			out = v
		}
	}
	return out
}
