package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// found is an attempt that exists on the machine, as listed at the start.
type found struct {
	state workload.State
	rt    workload.Runtime
}

// boot takes up what an earlier agent left: addresses first, so that none is
// given twice, then one worker for each pod that the database knows, from
// the database alone.
func (a *Agent) boot(ctx context.Context) error {
	a.mu.RLock()
	cidrs := a.asg.PodCIDRs
	a.mu.RUnlock()
	if len(cidrs) > 0 {
		if err := a.c.Network.SetCIDRs(cidrs); err != nil {
			a.log.Error("pod address ranges cannot be used", "cidrs", cidrs, "err", err)
		}
	}
	recs, err := a.c.Store.Pods()
	if err != nil {
		return fmt.Errorf("read pod records: %w", err)
	}
	byUID := make(map[string]*store.Pod, len(recs))
	for i := range recs {
		r := &recs[i]
		byUID[r.UID] = r
		if len(r.Claims) > 0 {
			a.mu.Lock()
			a.volumesIn.pods[r.UID] = r.Claims
			a.mu.Unlock()
		}
		if r.Allocation == nil {
			continue
		}
		if err := a.takeAgain(ctx, r); err != nil {
			a.log.Warn("a pod's address cannot be taken again", "pod", r.Namespace+"/"+r.Name, "err", err)
		}
	}
	a.list(ctx)
	a.keepAddresses(ctx, byUID)
	a.recs = byUID
	wishes, _ := a.wanted()
	for _, wi := range wishes {
		uid := string(wi.pod.UID)
		// Those that are new here are admitted after all that are not.
		if (a.recs[uid] != nil || len(a.found[uid]) > 0) && !a.isGone(uid) {
			a.start(ctx, wi)
		}
	}
	return nil
}

// list reads what runs on the machine.
func (a *Agent) list(ctx context.Context) {
	a.found = map[string][]found{}
	for handler, rt := range a.c.Runtimes {
		states, err := rt.List(ctx)
		if err != nil {
			a.log.Error("running containers cannot be listed; those of known pods are looked up one by one", "runtime", handler, "err", err)
			continue
		}
		for _, s := range states {
			a.found[s.ID.PodUID] = append(a.found[s.ID.PodUID], found{s, rt})
		}
	}
}

// adopt brings a pod's record in line with what exists on the machine. A
// lost record is made anew from it. extra are attempts that no longer count.
func adopt(rec *store.Pod, pod *corev1.Pod, states []found, boot string) (*store.Pod, []found) {
	if len(states) == 0 {
		return rec, nil
	}
	lost := rec == nil
	if lost {
		rec = &store.Pod{Static: isStatic(pod), Volumes: len(pod.Spec.Volumes) > 0}
	}
	var extra []found
	slices.SortFunc(states, func(x, y found) int { return x.state.ID.Attempt - y.state.ID.Attempt })
	for _, f := range states {
		id := f.state.ID
		regular := slices.ContainsFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == id.Container })
		init := slices.ContainsFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == id.Container })
		if !regular && !init {
			extra = append(extra, f)
			continue
		}
		i := slices.IndexFunc(rec.Containers, func(c store.Container) bool { return c.Name == id.Container })
		if i < 0 {
			rec.Containers = append(rec.Containers, store.Container{Name: id.Container})
			i = len(rec.Containers) - 1
		}
		c := &rec.Containers[i]
		switch {
		case id.Attempt < c.Attempt:
			extra = append(extra, f)
		case id.Attempt == c.Attempt && c.Begun:
		default: // a start that the record does not know
			if c.Begun && c.Attempt != id.Attempt {
				extra = append(extra, find(states, id.Container, c.Attempt)...)
			}
			last := c.Exit
			if last == nil {
				last = c.Last
			}
			*c = store.Container{
				Name: id.Container, Attempt: id.Attempt, Begun: true, Boot: boot,
				Last: last, Backoff: c.Backoff, Digest: f.state.Digest,
			}
		}
		if regular {
			rec.Initialized = true
		}
	}
	return rec, extra
}

func find(states []found, container string, attempt int) []found {
	i := slices.IndexFunc(states, func(f found) bool {
		return f.state.ID.Container == container && f.state.ID.Attempt == attempt
	})
	if i < 0 {
		return nil
	}
	return states[i : i+1]
}

