package node

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/node/eviction"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// reasonEvicted is upstream's, for a pod's status and its event.
const reasonEvicted = "Evicted"

// hardGrace is what a pod gets to end under a hard threshold, and evictionWait
// how long one that was told to go is waited for before the next one: what it
// frees shows only once it is gone. The kubelet's figures. releaseWait is how
// long it is waited for after that until its volumes are taken down: one that
// cannot be removed does not stop evictions for ever.
const (
	hardGrace    = time.Second
	evictionWait = 30 * time.Second
	releaseWait  = time.Minute
)

// DiskUser is the optional ability of Volumes to tell what a pod's volumes
// take on the node's disk.
type DiskUser interface {
	DiskUsage(podUID string) (bytes, inodes int64)
}

// leaving is the pod that was told to go last. Machine loop only.
type leaving struct {
	uid string
	at  time.Time
	// ended is when it was first seen to run no more, and released that it was
	// seen to hold nothing any more either; both before the last readings, so
	// that these show what it freed. memory: its volumes take memory.
	ended            time.Time
	released, memory bool
	// said: that no pod's end would help was told since all pressure was over.
	said bool
}

// relieve evicts one pod, if one has to go. Machine loop only.
func (a *Agent) relieve(ctx context.Context, due []eviction.Met) {
	if len(due) == 0 {
		a.leaving.said = a.leaving.said && len(a.pressed) > 0
		return
	}
	now := time.Now()
	for i := range due {
		m := &due[i]
		if a.leaving.awaited(m.Signal, now) {
			return
		}
		ranked := eviction.Rank(m.Signal, a.candidates(ctx, m.Signal))
		if len(ranked) == 0 {
			continue
		}
		p := &ranked[0]
		v := &store.Verdict{Reason: reasonEvicted, Message: m.Message(p)}
		grace := hardGrace
		if m.Soft {
			grace = a.pressures.tracker.MaxPodGrace()
		}
		if seconds := int64(grace / time.Second); seconds > 0 {
			v.Grace = &seconds
		}
		a.mu.RLock()
		info := a.known[p.UID]
		a.mu.RUnlock()
		w := info.worker
		if w == nil {
			continue
		}
		a.leaving = leaving{uid: p.UID, at: now, memory: memoryVolumes(info.assigned), said: a.leaving.said}
		a.log.Warn("pod evicted: the node runs short", "pod", p.Namespace+"/"+p.Name, "uid", p.UID, "signal", m.Signal, "available", m.Available, "threshold", m.Limit)
		w.box.tell(func(b *mailbox) { b.evict = v })
		return
	}
	if !a.leaving.said {
		a.leaving.said = true
		what, _ := shortage(&due[0])
		a.log.Error("the node runs short, and no pod's end would help", "shortage", what, "hint", "what else uses it on this machine?")
		a.nodeEvent(true, "EvictionThresholdMet", what+"; no pod's end would help")
	}
}

// awaited says whether what the pod frees of a signal is still to show. Memory
// is free once its processes are gone, unless it has volumes there; what it
// has on the disk only once its volumes are taken down.
func (l *leaving) awaited(s eviction.Signal, now time.Time) bool {
	switch {
	case l.uid == "" || l.released:
		return false
	case l.ended.IsZero():
		return now.Sub(l.at) < evictionWait
	case onDisk(s), s == eviction.MemoryAvailable && l.memory:
		return now.Sub(l.ended) < releaseWait
	}
	return false
}

// followLeaving notes what became of the pod that was told to go last, before
// readings are taken: those of a moment before would show it still there, and
// cost the next one its place for nothing. Machine loop only.
func (a *Agent) followLeaving(now time.Time) {
	l := &a.leaving
	if l.uid == "" || l.released {
		return
	}
	a.mu.RLock()
	i, ok := a.known[l.uid]
	a.mu.RUnlock()
	over := !ok || i.status != nil && ended(i.status.Phase)
	if over && l.ended.IsZero() {
		l.ended = now
	}
	l.released = over && (!ok || !i.holds)
}

// memoryVolumes says whether what a pod writes into its volumes may take memory.
func memoryVolumes(pod *corev1.Pod) bool {
	return pod != nil && slices.ContainsFunc(pod.Spec.Volumes, func(v corev1.Volume) bool {
		return v.EmptyDir != nil && v.EmptyDir.Medium == corev1.StorageMediumMemory
	})
}

func onDisk(s eviction.Signal) bool { return s == eviction.DiskAvailable || s == eviction.InodesFree }

