package node

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/node/store"
)

// Annotations of static pods and their mirrors, upstream's names.
const (
	ConfigMirrorAnnotation = "kubernetes.io/config.mirror"
	ConfigSourceAnnotation = "kubernetes.io/config.source"
	ConfigHashAnnotation   = "kubernetes.io/config.hash"
)

// isStatic says whether a pod comes from this node's own folder.
func isStatic(pod *corev1.Pod) bool { return pod.Annotations[ConfigSourceAnnotation] == "file" }

// wish is one pod that this node shall have, as it was read from one
// assignment. Pod and version travel together: the pull loop may bring the
// next assignment at any moment, and a pod that is noted under a version that
// it does not have would never be looked at again.
type wish struct {
	pod     *corev1.Pod
	version uint64 // resourceVersion in the assignment; 0 for static pods
}

// wanted lists the pods that this node shall have, oldest first, and the
// uids of those whose objects cannot be read: they stay as they are.
func (a *Agent) wanted() (out []wish, unreadable map[string]bool) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	for _, pod := range a.statics {
		out = append(out, wish{pod: pod})
	}
	unreadable = map[string]bool{}
	for _, o := range a.asg.Objects {
		if o.Ref.Kind != "Pod" {
			continue
		}
		// A worker that has this version needs no decoding again.
		if i, ok := a.known[o.UID]; ok && i.worker != nil && i.version == o.ResourceVersion && i.assigned != nil {
			out = append(out, wish{i.assigned, i.version})
			continue
		}
		pod := &corev1.Pod{}
		if err := direct.Unmarshal(o.Data, pod); err != nil {
			a.log.Error("an assigned pod cannot be decoded", "namespace", o.Ref.Namespace, "name", o.Ref.Name, "err", err)
			unreadable[o.UID] = true
			continue
		}
		if _, mirror := pod.Annotations[ConfigMirrorAnnotation]; mirror {
			continue
		}
		if isStatic(pod) { // only files of this node are
			pod.Annotations[ConfigSourceAnnotation] = "api"
		}
		out = append(out, wish{pod, o.ResourceVersion})
	}
	slices.SortStableFunc(out, func(l, r wish) int {
		x, y := l.pod, r.pod
		if c := critical(y) - critical(x); c != 0 {
			return c
		}
		if c := x.CreationTimestamp.Compare(y.CreationTimestamp.Time); c != 0 {
			return c
		}
		if x.UID < y.UID {
			return -1
		}
		return 1
	})
	return out, unreadable
}

// critical pods are admitted first, as upstream.
func critical(pod *corev1.Pod) int {
	const systemCritical = 2_000_000_000
	if isStatic(pod) || pod.Spec.Priority != nil && *pod.Spec.Priority >= systemCritical {
		return 1
	}
	return 0
}

// reconcile makes workers match what is wanted. Main loop only.
func (a *Agent) reconcile(ctx context.Context) {
	known := a.assignmentKnown()
	wishes, want := a.wanted()
	a.match(ctx, wishes, want, known)
}

func (a *Agent) match(ctx context.Context, wishes []wish, want map[string]bool, known bool) {
	a.expireTombstones(wishes, known)
	for _, wi := range wishes {
		pod, uid := wi.pod, string(wi.pod.UID)
		if _, stray := a.strays[uid]; stray && !isStatic(pod) {
			continue
		}
		want[uid] = true
		if w := a.workers[uid]; w != nil {
			a.setBack(w, a.heldBack(pod, w))
			a.hand(w, wi)
			continue
		}
		// An edited file's new pod waits until the old one has left.
		if !a.isGone(uid) && (!isStatic(pod) || !a.nameTaken(pod)) {
			a.start(ctx, wi)
		}
	}
	for uid, w := range a.workers {
		// Not knowing the assignment is no reason to stop anything.
		if want[uid] || !known && !isStatic(w.first) {
			continue
		}
		w.box.tell(func(m *mailbox) { m.removed = true })
	}
	if known && !a.swept {
		a.swept = true
		a.sweep(ctx, want)
	}
}

func (a *Agent) nameTaken(pod *corev1.Pod) bool {
	for _, w := range a.workers {
		if w.first.Namespace == pod.Namespace && w.first.Name == pod.Name && w.first.UID != pod.UID {
			return true
		}
	}
	return false
}

// setBack tells a worker whether its pod is held back.
func (a *Agent) setBack(w *worker, back *failure) {
	if w.back == (back != nil) {
		return
	}
	w.back = back != nil
	a.mu.Lock()
	if i, ok := a.known[w.uid]; ok {
		i.inactive = w.back || w.mute
		a.known[w.uid] = i
	}
	a.mu.Unlock()
	w.box.tell(func(m *mailbox) { m.back = &back })
}

