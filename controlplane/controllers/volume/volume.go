// Package volume binds claims to volumes, makes the volumes of the built-in
// class, protects both while they are used, and lets go of volumes whose
// claim is gone.
//
// Owned fields: of a claim spec.volumeName, the annotations of binding, the
// default class, the finalizer pvc-protection and its status; of a volume
// spec.claimRef (what a user wrote there stays), the size of local volumes,
// the finalizer pv-protection and its status; the existence of the volumes of
// the built-in class. The annotation selected-node is the scheduler's; the
// finalizer dunlin.dev/volume-data goes with the word of the volume's node.
//
// A claim has one volume for ever: spec.volumeName is written once, in a
// write that checks that the claim's node is still the one that the volume
// was made for, and nodes use a volume only once it is.
package volume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

var (
	claimGK  = schema.GroupKind{Kind: "PersistentVolumeClaim"}
	volumeGK = schema.GroupKind{Kind: "PersistentVolume"}
	classGK  = schema.GroupKind{Group: storagev1.GroupName, Kind: "StorageClass"}
	podGK    = schema.GroupKind{Kind: "Pod"}
	nodeGK   = schema.GroupKind{Kind: "Node"}
)

// maxSteps bounds the writes of one reconcile: what is left comes with the
// events of those.
const maxSteps = 8

// again is when a claim that waits for a ready node is looked at again.
const again = 30 * time.Second

type controller struct{ env loop.Env }

// New makes the controller; its keys are claims and volumes.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env}
	return &loop.Controller{
		Name: "volume", Workers: 4,
		Sources: []loop.Source{
			{Kind: claimGK.String(), Keys: c.claimKeys},
			{Kind: volumeGK.String(), Keys: c.volumeKeys},
			{Kind: classGK.String(), Keys: func(_ state.Event, add func(state.Key)) { c.unbound(add) }},
			{Kind: podGK.String(), Keys: c.podKeys},
			{Kind: nodeGK.String(), Keys: c.nodeKeys},
		},
		Reconcile: c.reconcile,
	}
}

func claimKey(namespace, name string) state.Key {
	return state.Key{Kind: claimGK.String(), Namespace: namespace, Name: name}
}

func volumeKey(name string) state.Key { return state.Key{Kind: volumeGK.String(), Name: name} }

func (c *controller) claimKeys(ev state.Event, add func(state.Key)) {
	add(ev.Record.Header.Key)
	if obj, err := c.env.Store.Decode(ev.Record); err == nil {
		if claim, ok := obj.(*corev1.PersistentVolumeClaim); ok {
			if claim.Spec.VolumeName != "" {
				add(volumeKey(claim.Spec.VolumeName))
			}
			if ev.Type == state.Deleted {
				add(volumeKey(madeFor(claim)))
			}
		}
	}
}

func (c *controller) volumeKeys(ev state.Event, add func(state.Key)) {
	add(ev.Record.Header.Key)
	obj, err := c.env.Store.Decode(ev.Record)
	v, ok := obj.(*corev1.PersistentVolume)
	if err != nil || !ok {
		return
	}
	if r := v.Spec.ClaimRef; r != nil {
		add(claimKey(r.Namespace, r.Name))
	} else if ev.Type != state.Deleted {
		c.unbound(add)
	}
}

// podKeys wakes the claims that wait for their pods to go.
func (c *controller) podKeys(ev state.Event, add func(state.Key)) {
	if ev.Type != state.Deleted || !mountsClaims(ev.Record) {
		return
	}
	obj, err := c.env.Store.Decode(ev.Record)
	if pod, ok := obj.(*corev1.Pod); ok && err == nil {
		for _, u := range manifests.ClaimsOf(pod) {
			add(claimKey(pod.Namespace, u.Claim))
		}
	}
}

// nodeKeys: nodes that come and go matter to claims without a volume, those
// that are declared dead to the volumes that are on them.
func (c *controller) nodeKeys(ev state.Event, add func(state.Key)) {
	if ev.Type != state.Modified {
		c.unbound(add)
	}
	if ev.Record.Header.Labels[manifests.LabelDead] != "" {
		c.env.Reader.Snapshot().Range(volumeGK.String(), "", state.Key{}, func(r *state.Record) bool {
			if r.Header.Deleted != 0 {
				add(r.Header.Key)
			}
			return true
		})
	}
}

