package manifests

import (
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
)

// The built-in class of storage: folders on the node that runs the first pod
// of a claim.
const (
	LocalProvisioner = "dunlin.dev/local"
	LocalClass       = "dunlin-local"
	// NoProvisioner is the provisioner of classes whose volumes people make.
	NoProvisioner = "kubernetes.io/no-provisioner"
	// DefaultVolumesDir is where nodes keep volumes, unless they say otherwise.
	DefaultVolumesDir = "/var/lib/dunlin/claims"
)

// Annotations and finalizers of claims and volumes. All but dunlin.dev/* are
// upstream's.
const (
	// AnnotationSelectedNode is the node that the scheduler chose for a claim
	// that waits for its first consumer; the scheduler owns it until the claim
	// has a volume.
	AnnotationSelectedNode = "volume.kubernetes.io/selected-node"
	// AnnotationProvisioner says who is to make a volume for the claim.
	AnnotationProvisioner = "volume.kubernetes.io/storage-provisioner"
	// AnnotationProvisionedBy says who made the volume.
	AnnotationProvisionedBy     = "pv.kubernetes.io/provisioned-by"
	AnnotationBindCompleted     = "pv.kubernetes.io/bind-completed"
	AnnotationBoundByController = "pv.kubernetes.io/bound-by-controller"
	AnnotationDefaultClass      = "storageclass.kubernetes.io/is-default-class"
	annotationDefaultClassBeta  = "storageclass.beta.kubernetes.io/is-default-class"
	// AnnotationMachine is the identity (spec.providerID of the Node) of the
	// machine on whose disk a volume is: one that was set up anew under the old
	// name does not have it.
	AnnotationMachine = "dunlin.dev/machine"

	// AnnotationVolumesDir is where a node keeps the volumes of the built-in
	// class, if elsewhere than in DefaultVolumesDir.
	AnnotationVolumesDir = "dunlin.dev/volumes-dir"

	FinalizerClaim  = "kubernetes.io/pvc-protection"
	FinalizerVolume = "kubernetes.io/pv-protection"
	// FinalizerData keeps a volume until its node has removed the data.
	FinalizerData = "dunlin.dev/volume-data"
)

// ClaimUse is a claim that a pod mounts.
type ClaimUse struct {
	Volume    string // its name in the pod
	Claim     string // name of the PersistentVolumeClaim
	Ephemeral bool   // the claim lives and dies with the pod
	ReadOnly  bool
}

// ClaimsOf lists the claims that a pod mounts, in the order of its volumes.
func ClaimsOf(pod *corev1.Pod) []ClaimUse {
	var out []ClaimUse
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		switch {
		case v.PersistentVolumeClaim != nil:
			out = append(out, ClaimUse{Volume: v.Name, Claim: v.PersistentVolumeClaim.ClaimName, ReadOnly: v.PersistentVolumeClaim.ReadOnly})
		case v.Ephemeral != nil:
			out = append(out, ClaimUse{Volume: v.Name, Claim: EphemeralClaimName(pod, v.Name), Ephemeral: true})
		}
	}
	return out
}

// EphemeralClaimName is the name of the claim of a pod's ephemeral volume.
func EphemeralClaimName(pod *corev1.Pod, volume string) string { return pod.Name + "-" + volume }

// ClaimClass is the class that a claim asks for; "" is none.
func ClaimClass(c *corev1.PersistentVolumeClaim) string {
	if class, ok := c.Annotations[corev1.BetaStorageClassAnnotation]; ok {
		return class
	}
	if c.Spec.StorageClassName != nil {
		return *c.Spec.StorageClassName
	}
	return ""
}

// ClaimHasClass says whether a claim names a class, be it the empty one:
// only a claim that does not is given the default.
func ClaimHasClass(c *corev1.PersistentVolumeClaim) bool {
	_, ok := c.Annotations[corev1.BetaStorageClassAnnotation]
	return ok || c.Spec.StorageClassName != nil
}

// VolumeClass is the class of a volume.
func VolumeClass(v *corev1.PersistentVolume) string {
	if class, ok := v.Annotations[corev1.BetaStorageClassAnnotation]; ok {
		return class
	}
	return v.Spec.StorageClassName
}

// IsDefaultClass says whether a class is marked as the default.
func IsDefaultClass(c *storagev1.StorageClass) bool {
	return c.Annotations[AnnotationDefaultClass] == "true" || c.Annotations[annotationDefaultClassBeta] == "true"
}