// sweep removes what belongs to no pod, once the assignment is known. Main
// loop, once.
func (a *Agent) sweep(ctx context.Context, keep map[string]bool) {
	keep = maps.Clone(keep)
	for uid := range a.workers {
		keep[uid] = true
	}
	for uid, r := range a.recs {
		if keep[uid] || a.isGone(uid) {
			continue // unreadable for now, or on its way out
		}
		keep[uid] = true
		a.log.Info("a pod left the assignment while the agent was away: stopping it", "pod", r.Namespace+"/"+r.Name, "uid", r.UID)
		a.start(ctx, wish{pod: podOfRecord(r)})
		a.workers[r.UID].box.tell(func(m *mailbox) { m.removed = true })
	}
	var orphans []found
	for uid, f := range a.found {
		if keep[uid] && !a.isGone(uid) {
			continue
		}
		delete(a.found, uid)
		for _, o := range f {
			a.log.Warn("orphan: this container belongs to no pod of this node and is stopped",
				"uid", uid, "container", o.state.ID.Container, "attempt", o.state.ID.Attempt, "phase", o.state.Phase)
			a.nodeEvent(true, "OrphanStopped", fmt.Sprintf("container %s of pod %s (%s) belongs to no pod of this node and is stopped",
				o.state.ID.Container, uid, o.state.Phase))
		}
		orphans = append(orphans, f...)
	}
	lost := a.unrecorded(keep, orphans)
	a.group.Go(func() {
		a.discard(ctx, orphans)
		a.endUnrecorded(ctx, lost)
		a.releaseAddresses(ctx, keep)
		a.sweepFolders(ctx, keep)
	})
}

// podOfRecord is enough of a pod to stop it.
func podOfRecord(r *store.Pod) *corev1.Pod {
	pod := &corev1.Pod{}
	if len(r.Object) > 0 && direct.Unmarshal(r.Object, pod) == nil && string(pod.UID) == r.UID {
		return pod
	}
	pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: r.Namespace, Name: r.Name, UID: types.UID(r.UID)}}
	for _, c := range r.Containers {
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: c.Name})
	}
	return pod
}

// discard stops and removes attempts, together.
func (a *Agent) discard(ctx context.Context, list []found) {
	done := make(chan struct{}, len(list))
	for _, f := range list {
		a.group.Go(func() {
			defer func() { done <- struct{}{} }()
			wait := newBackoff(time.Second, time.Minute, a.c.Jitter)
			for {
				err := error(nil)
				if f.state.Phase != workload.Exited {
					err = f.rt.Stop(ctx, f.state.ID, defaultGrace)
				}
				if err = errors.Join(err, f.rt.Remove(ctx, f.state.ID)); err == nil || ctx.Err() != nil {
					return
				}
				a.log.Warn("what is left of a container cannot be removed", "uid", f.state.ID.PodUID, "container", f.state.ID.Container, "err", err)
				if !sleep(ctx, wait.next(), nil) {
					return
				}
			}
		})
	}
	for range list {
		<-done
	}
}

// sweepFolders removes volumes and logs of pods that are not here any more.
func (a *Agent) sweepFolders(ctx context.Context, keep map[string]bool) {
	uids, err := a.c.Volumes.List()
	if err != nil {
		a.log.Warn("volumes cannot be listed", "err", err)
	}
	for _, uid := range uids {
		if keep[uid] || ctx.Err() != nil {
			continue
		}
		if err := a.c.Volumes.Teardown(ctx, uid); err != nil {
			a.log.Warn("volumes of a pod that is gone cannot be removed", "uid", uid, "err", err)
		}
	}
	entries, err := os.ReadDir(a.logs())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		a.log.Warn("logs cannot be listed", "err", err)
	}
	for _, e := range entries {
		f := strings.Split(e.Name(), "_") // as podLogs makes them; nothing else is ours
		if len(f) != 3 || !e.IsDir() || !workload.IsUID(f[2]) || keep[f[2]] || a.isKnown(f[2]) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(a.logs(), e.Name())); err != nil {
			a.log.Warn("logs of a pod that is gone cannot be removed", "folder", e.Name(), "err", err)
		}
	}
}

func (a *Agent) isKnown(uid string) bool {
	a.mu.RLock()
	defer a.mu.RUnlock()
	_, ok := a.known[uid]
	return ok
}
