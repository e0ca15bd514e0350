package sim

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/volumes"
)

// In every second world the StatefulSet's pods have claims: bound at first
// use, by whatever node that is, and there the pod of that name stays.

// withClaims gives each pod of a set a claim of its own.
func withClaims(s *appsv1.StatefulSet) *appsv1.StatefulSet {
	s.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}, Spec: corev1.PersistentVolumeClaimSpec{
		AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
		Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("64Mi")}},
	}}}
	return s
}

// claimView is what the checker knows of a claim, in commit order.
type claimView struct{ name, volume string }

// claimViews are all claims, and where volumes are.
type claimViews struct {
	claims map[string]*claimView // by uid
	at     map[string]string     // node, by volume
}

func newClaimViews() claimViews {
	return claimViews{claims: map[string]*claimView{}, at: map[string]string{}}
}

// claimChanged holds a claim to its one volume.
func (c *checker) claimChanged(srv *controlplane.Server, ev state.Event) {
	if ev.Type == state.Deleted {
		delete(c.bound.claims, ev.Record.Header.UID)
		return
	}
	obj, err := srv.Store().Decode(ev.Record)
	claim, ok := obj.(*corev1.PersistentVolumeClaim)
	if err != nil || !ok {
		c.w.violated("decode %v: %v", ev.Record.Header.Key, err)
		return
	}
	was := c.bound.claims[string(claim.UID)]
	if was == nil {
		was = &claimView{name: claim.Name}
		c.bound.claims[string(claim.UID)] = was
	}
	if was.volume != "" && claim.Spec.VolumeName != was.volume {
		c.w.violated("claim %s is bound twice: to volume %s, now to %q", claim.Name, was.volume, claim.Spec.VolumeName)
	}
	if was.volume == claim.Spec.VolumeName {
		return
	}
	was.volume = claim.Spec.VolumeName
	for uid, o := range c.bound.claims {
		if uid != string(claim.UID) && o.volume == was.volume {
			c.w.violated("volume %s is bound twice: to claim %s and claim %s", was.volume, o.name, was.name)
		}
	}
	for _, p := range c.pods {
		c.beside(p)
	}
}

// volumeChanged notes where a volume is.
func (c *checker) volumeChanged(srv *controlplane.Server, ev state.Event) {
	if ev.Type == state.Deleted {
		delete(c.bound.at, ev.Record.Header.Key.Name)
		return
	}
	obj, err := srv.Store().Decode(ev.Record)
	v, ok := obj.(*corev1.PersistentVolume)
	if err != nil || !ok {
		c.w.violated("decode %v: %v", ev.Record.Header.Key, err)
		return
	}
	node := manifests.LocalVolumeNode(v)
	if was := c.bound.at[v.Name]; was != "" && was != node {
		c.w.violated("volume %s was on %s and is on %q", v.Name, was, node)
	}
	c.bound.at[v.Name] = node
	if r := v.Spec.ClaimRef; r != nil && v.Status.Phase == corev1.VolumeBound {
		if claim := c.bound.claims[string(r.UID)]; claim != nil && claim.volume != v.Name {
			c.w.violated("claim %s is bound twice: to volume %q, and volume %s says so too", r.Name, claim.volume, v.Name)
		}
	}
}

// beside: a pod is on the node that has its claims' volumes.
func (c *checker) beside(p *podView) {
	if p.node == "" || p.marked || p.terminal {
		return
	}
	for _, claim := range c.bound.claims {
		if node := c.bound.at[claim.volume]; node != "" && node != p.node && slices.Contains(p.claims, claim.name) {
			c.w.violated("pod %s is on %s, the volume of its claim %s is on %s", p.name, p.node, claim.name, node)
		}
	}
}

// claimNames are the claims of a pod.
func claimNames(pod *corev1.Pod) (out []string) {
	for _, u := range manifests.ClaimsOf(pod) {
		out = append(out, u.Claim)
	}
	return out
}

// unbound says which claims have no volume; "" is none, as it shall be at the
// end.
func (c *checker) unbound() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for _, claim := range c.bound.claims {
		if c.bound.at[claim.volume] == "" {
			out = append(out, "claim "+claim.name+" has no volume")
		}
	}
	slices.Sort(out)
	return strings.Join(out, "; ")
}

// disks is which machine has the data of a claim, as the machines themselves
// see it: it survives their power.
type disks struct {
	mu sync.Mutex
	at map[string]string // "claim volume": machine
}

// use is a pod that begins to use its claims on a machine.
func (d *disks) use(w *world, machine string, pod *corev1.Pod, src volumes.Source) error {
	for _, u := range manifests.ClaimsOf(pod) {
		v, err := volumes.Bound(pod, u.Claim, src)
		if err != nil {
			return fmt.Errorf("volume %q: %w", u.Volume, err)
		}
		id := string(v.Spec.ClaimRef.UID)
		d.mu.Lock()
		was := d.at[id]
		if was == "" {
			d.at[id] = machine
		}
		d.mu.Unlock()
		if was != "" && was != machine {
			w.violated("pod %s uses claim %s on %s, its data is on %s", pod.Name, u.Claim, machine, was)
		}
	}
	return nil
}