// candidates are the pods that run here, with what they use. The disk is
// looked at only when it is what is short.
func (a *Agent) candidates(ctx context.Context, s eviction.Signal) []eviction.Pod {
	a.mu.RLock()
	infos := make([]podInfo, 0, len(a.known))
	for _, i := range a.known {
		if i.worker != nil && i.assigned != nil && i.status != nil && !ended(i.status.Phase) && !i.inactive {
			infos = append(infos, i)
		}
	}
	a.mu.RUnlock()
	out := make([]eviction.Pod, 0, len(infos))
	for _, i := range infos {
		pod := i.assigned
		p := eviction.Pod{UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name, Critical: critical(pod) == 1}
		if pod.Spec.Priority != nil {
			p.Priority = *pod.Spec.Priority
		}
		r := manifests.PodRequests(pod)
		p.Request = eviction.Usage{Memory: r.Memory().Value(), Disk: r.StorageEphemeral().Value()}
		for _, c := range a.containerUsage(ctx, i.worker.rt, pod, i.status) {
			p.Usage.Memory += c.Usage.Memory
			p.Usage.PIDs += c.Usage.PIDs
			p.Containers = append(p.Containers, c)
		}
		if onDisk(s) {
			p.Usage.Disk, p.Usage.Inodes = a.diskUsage(pod)
		}
		out = append(out, p)
	}
	return out
}

// containerUsage reads what a pod's running containers use.
func (a *Agent) containerUsage(ctx context.Context, rt workload.Runtime, pod *corev1.Pod, st *corev1.PodStatus) (out []eviction.Container) {
	reader, ok := rt.(workload.StatsReader)
	if !ok {
		return nil
	}
	for _, list := range [][]corev1.ContainerStatus{st.InitContainerStatuses, st.ContainerStatuses} {
		for i := range list {
			if list[i].State.Running == nil {
				continue
			}
			s, err := reader.Stats(ctx, workload.ID{PodUID: string(pod.UID), Container: list[i].Name, Attempt: int(list[i].RestartCount)})
			if err != nil {
				continue // it has just ended
			}
			c := eviction.Container{Name: list[i].Name, CPUNanos: s.CPUNanos, Usage: eviction.Usage{Memory: int64(s.MemoryBytes), PIDs: int64(s.PIDs)}}
			for _, specs := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
				for j := range specs {
					if specs[j].Name == c.Name {
						c.Request.Memory = specs[j].Resources.Requests.Memory().Value()
						c.Request.Disk = specs[j].Resources.Requests.StorageEphemeral().Value()
					}
				}
			}
			out = append(out, c)
		}
	}
	return out
}

// diskUsage is what a pod's volumes and logs take.
func (a *Agent) diskUsage(pod *corev1.Pod) (bytes, inodes int64) {
	if u, ok := a.c.Volumes.(DiskUser); ok {
		bytes, inodes = u.DiskUsage(string(pod.UID))
	}
	_ = filepath.WalkDir(a.podLogs(pod.Namespace, pod.Name, string(pod.UID)), func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // it may go meanwhile
		}
		inodes++
		if info, err := d.Info(); err == nil && d.Type().IsRegular() {
			bytes += info.Size()
		}
		return nil
	})
	return bytes, inodes
}

// underPressure refuses pods that would make a shortage worse, as the kubelet
// does: under memory pressure those that ask for nothing, under any other all.
func underPressure(conds []corev1.NodeConditionType, pod *corev1.Pod) *store.Verdict {
	if len(conds) == 0 || critical(pod) == 1 {
		return nil
	}
	if len(conds) == 1 && conds[0] == corev1.NodeMemoryPressure {
		taint := &corev1.Taint{Key: corev1.TaintNodeMemoryPressure, Effect: corev1.TaintEffectNoSchedule}
		if manifests.QOSClass(pod) != corev1.PodQOSBestEffort || tolerates(pod, taint) {
			return nil
		}
	}
	return &store.Verdict{Reason: reasonEvicted, Message: fmt.Sprintf("The node had condition: %v. ", conds), Rejected: true}
}

func tolerates(pod *corev1.Pod, taint *corev1.Taint) bool {
	for i := range pod.Spec.Tolerations {
		t := &pod.Spec.Tolerations[i]
		if (t.Key == "" && t.Operator == corev1.TolerationOpExists || t.Key == taint.Key) && (t.Effect == "" || t.Effect == taint.Effect) &&
			(t.Operator == corev1.TolerationOpExists || t.Value == taint.Value) {
			return true
		}
	}
	return false
}
