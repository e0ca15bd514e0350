package scheduler

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/volume"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

var (
	claimGK        = schema.GroupKind{Kind: "PersistentVolumeClaim"}
	volumeGK       = schema.GroupKind{Kind: "PersistentVolume"}
	storageClassGK = schema.GroupKind{Group: storagev1.GroupName, Kind: "StorageClass"}
)

// claimKey names a claim: namespace and name.
type claimKey struct{ namespace, name string }

// pendingClaim is a claim whose node the pod's placement decides.
type pendingClaim struct {
	claimKey
	uid string
}

// claims is what the scheduler keeps of volumes: it mirrors the store, and is
// built anew with the cache.
type claims struct {
	// users are the placed pods of each claim, with their nodes.
	users map[claimKey]map[string]string
	// waiting are the pods without a node of each claim.
	waiting map[claimKey]map[string]bool
	of      map[string][]claimKey // pod uid: its claims, in either
	// chosen is the node of a claim that was decided and is not in the store yet.
	chosen map[string]string // by claim uid
	// free are volumes that could be bound, by class and name.
	free map[string]map[string]*corev1.PersistentVolume
	// local are the volumes of the built-in class: their node and size.
	local map[string]localVolume
	taken map[string]int64 // by node: sum of local
}

type localVolume struct {
	node string
	size int64
}

func newClaims() *claims {
	return &claims{users: map[claimKey]map[string]string{}, waiting: map[claimKey]map[string]bool{}, of: map[string][]claimKey{},
		chosen: map[string]string{}, free: map[string]map[string]*corev1.PersistentVolume{}, local: map[string]localVolume{}, taken: map[string]int64{}}
}

// Names in a pod's encoded spec that its claims cannot be without.
var claimMarks = [][]byte{[]byte("persistentVolumeClaim"), []byte("ephemeral")}

func mountsClaims(r *state.Record) bool {
	return r.Spec != nil && (bytes.Contains(r.Spec.Data, claimMarks[0]) || bytes.Contains(r.Spec.Data, claimMarks[1]))
}

// forget drops a pod, and says which claims it used.
func (c *claims) forget(uid string) []claimKey {
	keys := c.of[uid]
	for _, k := range keys {
		if delete(c.users[k], uid); len(c.users[k]) == 0 {
			delete(c.users, k)
		}
		if delete(c.waiting[k], uid); len(c.waiting[k]) == 0 {
			delete(c.waiting, k)
		}
	}
	delete(c.of, uid)
	return keys
}

// use notes a placed pod; wait one without a node.
func (c *claims) use(uid, node string, keys []claimKey) {
	c.forget(uid)
	for _, k := range keys {
		if c.users[k] == nil {
			c.users[k] = map[string]string{}
		}
		c.users[k][uid] = node
	}
	c.of[uid] = keys
}

func (c *claims) wait(uid string, keys []claimKey) {
	c.forget(uid)
	for _, k := range keys {
		if c.waiting[k] == nil {
			c.waiting[k] = map[string]bool{}
		}
		c.waiting[k][uid] = true
	}
	c.of[uid] = keys
}

func keysOf(pod *corev1.Pod) (out []claimKey) {
	for _, u := range manifests.ClaimsOf(pod) {
		if k := (claimKey{pod.Namespace, u.Claim}); !slices.Contains(out, k) {
			out = append(out, k)
		}
	}
	return out
}

// setVolume takes a volume's record (nil: it is gone), and names the nodes
// whose room changed.
func (c *claims) setVolume(name string, v *corev1.PersistentVolume) (nodes []string) {
	for class, m := range c.free {
		if delete(m, name); len(m) == 0 {
			delete(c.free, class)
		}
	}
	if old, ok := c.local[name]; ok {
		c.taken[old.node] -= old.size
		delete(c.local, name)
		nodes = append(nodes, old.node)
	}
	if v == nil {
		return nodes
	}
	if node := manifests.LocalVolumeNode(v); node != "" {
		size := v.Spec.Capacity[corev1.ResourceStorage]
		x := localVolume{node, size.Value()}
		c.local[name] = x
		c.taken[node] += x.size
		return append(nodes, node)
	}
	if v.Spec.ClaimRef == nil || v.Spec.ClaimRef.UID == "" {
		class := manifests.VolumeClass(v)
		if c.free[class] == nil {
			c.free[class] = map[string]*corev1.PersistentVolume{}
		}
		c.free[class][name] = v
	}
	return nodes
}

// room is what volumes may still take of a node's disk; -1 is any amount.
func (c *claims) room(node string, allocatable []state.Quantity) int64 {
	for _, q := range allocatable {
		if q.Name == string(corev1.ResourceEphemeralStorage) && q.Value > 0 {
			return max(q.Value-c.taken[node], 0)
		}
	}
	return -1
}

