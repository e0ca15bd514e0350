package volume

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/manifests"
)

// verb is the one write that a decision leads to.
type verb uint8

const (
	nothing     verb = iota
	giveClass        // claim: the default class
	reserve          // volume: claimRef
	bind             // claim: volumeName and that it is bound
	claimStatus      // claim: status
	provision        // make the volume
	drop             // delete the volume, which nobody used
	enlarge          // volume: capacity
	outsource        // claim: which provisioner is to act
	unreserve        // volume: no claimRef
	volumePhase      // volume: phase
	reclaim          // delete the volume, whose claim is gone
	releaseData      // volume: its node will never remove the data
	unprotect        // claim or volume: the protection finalizer goes
	protect          // claim or volume: it comes
)

// step is what to do next about a claim or a volume, and what to tell.
type step struct {
	verb   verb
	volume *corev1.PersistentVolume // for reserve, bind, drop, enlarge
	node   *corev1.Node             // for provision
	class  string                   // for giveClass
	claim  corev1.PersistentVolumeClaimStatus
	phase  corev1.PersistentVolumePhase
	// reason and note are an event about the object; empty is none.
	reason, note string
	warning      bool
	message      string // of the volume's status
}

func tell(warning bool, reason, format string, args ...any) step {
	return step{warning: warning, reason: reason, note: fmt.Sprintf(format, args...)}
}

// facts are what a claim's decision reads.
type facts struct {
	claim *corev1.PersistentVolumeClaim
	used  bool // a pod that has a node mounts it; only read of a claim that is being deleted
	// volume is the claim's own: spec.volumeName's, or the one that is made
	// for it.
	volume *corev1.PersistentVolume
	class  *storagev1.StorageClass // nil: none, or it does not exist
	// standard is the default class.
	standard *storagev1.StorageClass
	// free are volumes that may be bound.
	free []*corev1.PersistentVolume
	// selected is the node that was chosen for the claim, if it exists; anyNode
	// is where a volume is made that waits for no pod.
	selected, anyNode *corev1.Node
}

// madeFor is the name of the volume that is made for a claim: another claim,
// also one of the same name, has another.
func madeFor(c *corev1.PersistentVolumeClaim) string { return "pvc-" + string(c.UID) }

// decideClaim says what comes next for a claim. Each step is one write, and
// what comes after it is decided anew from what is stored, so that it does not
// matter where the one before stopped. Pure.
func decideClaim(f *facts) step {
	c := f.claim
	protected := slices.Contains(c.Finalizers, manifests.FinalizerClaim)
	switch {
	case c.DeletionTimestamp != nil && protected && !f.used:
		return step{verb: unprotect}
	case c.DeletionTimestamp != nil:
		return step{}
	case !protected:
		return step{verb: protect}
	case c.Spec.VolumeName != "":
		return decideNamed(f)
	case !manifests.ClaimHasClass(c) && f.standard != nil:
		return step{verb: giveClass, class: f.standard.Name}
	}
	return decideUnbound(f)
}

// decideNamed: the claim names its volume, by our wish or the user's.
func decideNamed(f *facts) step {
	c, v := f.claim, f.volume
	complete := c.Annotations[manifests.AnnotationBindCompleted] != ""
	switch {
	case v == nil && complete:
		return lost(c, "Bound claim has lost its PersistentVolume. Any data on the volume is lost!")
	case v == nil:
		return pending(c, tell(true, "FailedBinding", "volume %q not found", c.Spec.VolumeName))
	case manifests.BindsTo(v, c):
		if !complete {
			return step{verb: bind, volume: v}
		}
		return decideBound(f)
	case v.Spec.ClaimRef != nil && !reservedFor(c, v):
		if complete {
			return lost(c, "Bound claim has lost reference to PersistentVolume. Any data on the volume is lost!")
		}
		r := v.Spec.ClaimRef
		return pending(c, tell(true, "FailedBinding", "volume %q already bound to a different claim (%s/%s)", v.Name, r.Namespace, r.Name))
	case !complete && unfit(c, v) != "":
		return pending(c, tell(true, "VolumeMismatch", "Cannot bind to requested volume %q: %s", v.Name, unfit(c, v)))
	}
	return step{verb: reserve, volume: v}
}

