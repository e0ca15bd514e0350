package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

// removeAgain is how long a volume that could not be removed waits.
const removeAgain = 30 * time.Second

// LocalRemover is the optional ability of Volumes to remove the data of a
// volume whose claim is gone.
type LocalRemover interface {
	RemoveLocal(ctx context.Context, name string) error
}

// Claim implements volumes.ClaimSource.
func (a *Agent) Claim(namespace, name string) (*corev1.PersistentVolumeClaim, bool) {
	c := &corev1.PersistentVolumeClaim{}
	return c, a.object("PersistentVolumeClaim", namespace, name, c)
}

// PersistentVolume implements volumes.ClaimSource.
func (a *Agent) PersistentVolume(name string) (*corev1.PersistentVolume, bool) {
	v := &corev1.PersistentVolume{}
	return v, a.object("PersistentVolume", "", name, v)
}

// inUse are the volumes that pods here use, by pod, and those that are being
// removed: one is never both.
type inUse struct {
	pods     map[string][]string
	removing map[string]bool
}

func newInUse() inUse { return inUse{pods: map[string][]string{}, removing: map[string]bool{}} }

// use notes that a pod uses volumes, unless one of them may not be. alone are
// those of ReadWriteOncePod.
func (u *inUse) use(pod string, names, alone []string) error {
	for _, n := range names {
		if u.removing[n] {
			return fmt.Errorf("volume %s is being removed", n)
		}
		if !slices.Contains(alone, n) {
			continue
		}
		for other, has := range u.pods {
			if other != pod && slices.Contains(has, n) {
				return fmt.Errorf("volume %s is used by another pod of this node (uid %s), and its access mode ReadWriteOncePod allows one", n, other)
			}
		}
	}
	u.pods[pod] = names
	return nil
}

// remove notes that a volume is being removed; false: a pod uses it.
func (u *inUse) remove(name string) bool {
	for _, has := range u.pods {
		if slices.Contains(has, name) {
			return false
		}
	}
	u.removing[name] = true
	return true
}

