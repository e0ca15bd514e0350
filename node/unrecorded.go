package node

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Cgroups are the control groups below this agent's own; paths are relative.
type Cgroups interface {
	// Inside are the groups right below p in which something runs, by name.
	Inside(p string) []string
	// Busy says whether something runs in a group or below it.
	Busy(p string) bool
	// End kills everything in a group and waits until nothing is left there.
	End(ctx context.Context, p string) error
	// Prune removes a group.
	Prune(p string) error
}

// podGroups is where the control groups of pods are: podGroups/QOS/UID.
const podGroups = "pods"

// unrecorded are the control groups of pods that are not this node's any more
// and of which no runtime knows anything, since their run folder was lost.
func (a *Agent) unrecorded(keep map[string]bool, orphans []found) (groups []string) {
	if a.c.Cgroups == nil {
		return nil
	}
	for _, qos := range a.c.Cgroups.Inside(podGroups) {
		for _, uid := range a.c.Cgroups.Inside(path.Join(podGroups, qos)) {
			if keep[uid] || a.isGone(uid) || !workload.IsUID(uid) ||
				slices.ContainsFunc(orphans, func(f found) bool { return f.state.ID.PodUID == uid }) {
				continue
			}
			groups = append(groups, path.Join(podGroups, qos, uid))
		}
	}
	return groups
}

// endLeft ends what still runs in a pod's control group once its containers are
// gone: guests of which the run folder was lost while the database knew them.
func (a *Agent) endLeft(ctx context.Context, uid string) error {
	if a.c.Cgroups == nil || !workload.IsUID(uid) {
		return nil
	}
	for _, qos := range []corev1.PodQOSClass{corev1.PodQOSGuaranteed, corev1.PodQOSBurstable, corev1.PodQOSBestEffort} {
		g := path.Join(podGroups, qosFolder(qos), uid)
		if !a.c.Cgroups.Busy(g) {
			continue
		}
		a.log.Warn("processes that a pod left behind, and of which the run folder knows nothing, are ended", "cgroup", g)
		ctx, cancel := context.WithTimeout(ctx, endTimeout)
		err := errors.Join(a.c.Cgroups.End(ctx, g), a.c.Cgroups.Prune(g))
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// endTimeout bounds the end of processes that wait for a disk.
const endTimeout = time.Minute

func (a *Agent) endUnrecorded(ctx context.Context, groups []string) {
	for _, g := range groups {
		a.log.Warn("processes of a pod that nothing here knows are ended", "cgroup", g)
		a.nodeEvent(true, "OrphanStopped", fmt.Sprintf("processes of pod %s, which is no pod of this node and of which the run folder knows nothing, are ended", path.Base(g)))
		ctx, cancel := context.WithTimeout(ctx, endTimeout)
		if err := errors.Join(a.c.Cgroups.End(ctx, g), a.c.Cgroups.Prune(g)); err != nil {
			a.log.Error("processes of a pod that nothing here knows cannot be ended; the next start of the agent tries again", "cgroup", g, "err", err)
		}
		cancel()
	}
}