// decideBound: both name each other.
func decideBound(f *facts) step {
	c, v := f.claim, f.volume
	has, asks := v.Spec.Capacity[corev1.ResourceStorage], c.Spec.Resources.Requests[corev1.ResourceStorage]
	if asks.Cmp(has) > 0 && manifests.IsLocalVolume(v) {
		return step{verb: enlarge, volume: v}
	}
	want := corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound, AccessModes: v.Spec.AccessModes, Capacity: v.Spec.Capacity}
	now := &c.Status
	size := now.Capacity[corev1.ResourceStorage]
	if now.Phase == want.Phase && slices.Equal(now.AccessModes, want.AccessModes) && size.Cmp(has) == 0 {
		return step{}
	}
	return step{verb: claimStatus, claim: want}
}

func lost(c *corev1.PersistentVolumeClaim, note string) step {
	s := tell(true, "ClaimLost", "%s", note)
	if c.Status.Phase != corev1.ClaimLost {
		s.verb, s.claim = claimStatus, corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimLost}
	}
	return s
}

// pending tells why a claim has no volume.
func pending(c *corev1.PersistentVolumeClaim, s step) step {
	if c.Status.Phase != corev1.ClaimPending {
		s.verb, s.claim = claimStatus, corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}
	}
	return s
}

// decideUnbound: the claim has no volume yet.
func decideUnbound(f *facts) step {
	c, class := f.claim, f.class
	waits := class != nil && manifests.WaitsForConsumer(class)
	if v := f.volume; v != nil && reservedFor(c, v) { // it was being made
		switch {
		case v.DeletionTimestamp != nil:
			return step{} // until it is gone
		case waits && (f.selected == nil || !reaches(v, f.selected)):
			// The first consumer goes elsewhere; nobody has used it.
			return step{verb: drop, volume: v}
		}
		return step{verb: bind, volume: v}
	}
	for _, v := range f.free {
		if manifests.BindsTo(v, c) { // it was reserved by us, or for us
			if waits && f.selected != nil && !reaches(v, f.selected) && v.Annotations[manifests.AnnotationBoundByController] != "" {
				return step{verb: unreserve, volume: v}
			}
			return step{verb: bind, volume: v}
		}
	}
	if waits && f.selected == nil {
		if v := best(c, f.free, nil); v != nil && v.Spec.ClaimRef != nil {
			return step{verb: reserve, volume: v} // a user reserved it
		}
		return pending(c, tell(false, "WaitForFirstConsumer", "waiting for first consumer to be created before binding"))
	}
	if v := best(c, f.free, f.selected); v != nil {
		return step{verb: reserve, volume: v}
	}
	return decideMaking(f)
}

// decideMaking: no volume that exists will do.
func decideMaking(f *facts) step {
	c, class := f.claim, f.class
	switch {
	case class == nil && manifests.ClaimClass(c) != "":
		return pending(c, tell(true, "ProvisioningFailed", "storageclass.storage.k8s.io %q not found", manifests.ClaimClass(c)))
	case class == nil || class.Provisioner == manifests.NoProvisioner:
		return pending(c, tell(false, "FailedBinding", "no persistent volumes available for this claim and no storage class is set"))
	case class.Provisioner != manifests.LocalProvisioner:
		s := tell(false, "ExternalProvisioning", "Waiting for a volume to be created either by the external provisioner '%s' or manually by the system administrator. "+
			"If volume creation is delayed, please verify that the provisioner is running and correctly registered.", class.Provisioner)
		if c.Annotations[manifests.AnnotationProvisioner] != class.Provisioner {
			s.verb, s.class = outsource, class.Provisioner
			return s
		}
		return pending(c, s)
	case c.Spec.Selector != nil:
		return pending(c, tell(true, "ProvisioningFailed", "claim.Spec.Selector is not supported for volumes that are made on demand"))
	}
	node := f.selected
	if !manifests.WaitsForConsumer(class) {
		node = f.anyNode
	}
	if node == nil {
		return pending(c, tell(true, "ProvisioningFailed", "class %s binds at once, and no node is ready to hold the volume", class.Name))
	}
	return step{verb: provision, node: node}
}