// volumesOf resolves a pod's claims to what they demand of a node now, the
// claims whose node is chosen with the pod's, and those of them whose volume
// must be there before the pod can be placed.
func (s *Scheduler) volumesOf(pod *corev1.Pod) (out *plan.Volumes, pending []pendingClaim, first bool, err error) {
	out = &plan.Volumes{}
	for _, u := range manifests.ClaimsOf(pod) {
		obj, err := s.cfg.Store.Get(claimGK, pod.Namespace, u.Claim)
		if apierrors.IsNotFound(err) {
			out.Refuse = fmt.Sprintf("persistentvolumeclaim %q not found", u.Claim)
			if u.Ephemeral {
				out.Refuse = fmt.Sprintf("waiting for ephemeral volume controller to create the persistentvolumeclaim %q", u.Claim)
			}
			return out, nil, false, nil
		}
		claim, ok := obj.(*corev1.PersistentVolumeClaim)
		if err != nil || !ok {
			return nil, nil, false, fmt.Errorf("claim %s/%s: %w", pod.Namespace, u.Claim, err)
		}
		switch {
		case claim.DeletionTimestamp != nil:
			out.Refuse = fmt.Sprintf("persistentvolumeclaim %q is being deleted", u.Claim)
			return out, nil, false, nil
		case u.Ephemeral && !metav1.IsControlledBy(claim, pod):
			out.Refuse = fmt.Sprintf("PVC %q was not created for pod %q (pod is not owner)", u.Claim, pod.Namespace+"/"+pod.Name)
			return out, nil, false, nil
		}
		t, refuse, choose, wait, err := s.term(claim, string(pod.UID))
		if err != nil {
			return nil, nil, false, err
		}
		if refuse != "" {
			out.Refuse = refuse
			return out, nil, false, nil
		}
		out.Terms = append(out.Terms, t)
		if choose {
			pending = append(pending, pendingClaim{claimKey{claim.Namespace, claim.Name}, string(claim.UID)})
			if !wait {
				size := claim.Spec.Resources.Requests[corev1.ResourceStorage]
				out.Room += size.Value()
			}
		}
		first = first || wait
	}
	return out, pending, first, nil
}

