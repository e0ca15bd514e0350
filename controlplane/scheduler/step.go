package scheduler

import (
	"context"
	"errors"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// batch is what one step decided.
type batch struct {
	binds   []registry.PodBinding
	bound   []*waitingPod // of binds
	failed  []*waitingPod
	victims []preempted
}

// Step decides one batch and binds it.
func (s *Scheduler) Step(ctx context.Context) error {
	start := time.Now()
	var b batch
	s.budgetsRead = false
	for _, group := range s.group(s.queue.take(s.cfg.Batch)) {
		s.decide(group, &b)
	}
	decided := time.Since(start)
	start = time.Now()
	s.choose(ctx, &b)
	conflicts, err := s.bind(ctx, b.binds, b.bound)
	if err != nil {
		return err
	}
	s.cfg.Metrics.observe(decided, time.Since(start), len(b.binds)-conflicts, conflicts, len(b.failed), len(b.victims))
	s.evict(ctx, b.victims)
	s.explain(ctx, b.failed)
	s.tell(b.bound)
	return ctx.Err()
}

// tell wakes the parked pods that what a step did could help: those of the
// step itself are parked by now.
func (s *Scheduler) tell(bound []*waitingPod) {
	for _, node := range s.freed {
		s.roomOn(node)
	}
	s.freed = s.freed[:0]
	if len(s.queue.sets) == 0 {
		return
	}
	for _, p := range bound {
		if q := s.cache.placed[p.rec.Header.UID]; q != nil {
			s.podMoved(&q.Pod, true) // somebody's affinity may be satisfied now
		}
	}
}

// decide places a group, and looks for victims for what of it fits nowhere.
func (s *Scheduler) decide(group *podGroup, b *batch) {
	first := group.pods[0]
	if len(first.class.claims) > 0 && !s.refreshClaims(group) {
		return
	}
	s.ghosts.level(first.class.priority, "")
	if first.nominated != "" { // then it is alone
		s.ghosts.level(first.class.priority, first.rec.Header.UID)
		if slot, ok := s.cache.nodes.Slot(first.nominated); ok {
			group.Wish = slot + 1
		}
	}
	if group.Terms != nil || s.ghosts.terms > 0 {
		group.Ghosts = s.ghosts.list()
	}
	slots := plan.Place(s.cache.nodes, &group.Group)
	for i, slot := range slots {
		p := group.pods[i]
		node := s.cache.nodes.At(slot)
		h := &p.rec.Header
		b.binds = append(b.binds, registry.PodBinding{Namespace: h.Key.Namespace, Name: h.Key.Name, PodUID: types.UID(h.UID),
			Node: node.Name, NodeUID: types.UID(node.UID)})
		b.bound = append(b.bound, p)
		assumed := newPlaced(h, node.Name)
		assumed.Terms, assumed.Rank = group.Terms.Others(), &plan.Rank{Priority: p.class.priority, Since: h.Created}
		s.ghosts.remove(h.UID)
		s.cache.put(assumed)
		if len(p.class.claims) > 0 {
			s.claims.use(h.UID, node.Name, p.class.claims)
			for _, c := range p.class.pending {
				s.claims.chosen[c.uid] = node.Name
			}
		}
	}
	rest := group.pods[len(slots):]
	if len(rest) == 0 {
		return
	}
	why := s.whyNot(&group.Group, first.class)
	for _, p := range rest {
		p.why, p.note = why, ""
	}
	b.victims = append(b.victims, s.preempt(group, rest)...)
	b.failed = append(b.failed, rest...)
	group.pods = nil // who waits keeps its group, not all of the batch
}

// refreshClaims looks at a pod's claims again: what was decided before it in
// this step may concern them. False: it cannot be decided now.
func (s *Scheduler) refreshClaims(group *podGroup) bool {
	p := group.pods[0] // alone: no two pods share such a class
	c, err := s.classOf(p.rec)
	if err != nil {
		s.cfg.Log.Error("a pod's claims cannot be read", "pod", p.rec.Header.Key.Namespace+"/"+p.rec.Header.Key.Name, "error", err)
		s.queue.retry(p, time.Now())
		return false
	}
	p.class, group.Shape, group.id.shape = c, c.shape, c.shape
	return true
}

// bind commits the assumed placements. Lost races are forgotten and queued
// again.
func (s *Scheduler) bind(ctx context.Context, binds []registry.PodBinding, pods []*waitingPod) (conflicts int, err error) {
	if len(binds) == 0 {
		return 0, nil
	}
	results, err := s.cfg.Store.Bind(ctx, binds, s.cfg.Term)
	if err != nil || len(results) != len(binds) {
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		s.cfg.Log.Warn("bindings not committed, reading again", "pods", len(binds), "error", err)
		return 0, errors.Join(errUnsure, sleep(ctx, time.Duration((0.5+s.random())*float64(200*time.Millisecond))))
	}
	now := time.Now()
	var told []*waitingPod
	for i, p := range pods {
		h := &p.rec.Header
		if results[i] == nil {
			s.queue.remove(h.UID, true)
			if !p.written.IsZero() || p.nominated != "" || s.classes.scheduledCondition(p.rec) {
				told = append(told, p)
			}
			s.cfg.Events.Event(podRef(h), events.Normal, "Scheduled",
				"Successfully assigned "+h.Key.Namespace+"/"+h.Key.Name+" to "+binds[i].Node)
			continue
		}
		conflicts++
		s.cache.drop(h.UID)
		s.freed = append(s.freed, binds[i].Node)
		if apierrors.IsNotFound(results[i]) {
			s.queue.remove(h.UID, false)
			s.reclass(s.claims.forget(h.UID)...)
			continue
		}
		if len(p.class.claims) > 0 {
			s.claims.wait(h.UID, p.class.claims)
		}
		s.cfg.Log.Debug("binding lost a race", "pod", h.Key.Namespace+"/"+h.Key.Name, "node", binds[i].Node, "error", results[i])
		s.queue.retry(p, now)
	}
	s.markScheduled(ctx, told)
	return conflicts, nil
}

func (s *Scheduler) random() float64 {
	if s.cfg.Rand == nil {
		return 0.5
	}
	return s.cfg.Rand()
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

func podRef(h *state.Header) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: h.Key.Namespace, Name: h.Key.Name, UID: types.UID(h.UID)}
}