// newVolume is the volume for a claim on a node: a folder there.
func newVolume(c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, node *corev1.Node) *corev1.PersistentVolume {
	v := &corev1.PersistentVolume{}
	v.Name = madeFor(c)
	v.Annotations = map[string]string{manifests.AnnotationProvisionedBy: manifests.LocalProvisioner}
	if node.Spec.ProviderID != "" {
		v.Annotations[manifests.AnnotationMachine] = node.Spec.ProviderID
	}
	v.Finalizers = []string{manifests.FinalizerVolume, manifests.FinalizerData}
	size := c.Spec.Resources.Requests[corev1.ResourceStorage]
	mode := corev1.PersistentVolumeFilesystem
	v.Spec = corev1.PersistentVolumeSpec{
		Capacity:                      corev1.ResourceList{corev1.ResourceStorage: *resource.NewQuantity(size.Value(), resource.BinarySI)},
		AccessModes:                   slices.Clone(c.Spec.AccessModes),
		PersistentVolumeReclaimPolicy: corev1.PersistentVolumeReclaimDelete,
		StorageClassName:              class.Name,
		VolumeMode:                    &mode,
		ClaimRef:                      claimRef(c),
		NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
			{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node.Name}}}}}}},
	}
	if class.ReclaimPolicy != nil {
		v.Spec.PersistentVolumeReclaimPolicy = *class.ReclaimPolicy
	}
	dir := node.Annotations[manifests.AnnotationVolumesDir]
	if dir == "" {
		dir = manifests.DefaultVolumesDir
	}
	v.Spec.Local = &corev1.LocalVolumeSource{Path: dir + "/" + v.Name}
	return v
}

func claimRef(c *corev1.PersistentVolumeClaim) *corev1.ObjectReference {
	return &corev1.ObjectReference{Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: c.Namespace, Name: c.Name, UID: c.UID}
}

// volumeFacts are what a volume's decision reads.
type volumeFacts struct {
	volume *corev1.PersistentVolume
	// claim is the one that claimRef names, if it exists with that uid.
	claim *corev1.PersistentVolumeClaim
	// dead: the node of a local volume was declared dead.
	dead bool
}

// decideVolume says what comes next for a volume. Pure.
func decideVolume(f *volumeFacts) step {
	v, c := f.volume, f.claim
	protected := slices.Contains(v.Finalizers, manifests.FinalizerVolume)
	r := v.Spec.ClaimRef
	held := r != nil && r.UID != "" && c != nil && (c.Spec.VolumeName == v.Name || c.Spec.VolumeName == "")
	if v.DeletionTimestamp != nil {
		switch {
		case held && c.Spec.VolumeName == v.Name:
			return phase(v, corev1.VolumeBound, "")
		case protected:
			return step{verb: unprotect}
		case !slices.Contains(v.Finalizers, manifests.FinalizerData):
			return step{}
		case f.dead:
			return step{verb: releaseData}
		case !manifests.DataGoes(v):
			s := tell(false, "DataKept", "the data stays in %s on node %s: nothing in the cluster uses it any more, and nobody else removes it", localPath(v), manifests.LocalVolumeNode(v))
			s.verb = releaseData
			return s
		}
		return step{}
	}
	switch {
	case !protected:
		return step{verb: protect}
	case r == nil || r.UID == "":
		return phase(v, corev1.VolumeAvailable, "")
	case held:
		if c.Spec.VolumeName == "" {
			return step{} // the claim's next step binds it, or gives it up
		}
		return phase(v, corev1.VolumeBound, "")
	case c != nil && v.Annotations[manifests.AnnotationBoundByController] != "" && !manifests.IsLocalVolume(v):
		return step{verb: unreserve, volume: v} // the claim took another one
	}
	return decideReleased(v)
}

// decideReleased: the volume's claim is gone.
func decideReleased(v *corev1.PersistentVolume) step {
	if !manifests.DataGoes(v) {
		return phase(v, corev1.VolumeReleased, "")
	}
	if manifests.IsLocalVolume(v) {
		if v.Status.Phase != corev1.VolumeReleased {
			return phase(v, corev1.VolumeReleased, "")
		}
		return step{verb: reclaim}
	}
	if v.Annotations[manifests.AnnotationProvisionedBy] != "" {
		return phase(v, corev1.VolumeReleased, "") // its provisioner deletes it
	}
	return phase(v, corev1.VolumeFailed, "nobody here deletes a volume that was made by hand: empty it and delete the PersistentVolume, or remove spec.claimRef to use it again")
}

func localPath(v *corev1.PersistentVolume) string {
	if v.Spec.Local == nil {
		return v.Name
	}
	return v.Spec.Local.Path
}

func phase(v *corev1.PersistentVolume, p corev1.PersistentVolumePhase, message string) step {
	if v.Status.Phase == p && v.Status.Message == message {
		return step{}
	}
	s := step{verb: volumePhase, phase: p, message: message}
	if message != "" {
		s.warning, s.reason, s.note = true, "VolumeFailedDelete", message
	}
	return s
}