// term is one claim's demand. choose: its node comes with the pod's; wait:
// its volume must be bound before the pod is placed for good.
func (s *Scheduler) term(c *corev1.PersistentVolumeClaim, pod string) (t plan.VolumeTerm, refuse string, choose, wait bool, err error) {
	t = plan.VolumeTerm{Claim: c.Name}
	if refuse = s.usedElsewhere(c, pod, &t); refuse != "" {
		return t, refuse, false, false, nil
	}
	if c.Spec.VolumeName != "" {
		obj, err := s.cfg.Store.Get(volumeGK, "", c.Spec.VolumeName)
		if err != nil && !apierrors.IsNotFound(err) {
			return t, "", false, false, fmt.Errorf("volume %s: %w", c.Spec.VolumeName, err)
		}
		v, ok := obj.(*corev1.PersistentVolume)
		switch {
		case err != nil || !ok:
			return t, fmt.Sprintf("persistentvolume %q of claim %q not found: its data is not in this cluster", c.Spec.VolumeName, c.Name), false, false, nil
		case !manifests.Bound(c, v):
			return t, "pod has unbound immediate PersistentVolumeClaims", false, false, nil
		}
		t.Volume, t.Required, t.Identity = v.Name, volume.Reachable(v), v.Annotations[manifests.AnnotationMachine]
		return t, "", false, false, nil
	}
	obj, err := s.cfg.Store.Get(storageClassGK, "", manifests.ClaimClass(c))
	if err != nil && !apierrors.IsNotFound(err) {
		return t, "", false, false, fmt.Errorf("class of claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	class, ok := obj.(*storagev1.StorageClass)
	if err != nil || !ok || !manifests.WaitsForConsumer(class) {
		return t, "pod has unbound immediate PersistentVolumeClaims", false, false, nil
	}
	node := c.Annotations[manifests.AnnotationSelectedNode]
	if n := s.claims.chosen[string(c.UID)]; n != "" {
		node = n
	}
	if _, known := s.cache.nodes.Slot(node); known && t.Node == "" {
		t.Node = node // what began there goes on there
	}
	for _, v := range s.claims.free[class.Name] {
		if volume.Candidate(c, v) {
			t.OneOf = append(t.OneOf, volume.Reachable(v))
			wait = true // which one it gets is the controller's to say
		}
	}
	switch {
	case class.Provisioner == manifests.LocalProvisioner && !wait:
	case class.Provisioner == manifests.NoProvisioner:
		t.Choose, wait = true, true
	default:
		t.OneOf, wait = nil, true
	}
	return t, "", true, wait, nil
}

// usedElsewhere applies the access modes: ReadWriteOncePod is for one pod,
// ReadWriteOnce for the pods of one node, be it silent or not.
func (s *Scheduler) usedElsewhere(c *corev1.PersistentVolumeClaim, pod string, t *plan.VolumeTerm) (refuse string) {
	users := s.claims.users[claimKey{c.Namespace, c.Name}]
	others := 0
	for uid, node := range users {
		if uid != pod {
			others++
			t.Node = node
		}
	}
	modes := c.Spec.AccessModes
	switch {
	case others == 0:
	case slices.Contains(modes, corev1.ReadWriteOncePod):
		return fmt.Sprintf("another pod uses PersistentVolumeClaim %q, whose ReadWriteOncePod access mode allows one", c.Name)
	case slices.Contains(modes, corev1.ReadWriteMany) || slices.Contains(modes, corev1.ReadOnlyMany):
		t.Node = ""
	}
	return ""
}

// claimClass is the class of a pod that mounts claims: its volumes' demands
// are part of its shape. The same pointer comes back while they are the same.
func (s *Scheduler) claimClass(base *class, r *state.Record) (*class, error) {
	obj, err := s.cfg.Store.Decode(r)
	if err != nil {
		return nil, fmt.Errorf("decode pod %s: %w", r.Header.Key.Name, err)
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, fmt.Errorf("pod %s is a %T", r.Header.Key.Name, obj)
	}
	v, pending, first, err := s.volumesOf(pod)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(struct {
		V *plan.Volumes
		P []pendingClaim
		F bool
	}{v, pending, first})
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", pod.Name, err)
	}
	if old := s.claimed[r.Header.UID]; old != nil && old.base == base && old.text == string(text) {
		return old, nil
	}
	shape := *base.shape
	fresh := plan.Shape{Selector: shape.Selector, Required: shape.Required, Preferred: shape.Preferred, Tolerations: shape.Tolerations,
		RuntimeClass: shape.RuntimeClass, Handler: shape.Handler, Volumes: v}
	k := *base
	k.shape, k.base, k.text, k.pending, k.first = &fresh, base, string(text), pending, first
	k.claims = keysOf(pod)
	s.claimed[r.Header.UID] = &k
	return &k, nil
}

// classOf is the pod's class, with what its claims demand.
func (s *Scheduler) classOf(r *state.Record) (*class, error) {
	c, err := s.classes.of(r)
	if err != nil || !mountsClaims(r) || c.profile == nil {
		return c, err
	}
	return s.claimClass(c, r)
}

// reclass looks again at the waiting pods of claims.
func (s *Scheduler) reclass(keys ...claimKey) {
	for _, k := range keys {
		for _, uid := range slices.Sorted(maps.Keys(s.claims.waiting[k])) {
			p := s.queue.pods[uid]
			if p == nil {
				continue
			}
			c, err := s.classOf(p.rec)
			if err != nil {
				s.cfg.Log.Error("a pod's claims cannot be read", "pod", p.rec.Header.Key.Namespace+"/"+p.rec.Header.Key.Name, "error", err)
				continue
			}
			s.queue.put(p.rec, c)
		}
	}
}

// useClaims notes that a placed pod uses its claims.
func (s *Scheduler) useClaims(r *state.Record) {
	obj, err := s.cfg.Store.Decode(r)
	pod, ok := obj.(*corev1.Pod)
	if err != nil || !ok {
		s.cfg.Log.Error("a placed pod's claims are left out", "pod", r.Header.Key.Namespace+"/"+r.Header.Key.Name, "error", err)
		return
	}
	keys := keysOf(pod)
	if node := r.Header.NodeName; len(keys) > 0 && (len(s.claims.users[keys[0]]) == 0 || s.claims.users[keys[0]][r.Header.UID] != node) {
		s.claims.use(r.Header.UID, node, keys)
		s.reclass(keys...)
	}
}

// claimChanged takes an event of a claim, a volume or a class of storage.
func (s *Scheduler) claimChanged(ev *state.Event) {
	h := &ev.Record.Header
	switch h.Key.Kind {
	case claimGK.String():
		if ev.Type != state.Added {
			// What was decided is in the store by now, or will never be.
			delete(s.claims.chosen, h.UID)
		}
		s.reclass(claimKey{h.Key.Namespace, h.Key.Name})
	case volumeGK.String():
		v := s.volumeOf(ev)
		for _, node := range s.claims.setVolume(h.Key.Name, v) {
			s.roomForVolumes(node)
		}
		if obj, err := s.cfg.Store.Decode(ev.Record); err == nil {
			if v, ok := obj.(*corev1.PersistentVolume); ok && v.Spec.ClaimRef != nil {
				s.reclass(claimKey{v.Spec.ClaimRef.Namespace, v.Spec.ClaimRef.Name})
				if v.Spec.ClaimRef.UID != "" {
					return
				}
			}
		}
		s.reclass(slices.Collect(maps.Keys(s.claims.waiting))...) // a free one, for whoever it fits
	case storageClassGK.String():
		s.reclass(slices.Collect(maps.Keys(s.claims.waiting))...)
	}
}

// volumeOf is the volume of an event; nil if it is gone.
func (s *Scheduler) volumeOf(ev *state.Event) *corev1.PersistentVolume {
	if ev.Type == state.Deleted {
		return nil
	}
	obj, err := s.cfg.Store.Decode(ev.Record)
	v, ok := obj.(*corev1.PersistentVolume)
	if err != nil || !ok {
		s.cfg.Log.Error("volume left out of scheduling", "volume", ev.Record.Header.Key.Name, "error", err)
		return nil
	}
	return v
}

// roomForVolumes tells the cache how much room a node's disk has left.
func (s *Scheduler) roomForVolumes(name string) {
	slot, ok := s.cache.nodes.Slot(name)
	if !ok {
		return
	}
	r, ok := s.reader.Snapshot().Get(state.Key{Kind: nodeGK.String(), Name: name})
	if ok && r.Header.UID == s.cache.nodes.At(slot).UID {
		s.nodeChanged(name, s.setNode(r))
	}
}

// choose writes the chosen nodes of claims, before their pods are bound, so
// that a claim's volume and its pod are never meant for two nodes: whoever
// finds the claim's node goes there. Pods for which that failed are not bound;
// those whose volume must be there first wait for it.
func (s *Scheduler) choose(ctx context.Context, b *batch) {
	var g errgroup.Group
	g.SetLimit(s.cfg.Writers)
	failed := make([]error, len(b.binds))
	for i, p := range b.bound {
		if len(p.class.pending) == 0 {
			continue
		}
		g.Go(func() error {
			for _, c := range p.class.pending {
				if failed[i] = s.selectNode(ctx, c, b.binds[i].Node); failed[i] != nil {
					break
				}
			}
			return nil
		})
	}
	_ = g.Wait() // nothing returns an error
	binds, bound := b.binds[:0], b.bound[:0]
	for i, p := range b.bound {
		switch {
		case failed[i] != nil:
			if ctx.Err() == nil && !errors.Is(failed[i], errClaimMoved) {
				s.cfg.Log.Warn("the node of a claim is not written", "pod", p.rec.Header.Key.Namespace+"/"+p.rec.Header.Key.Name, "error", failed[i])
			}
			s.unplace(p, b.binds[i].Node)
			s.queue.retry(p, time.Now())
		case p.class.first:
			node := b.binds[i].Node
			s.unplace(p, node)
			p.why = plan.Explanation{Message: fmt.Sprintf("waiting for the volumes of its claims to be bound on node %s", node)}
			b.failed = append(b.failed, p)
		default:
			binds, bound = append(binds, b.binds[i]), append(bound, p)
		}
	}
	b.binds, b.bound = binds, bound
}

// unplace takes back a decision.
func (s *Scheduler) unplace(p *waitingPod, node string) {
	h := &p.rec.Header
	s.cache.drop(h.UID)
	s.claims.wait(h.UID, p.class.claims)
	for _, c := range p.class.pending {
		delete(s.claims.chosen, c.uid)
	}
	s.freed = append(s.freed, node)
}

var errClaimMoved = errors.New("the claim is not what it was")

// selectNode writes a claim's node, unless the claim has a volume by now.
func (s *Scheduler) selectNode(ctx context.Context, c pendingClaim, node string) error {
	_, err := s.cfg.Store.Update(ctx, claimGK, c.namespace, c.name, registry.Main, func(cur runtime.Object) (runtime.Object, error) {
		claim, ok := cur.(*corev1.PersistentVolumeClaim)
		if !ok || string(claim.UID) != c.uid || claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil {
			return nil, errClaimMoved
		}
		if claim.Annotations == nil {
			claim.Annotations = map[string]string{}
		}
		claim.Annotations[manifests.AnnotationSelectedNode] = node
		return claim, nil
	}, registry.WriteOptions{Term: s.cfg.Term})
	return err
}
