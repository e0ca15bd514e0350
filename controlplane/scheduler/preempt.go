package scheduler

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

var budgetGK = schema.GroupKind{Group: policyv1.GroupName, Kind: "PodDisruptionBudget"}

// preempted is a victim and who it makes room for.
type preempted struct {
	victim *plan.Pod
	by     *waitingPod
	node   string
}

// preempt looks for room for the pods of a group that fit nowhere: it
// nominates a node for each that a preemption helps, and returns the victims
// that are to be deleted. Nobody is preempted in vain: with its victims gone
// the pod fits.
func (s *Scheduler) preempt(group *podGroup, rest []*waitingPod) (victims []preempted) {
	class := rest[0].class
	switch {
	case class.never:
		note(rest, "not eligible due to preemptionPolicy=Never.")
		return nil
	case !s.rank(class.priority): // nobody is less important: not worth a word
		for _, p := range rest { // else two that wait for one room keep each other out of it
			s.unnominate(p)
		}
		return nil
	}
	if node := rest[0].nominated; node != "" && s.waitsFor(group, node, class.priority) {
		note(rest, "waits for pods to end on its nominated node "+node+".")
		return nil
	}
	budgets := s.budgets()
	search := plan.NewPreemption(s.cache.nodes, &group.Group, class.priority, budgets)
	for i, p := range rest {
		c, ok := search.Next()
		if !ok {
			n := s.cache.nodes.Len()
			note(rest[i:], fmt.Sprintf("0/%d nodes are available: %d Preemption is not helpful for scheduling.", n, n))
			for _, p := range rest[i:] {
				s.unnominate(p)
			}
			return victims
		}
		node := s.cache.nodes.At(c.Slot).Name
		for _, v := range c.Victims {
			v.Doomed = true
			plan.Spend(budgets, v)
			victims = append(victims, preempted{v, p, node})
		}
		s.displace(node, class.priority)
		s.nominate(p, node)
		if group.Terms != nil {
			group.Ghosts = s.ghosts.list() // the next of the group sees it, too
		}
		note([]*waitingPod{p}, fmt.Sprintf("waits for pods to end on its nominated node %s, %d of them preempted.", node, len(c.Victims)))
	}
	return victims
}

// note adds to the pods' reasons what a preemption can do for them.
func note(pods []*waitingPod, text string) {
	for _, p := range pods {
		p.note = " preemption: " + text
		p.why.Message += p.note
	}
}

// displace takes the nominations of less important pods to a node back: they
// look for another.
func (s *Scheduler) displace(node string, priority int32) {
	for uid, x := range s.ghosts.byUID {
		if x.node == node && x.priority < priority {
			if q := s.queue.pods[uid]; q != nil {
				s.unnominate(q)
				s.queue.wake(q)
			}
		}
	}
}

// nominate reserves a node's room for the pod.
func (s *Scheduler) nominate(p *waitingPod, node string) {
	h := &p.rec.Header
	x := &ghost{pod: newPlaced(h, node).Pod, node: node, priority: p.class.priority}
	x.pod.Terms = p.class.terms
	s.ghosts.set(x)
	s.ghosts.level(p.class.priority, "")
	p.nominated, p.renominated = node, true
}

func (s *Scheduler) unnominate(p *waitingPod) {
	if x := s.ghosts.byUID[p.rec.Header.UID]; x != nil {
		s.ghosts.remove(p.rec.Header.UID)
		s.freed = append(s.freed, x.node)
	}
	if p.nominated != "" {
		p.nominated, p.renominated = "", true
	}
}

// observe takes in what the API says of a waiting pod's nominated node.
func (s *Scheduler) observe(p *waitingPod) {
	node := s.nominatedNode(p.rec)
	x := s.ghosts.byUID[p.rec.Header.UID]
	switch {
	case x != nil && x.node == node:
		x.seen = true
	case x != nil && !x.seen: // our own write is on its way
	case node != "":
		s.nominate(p, node)
		s.ghosts.byUID[p.rec.Header.UID].seen = true
		p.renominated = false
	case x != nil:
		s.unnominate(p)
		p.renominated = false
	}
}

func (s *Scheduler) nominatedNode(r *state.Record) string {
	if r.Status == nil || !bytes.Contains(r.Status.Data, []byte("nominatedNodeName")) {
		return ""
	}
	obj, err := s.cfg.Store.Decode(r)
	pod, ok := obj.(*corev1.Pod)
	if err != nil || !ok {
		return ""
	}
	return pod.Status.NominatedNodeName
}