// unbound adds the claims without a volume.
func (c *controller) unbound(add func(state.Key)) {
	c.env.Reader.Snapshot().Range(claimGK.String(), "", state.Key{}, func(r *state.Record) bool {
		if r.Header.Phase != string(corev1.ClaimBound) {
			add(r.Header.Key)
		}
		return true
	})
}

// Names in a pod's encoded spec that its claims cannot be without.
var claimMarks = [][]byte{[]byte("persistentVolumeClaim"), []byte("ephemeral")}

func mountsClaims(r *state.Record) bool {
	return r.Spec != nil && (bytes.Contains(r.Spec.Data, claimMarks[0]) || bytes.Contains(r.Spec.Data, claimMarks[1]))
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	for range maxSteps {
		var s step
		var ref corev1.ObjectReference
		var do func(context.Context, step) error
		switch key.Kind {
		case claimGK.String():
			f, err := c.claimFacts(key)
			if err != nil || f == nil {
				return 0, err
			}
			s, ref = decideClaim(f), events.Ref(claimGK, f.claim)
			do = func(ctx context.Context, s step) error { return c.doClaim(ctx, f, s) }
		default:
			f, err := c.volumeFacts(key)
			if err != nil || f == nil {
				return 0, err
			}
			s, ref = decideVolume(f), events.Ref(volumeGK, f.volume)
			do = func(ctx context.Context, s step) error { return c.doVolume(ctx, f.volume, s) }
		}
		if s.reason != "" {
			kind := events.Normal
			if s.warning {
				kind = events.Warning
			}
			c.env.Events.Event(ref, kind, s.reason, s.note)
		}
		if s.verb == nothing {
			if s.reason == "ProvisioningFailed" {
				return again, nil
			}
			return 0, nil
		}
		if err := do(ctx, s); err != nil {
			if apierrors.IsNotFound(err) || errors.Is(err, loop.ErrMoved) || apierrors.IsConflict(err) {
				continue // it is decided anew
			}
			return 0, err
		}
	}
	return time.Millisecond, nil
}

func get[T runtime.Object](c *controller, gk schema.GroupKind, namespace, name string) (T, bool, error) {
	var none T
	if name == "" {
		return none, false, nil
	}
	obj, err := c.env.Store.Get(gk, namespace, name)
	if apierrors.IsNotFound(err) {
		return none, false, nil
	}
	if err != nil {
		return none, false, fmt.Errorf("get %s %s: %w", gk.Kind, name, err)
	}
	out, ok := obj.(T)
	return out, ok, nil
}

// claimFacts reads what a claim's decision needs; nil if the claim is gone.
func (c *controller) claimFacts(key state.Key) (*facts, error) {
	claim, ok, err := get[*corev1.PersistentVolumeClaim](c, claimGK, key.Namespace, key.Name)
	if err != nil || !ok {
		return nil, err
	}
	f := &facts{claim: claim}
	if claim.DeletionTimestamp != nil {
		f.used, err = c.used(claim)
		return f, err
	}
	name := claim.Spec.VolumeName
	if name == "" {
		name = madeFor(claim)
	}
	if f.volume, _, err = get[*corev1.PersistentVolume](c, volumeGK, "", name); err != nil {
		return nil, err
	}
	if claim.Spec.VolumeName != "" {
		return f, nil
	}
	return f, c.choices(f)
}