// DefaultClass picks, of the classes marked as the default, the newest (then
// by name), as upstream does; nil if none is.
func DefaultClass(classes []*storagev1.StorageClass) *storagev1.StorageClass {
	var best *storagev1.StorageClass
	for _, c := range classes {
		if !IsDefaultClass(c) {
			continue
		}
		if best == nil || best.CreationTimestamp.Before(&c.CreationTimestamp) ||
			best.CreationTimestamp.Equal(&c.CreationTimestamp) && c.Name < best.Name {
			best = c
		}
	}
	return best
}

// WaitsForConsumer says whether claims of the class get their volume when
// their first pod has a node.
func WaitsForConsumer(c *storagev1.StorageClass) bool {
	return c.VolumeBindingMode != nil && *c.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}

// IsLocalVolume says whether a volume was made by the built-in class, so that
// its node keeps its folder and its quota, and removes it.
func IsLocalVolume(v *corev1.PersistentVolume) bool {
	return v.Annotations[AnnotationProvisionedBy] == LocalProvisioner && v.Spec.Local != nil
}

// DataGoes says whether a volume's data goes with it; else it stays where it is,
// also when the PersistentVolume itself is deleted.
func DataGoes(v *corev1.PersistentVolume) bool {
	return v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete
}

// LocalVolumeNode is the node of a volume of the built-in class; "" is none.
func LocalVolumeNode(v *corev1.PersistentVolume) string {
	if !IsLocalVolume(v) || v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
		return ""
	}
	for _, t := range v.Spec.NodeAffinity.Required.NodeSelectorTerms {
		for _, f := range t.MatchFields {
			if f.Key == "metadata.name" && f.Operator == corev1.NodeSelectorOpIn && len(f.Values) == 1 {
				return f.Values[0]
			}
		}
	}
	return ""
}

// BindsTo says whether a volume is reserved for exactly this claim.
func BindsTo(v *corev1.PersistentVolume, c *corev1.PersistentVolumeClaim) bool {
	r := v.Spec.ClaimRef
	return r != nil && r.Namespace == c.Namespace && r.Name == c.Name && r.UID == c.UID
}

// Bound says whether claim and volume are bound to each other, so that a pod
// may use the volume.
func Bound(c *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) bool {
	return c.Spec.VolumeName == v.Name && BindsTo(v, c) && c.Annotations[AnnotationBindCompleted] != ""
}

func defaultClaim(s *corev1.PersistentVolumeClaimSpec) {
	setDefault(&s.VolumeMode, corev1.PersistentVolumeFilesystem)
	roundResources(s.Resources.Limits, s.Resources.Requests)
}

func defaultVolumeObject(v *corev1.PersistentVolume) {
	setZero(&v.Status.Phase, corev1.VolumePending)
	setZero(&v.Spec.PersistentVolumeReclaimPolicy, corev1.PersistentVolumeReclaimRetain)
	setDefault(&v.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
	defaultInlineVolume(&v.Spec)
}

func defaultInlineVolume(s *corev1.PersistentVolumeSpec) {
	if s == nil {
		return
	}
	roundResources(s.Capacity)
	if s.HostPath != nil {
		setDefault(&s.HostPath.Type, corev1.HostPathUnset)
	}
	if s.ISCSI != nil {
		setZero(&s.ISCSI.ISCSIInterface, "default")
	}
	if s.AzureDisk != nil {
		defaultAzureDisk(s.AzureDisk)
	}
	if s.ScaleIO != nil {
		setZero(&s.ScaleIO.StorageMode, "ThinProvisioned")
		setZero(&s.ScaleIO.FSType, "xfs")
	}
	if s.RBD != nil {
		setZero(&s.RBD.RBDPool, "rbd")
		setZero(&s.RBD.RadosUser, "admin")
		setZero(&s.RBD.Keyring, "/etc/ceph/keyring")
	}
}

func defaultDriver(s *storagev1.CSIDriverSpec) {
	setDefault(&s.AttachRequired, true)
	setDefault(&s.PodInfoOnMount, false)
	setDefault(&s.StorageCapacity, false)
	setDefault(&s.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
	if len(s.VolumeLifecycleModes) == 0 {
		s.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
	setDefault(&s.RequiresRepublish, false)
	setDefault(&s.SELinuxMount, false)
	setDefault(&s.PreventPodSchedulingIfMissing, false)
}