// waitsFor says whether pods that are less important are about to go from
// the pod's nominated node, which could still take it.
func (s *Scheduler) waitsFor(group *podGroup, node string, priority int32) bool {
	slot, ok := s.cache.nodes.Slot(node)
	if !ok || !group.Shape.Allows(s.cache.nodes.At(slot)) {
		return false
	}
	return slices.ContainsFunc(s.cache.nodes.Pods(slot), func(q *plan.Pod) bool {
		return (q.Doomed || q.Terminating) && q.Rank != nil && q.Rank.Priority < priority
	})
}

// rank reads the importance of all placed pods that a preemption has not
// looked at, and says whether any is less important than the priority.
func (s *Scheduler) rank(priority int32) bool {
	c := s.cache
	if len(c.unranked) > 0 {
		snap := s.reader.Snapshot()
		for uid, p := range c.unranked {
			r, ok := snap.Get(state.Key{Kind: podGK.String(), Namespace: p.Namespace, Name: p.Name})
			if !ok || r.Header.UID != uid {
				continue // its end is on its way
			}
			class, err := s.classes.of(r)
			if err != nil {
				s.cfg.Log.Error("a placed pod is left out of preemption", "pod", p.Namespace+"/"+p.Name, "error", err)
				continue
			}
			c.ranked(p, &plan.Rank{Priority: class.priority, Since: r.Header.Created})
		}
	}
	return c.above(priority)
}

// budgets reads the disruption budgets, once a step.
func (s *Scheduler) budgets() []*plan.Budget {
	if s.budgetsRead {
		return s.budgetList
	}
	s.budgetsRead, s.budgetList = true, nil
	list, err := s.cfg.Store.List(budgetGK, "", labels.Everything(), nil)
	if err != nil {
		s.cfg.Log.Error("disruption budgets cannot be read", "error", err)
		return nil
	}
	for _, obj := range list {
		b, ok := obj.(*policyv1.PodDisruptionBudget)
		if !ok {
			continue
		}
		selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
		if err != nil {
			continue // it selects nothing
		}
		x := &plan.Budget{Namespace: b.Namespace, Selector: selector, Allowed: b.Status.DisruptionsAllowed, Disrupted: map[string]bool{}}
		for name := range b.Status.DisruptedPods {
			x.Disrupted[name] = true
		}
		s.budgetList = append(s.budgetList, x)
	}
	return s.budgetList
}

// evict deletes the victims, each with its own grace period, after saying on
// them why. A victim that cannot be deleted is none, and who waits for it
// tries again.
func (s *Scheduler) evict(ctx context.Context, victims []preempted) {
	var g errgroup.Group
	g.SetLimit(s.cfg.Writers)
	failed := make([]bool, len(victims))
	for i, v := range victims {
		g.Go(func() error {
			if err := s.evictOne(ctx, v); err != nil && ctx.Err() == nil {
				failed[i] = true
				s.cfg.Log.Warn("victim not preempted", "pod", v.victim.Namespace+"/"+v.victim.Name, "for", v.by.rec.Header.Key.Namespace+"/"+v.by.rec.Header.Key.Name, "error", err)
			}
			return nil
		})
	}
	_ = g.Wait() // never fails
	for i, v := range victims {
		if failed[i] {
			v.victim.Doomed = false
			s.unnominate(v.by)
			v.by.again = true
		}
	}
}

func (s *Scheduler) evictOne(ctx context.Context, v preempted) error {
	uid := types.UID(v.victim.UID)
	_, err := s.cfg.Store.Update(ctx, podGK, v.victim.Namespace, v.victim.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		pod, ok := cur.(*corev1.Pod)
		if !ok || pod.UID != uid {
			return nil, errNotOurs
		}
		lost.SetCondition(&pod.Status, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: corev1.PodReasonPreemptionByScheduler,
			Message: v.by.class.profile.SchedulerName + ": preempting to accommodate a higher priority pod"}, s.cfg.Clock.Now())
		return pod, nil
	}, registry.WriteOptions{Term: s.cfg.Term})
	if err == nil {
		_, _, err = s.cfg.Store.Delete(ctx, podGK, v.victim.Namespace, v.victim.Name, registry.DeleteOptions{UID: &uid, Term: s.cfg.Term})
	}
	if apierrors.IsNotFound(err) || errors.Is(err, errNotOurs) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("preempt: %w", err)
	}
	s.cfg.Events.Event(corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: v.victim.Namespace, Name: v.victim.Name, UID: uid},
		events.Normal, "Preempted", fmt.Sprintf("Preempted by pod %s on node %s", v.by.rec.Header.UID, v.node))
	return nil
}