// choices reads what an unbound claim can be bound to.
func (c *controller) choices(f *facts) error {
	claim := f.claim
	var err error
	if f.class, _, err = get[*storagev1.StorageClass](c, classGK, "", manifests.ClaimClass(claim)); err != nil {
		return err
	}
	if !manifests.ClaimHasClass(claim) {
		list, err := c.env.Store.List(classGK, "", labels.Everything(), fields.Everything())
		if err != nil {
			return fmt.Errorf("list StorageClasses: %w", err)
		}
		var classes []*storagev1.StorageClass
		for _, o := range list {
			if class, ok := o.(*storagev1.StorageClass); ok {
				classes = append(classes, class)
			}
		}
		f.standard = manifests.DefaultClass(classes)
	}
	if f.selected, _, err = get[*corev1.Node](c, nodeGK, "", claim.Annotations[manifests.AnnotationSelectedNode]); err != nil {
		return err
	}
	if f.class != nil && f.class.Provisioner == manifests.LocalProvisioner && !manifests.WaitsForConsumer(f.class) {
		if f.anyNode, err = c.roomiest(); err != nil {
			return err
		}
	}
	var failed error
	c.env.Reader.Snapshot().Range(volumeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		if r.Header.Phase == string(corev1.VolumeBound) || r.Header.Phase == string(corev1.VolumeReleased) {
			return true
		}
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			failed = err
			return false
		}
		if v, ok := obj.(*corev1.PersistentVolume); ok && Candidate(claim, v) && v.Name != madeFor(claim) {
			f.free = append(f.free, v)
		}
		return true
	})
	return failed
}

// used says whether a pod that has a node mounts the claim, also one that is
// over: as long as its object is there it is not known that nothing of it is.
func (c *controller) used(claim *corev1.PersistentVolumeClaim) (bool, error) {
	found := false
	var failed error
	c.env.Reader.Snapshot().Range(podGK.String(), claim.Namespace, state.Key{}, func(r *state.Record) bool {
		if r.Header.NodeName == "" || !mountsClaims(r) {
			return true
		}
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			failed = err
			return false
		}
		pod, ok := obj.(*corev1.Pod)
		found = ok && slices.ContainsFunc(manifests.ClaimsOf(pod), func(u manifests.ClaimUse) bool {
			return u.Claim == claim.Name && (!u.Ephemeral || metav1.IsControlledBy(claim, pod))
		})
		return !found
	})
	return found, failed
}

// roomiest is the ready node with the most room for volumes, for classes that
// bind at once; nil is none.
func (c *controller) roomiest() (*corev1.Node, error) {
	snap := c.env.Reader.Snapshot()
	taken := map[string]int64{}
	var failed error
	snap.Range(volumeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			failed = err
			return false
		}
		if v, ok := obj.(*corev1.PersistentVolume); ok {
			size := v.Spec.Capacity[corev1.ResourceStorage]
			taken[manifests.LocalVolumeNode(v)] += size.Value()
		}
		return true
	})
	var best *corev1.Node
	most := int64(0)
	snap.Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			failed = err
			return false
		}
		n, ok := obj.(*corev1.Node)
		if !ok || n.Spec.Unschedulable || n.DeletionTimestamp != nil || !ready(n) {
			return true
		}
		disk := n.Status.Allocatable[corev1.ResourceEphemeralStorage]
		if room := disk.Value() - taken[n.Name]; best == nil || room > most {
			best, most = n, room
		}
		return true
	})
	return best, failed
}

func ready(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// volumeFacts reads what a volume's decision needs; nil if it is gone.
func (c *controller) volumeFacts(key state.Key) (*volumeFacts, error) {
	v, ok, err := get[*corev1.PersistentVolume](c, volumeGK, "", key.Name)
	if err != nil || !ok {
		return nil, err
	}
	f := &volumeFacts{volume: v}
	if r := v.Spec.ClaimRef; r != nil && r.UID != "" {
		claim, ok, err := get[*corev1.PersistentVolumeClaim](c, claimGK, r.Namespace, r.Name)
		if err != nil {
			return nil, err
		}
		if ok && claim.UID == r.UID {
			f.claim = claim
		}
	}
	if node := manifests.LocalVolumeNode(v); node != "" && v.DeletionTimestamp != nil {
		n, ok, err := get[*corev1.Node](c, nodeGK, "", node)
		if err != nil {
			return nil, err
		}
		f.dead = ok && n.Labels[manifests.LabelDead] != "" && reaches(v, n)
	}
	return f, nil
}