// takeVolumes resolves the volumes of a pod's claims, and holds them for it.
func (a *Agent) takeVolumes(pod *corev1.Pod) ([]string, error) {
	uses := manifests.ClaimsOf(pod)
	if len(uses) == 0 {
		return nil, nil
	}
	var names, alone []string
	for _, u := range uses {
		v, err := volumes.Bound(pod, u.Claim, a)
		if err != nil {
			return nil, fmt.Errorf("volume %q: %w", u.Volume, err)
		}
		names = append(names, v.Name)
		if slices.Contains(v.Spec.AccessModes, corev1.ReadWriteOncePod) {
			alone = append(alone, v.Name)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return names, a.volumesIn.use(string(pod.UID), names, alone)
}

// dropVolumes lets go of a pod's volumes: nothing of it runs any more.
func (a *Agent) dropVolumes(pod string) {
	a.mu.Lock()
	delete(a.volumesIn.pods, pod)
	a.mu.Unlock()
	signal(a.volumesNews)
}

// volumesOf are the names of the volumes that a pod has, or is about to.
func (a *Agent) volumesOf(s *podState) []string {
	if len(s.rec.Claims) > 0 {
		return s.rec.Claims
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	return a.volumesIn.pods[s.rec.UID]
}

// identityOf is what the uid of a pod's guests is made of, where the pod asks
// for none: the pod, or the volume that outlives it, so that the next pod can
// write what this one wrote.
func (a *Agent) identityOf(s *podState) string {
	if names := a.volumesOf(s); len(names) > 0 {
		return names[0]
	}
	return s.rec.UID
}

// identityFor is who a container runs as.
func (a *Agent) identityFor(s *podState, c *corev1.Container) workload.Identity {
	id := identity(s.pod, c)
	of, ok := a.runtimeOf(s.pod).(Identifier)
	if len(a.volumesOf(s)) == 0 || id.UID != nil || !ok {
		return id
	}
	if uid := int64(of.PodUID(a.identityOf(s))); uid >= 0 {
		id.UID = &uid
		if id.GID == nil {
			id.GID = &uid
		}
	}
	return id
}

// volumeLoop removes the volumes that the assignment says are to go.
func (a *Agent) volumeLoop(ctx context.Context) {
	remover, ok := a.c.Volumes.(LocalRemover)
	if !ok {
		return
	}
	for {
		wait := a.c.Resync
		if !a.removeVolumes(ctx, remover) {
			wait = removeAgain
		}
		if !sleep(ctx, a.c.Jitter(wait), a.volumesNews) {
			return
		}
	}
}

// doomed lists the volumes that this node is told to remove: no claim has
// them any more, and their policy says so.
func (a *Agent) doomed() (out []*corev1.PersistentVolume) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	for _, o := range a.asg.Objects {
		if o.Ref.Kind != "PersistentVolume" {
			continue
		}
		v := &corev1.PersistentVolume{}
		if err := direct.Unmarshal(o.Data, v); err != nil {
			a.log.Error("an assigned volume cannot be decoded and stays", "volume", o.Ref.Name, "err", err)
			continue
		}
		if v.DeletionTimestamp != nil && manifests.DataGoes(v) && manifests.LocalVolumeNode(v) == a.c.NodeName && slices.Contains(v.Finalizers, manifests.FinalizerData) {
			out = append(out, v)
		}
	}
	return out
}

// removeVolumes removes what nobody uses, and reports it; false: something is
// left to do. A volume that a pod uses waits for the pod, whose end is news.
func (a *Agent) removeVolumes(ctx context.Context, remover LocalRemover) bool {
	list, done := a.doomed(), true
	a.mu.Lock()
	for name := range a.volumesIn.removing {
		if !slices.ContainsFunc(list, func(v *corev1.PersistentVolume) bool { return v.Name == name }) {
			delete(a.volumesIn.removing, name)
		}
	}
	a.mu.Unlock()
	for _, v := range list {
		a.mu.Lock()
		free := a.volumesIn.remove(v.Name)
		a.mu.Unlock()
		if !free {
			continue
		}
		if err := remover.RemoveLocal(ctx, v.Name); err != nil {
			done = false
			a.log.Error("a volume's data cannot be removed", "volume", v.Name, "err", err)
			a.reports.event(stamp(a, wire.EventReport{Object: wire.Ref{Kind: "PersistentVolume", Name: v.Name}, UID: string(v.UID),
				Type: corev1.EventTypeWarning, Reason: "VolumeFailedDelete", Message: err.Error(), Component: component}))
			continue
		}
		a.reports.volume(wire.VolumeReport{Name: v.Name, UID: string(v.UID), Removed: true})
	}
	return done
}

// Limited tells, once for each volume and agent, that a volume may grow
// beyond its size; volumes.Config.Limited.
func (a *Agent) Limited(v *corev1.PersistentVolume, err error) {
	a.mu.Lock()
	known := a.unlimited[v.Name]
	if err == nil {
		delete(a.unlimited, v.Name)
	} else if len(a.unlimited) < maxUnlimited {
		a.unlimited[v.Name] = true
	}
	a.mu.Unlock()
	if err == nil || known {
		return
	}
	reason, message := "VolumeNotLimited", "the volume may take more than its size: "+err.Error()
	if !errors.Is(err, volumes.ErrNoQuota) {
		a.log.Error("a volume's size is not limited", "volume", v.Name, "err", err)
	}
	if r := v.Spec.ClaimRef; r != nil {
		a.reports.event(stamp(a, wire.EventReport{Object: wire.Ref{Kind: "PersistentVolumeClaim", Namespace: r.Namespace, Name: r.Name}, UID: string(r.UID),
			Type: corev1.EventTypeWarning, Reason: reason, Message: strings.TrimSpace(message), Component: component}))
	}
}

// maxUnlimited bounds what is remembered of volumes that were complained
// about; beyond it they are again.
const maxUnlimited = 1024