// hand gives a worker its pod's newest object, if it is new.
func (a *Agent) hand(w *worker, wi wish) {
	pod := wi.pod
	a.mu.Lock()
	i, ok := a.known[w.uid]
	if !ok { // the worker has ended; the main loop is about to hear of it
		a.mu.Unlock()
		return
	}
	fresh := i.assigned != pod
	i.assigned, i.version = pod, wi.version
	a.known[w.uid] = i
	refs := w.refs != a.refsSerial
	w.refs = a.refsSerial
	a.mu.Unlock()
	if fresh || refs {
		w.box.tell(func(m *mailbox) {
			if fresh {
				m.pod = pod
			}
			m.refs = m.refs || refs
		})
	}
}

// start starts the pod's worker from what is known of it here; a pod that is
// new is admitted first.
func (a *Agent) start(ctx context.Context, wi wish) {
	pod, uid := wi.pod, string(wi.pod.UID)
	rec, states := a.recs[uid], a.found[uid]
	delete(a.recs, uid)
	delete(a.found, uid)
	lost := rec == nil && len(states) > 0
	rec, extra := adopt(rec, pod, states, a.c.MachineBoot)
	if lost {
		if al := a.addressOf(uid); al != nil {
			allocate(rec, al)
		}
	}
	if len(extra) > 0 {
		a.group.Go(func() { a.discard(ctx, extra) })
	}
	w := a.newWorker(pod, rec)
	if len(states) > 0 {
		w.rt = states[0].rt // what runs decides, whatever the class says now
	}
	w.first = pod
	w.mute = rec == nil && ended(pod.Status.Phase)
	back := a.heldBack(pod, nil)
	w.back, w.state.back = back != nil, back
	if rec == nil && !w.mute && !w.back {
		if v := a.admit(pod); v != nil {
			w.state.rec.Verdict = v
			w.event(note{warning: true, reason: v.Reason, message: v.Message})
		}
	}
	w.state.rec.Static = isStatic(pod) || rec != nil && rec.Static
	w.closing = ctx.Done()
	if rec == nil && !w.mute {
		w.born = time.Now()
	}
	a.workers[w.uid] = w
	a.mu.Lock()
	s := &w.state
	a.known[w.uid] = podInfo{
		worker: w, pod: pod, assigned: pod, version: wi.version,
		inactive: w.mute || w.back || s.rec.Verdict != nil || s.rec.Finished,
	}
	w.refs = a.refsSerial
	a.mu.Unlock()
	a.group.Go(func() {
		w.run(ctx)
		a.mu.Lock()
		delete(a.known, w.uid)
		a.mu.Unlock()
		select {
		case a.finished <- w.uid:
		case <-ctx.Done():
		}
	})
}

// noteUnknown stops pods that the cluster says it does not have, until an
// assignment newer than that says otherwise.
func (a *Agent) noteUnknown(said unknownPods) {
	for _, uid := range said.uids {
		w := a.workers[uid]
		switch {
		case w == nil:
		case isStatic(w.first):
			a.reports.resend(uid)
		case said.epoch > a.Epoch() || a.heldAs(uid) == store.HoldPod: // the assignment of that epoch decides, or has decided
		default:
			a.strays[uid] = a.Generation()
			w.log.Warn("the cluster does not know this pod any more: stopping it")
		}
	}
}

// expireTombstones forgets what is acknowledged and no longer assigned.
func (a *Agent) expireTombstones(pods []wish, known bool) {
	generation := a.Generation()
	for uid, g := range a.strays {
		if g != generation {
			delete(a.strays, uid)
		}
	}
	a.goneMu.Lock()
	var drop []store.Gone
	for _, g := range a.gones {
		assigned := slices.ContainsFunc(pods, func(w wish) bool { return string(w.pod.UID) == g.UID })
		if g.Acked && known && !assigned {
			drop = append(drop, g)
		}
	}
	a.goneMu.Unlock()
	for _, g := range drop {
		if err := a.c.Store.DeleteGone(g.UID); err != nil {
			a.log.Warn("tombstone cannot be removed", "uid", g.UID, "err", err)
			continue
		}
		a.goneMu.Lock()
		delete(a.gones, g.UID)
		a.goneMu.Unlock()
	}
}

func (a *Agent) mirrorOf(pod *corev1.Pod) []byte {
	if !isStatic(pod) {
		return nil
	}
	m := pod.DeepCopy()
	m.APIVersion, m.Kind = "v1", "Pod"
	m.Annotations[ConfigMirrorAnnotation] = string(pod.UID)
	m.Status = corev1.PodStatus{}
	b, err := direct.Marshal(m)
	if err != nil {
		a.log.Error("mirror pod cannot be encoded", "pod", pod.Namespace+"/"+pod.Name, "err", err)
		return nil
	}
	return b
}
