package scheduler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// refreshFigures is how old the figures in a message may get while its
// reasons stay the same.
const refreshFigures = time.Minute

// writers bounds the status writes in flight, unless Config.Writers does.
const writers = 64

// explain parks the pods that fit nowhere and says why: in the condition
// PodScheduled, written only when it says something new, and in an event.
func (s *Scheduler) explain(ctx context.Context, pods []*waitingPod) {
	now := time.Now()
	var g errgroup.Group
	g.SetLimit(s.cfg.Writers)
	for _, p := range pods {
		s.queue.park(p, now)
		h := &p.rec.Header
		message := p.why.Message
		s.cfg.Events.Event(podRef(h), events.Warning, "FailedScheduling", message)
		if !p.renominated && !p.written.IsZero() && now.Sub(p.written) < refreshFigures && s.saysSame(p, message) {
			continue
		}
		p.renominated = false
		s.say(ctx, &g, p, message, now)
	}
	_ = g.Wait() // never fails: the next try writes again
}

// say writes why a pod waits, in a goroutine of the group.
func (s *Scheduler) say(ctx context.Context, g *errgroup.Group, p *waitingPod, message string, now time.Time) {
	h, node := &p.rec.Header, p.nominated
	p.written, p.said = now, message
	g.Go(func() error {
		if err := s.setScheduled(ctx, h, unschedulable(corev1.PodReasonUnschedulable, message), &node); err != nil && ctx.Err() == nil {
			s.cfg.Log.Debug("condition not written", "pod", h.Key.Namespace+"/"+h.Key.Name, "error", err)
			p.said = "" // g.Wait orders this before whoever reads it
		}
		return nil
	})
}

// saysSame says whether the pod's condition gives these reasons already,
// apart from the figures.
func (s *Scheduler) saysSame(p *waitingPod, message string) bool {
	obj, err := s.cfg.Store.Get(podGK, p.rec.Header.Key.Namespace, p.rec.Header.Key.Name)
	if err != nil {
		return false
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return false
	}
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		if c.Type == corev1.PodScheduled {
			return c.Reason == corev1.PodReasonUnschedulable && plan.WithoutFigures(c.Message) == plan.WithoutFigures(message)
		}
	}
	return false
}

var errNotOurs = errors.New("the pod has a node or is another one")

// markGated says of new gated pods that their gates hold them (KEP-3521).
func (s *Scheduler) markGated(ctx context.Context) {
	list := s.gated
	s.gated = nil
	for _, r := range list {
		err := s.setScheduled(ctx, &r.Header, unschedulable(corev1.PodReasonSchedulingGated, "Scheduling is blocked due to non-empty scheduling gates"), nil)
		if err != nil && ctx.Err() == nil {
			s.cfg.Log.Debug("condition not written", "pod", r.Header.Key.Namespace+"/"+r.Header.Key.Name, "error", err)
		}
	}
}

// markScheduled takes back what explain and markGated said. Pods of which
// nothing was said get PodScheduled=True with their node's first report: one
// write a pod less.
func (s *Scheduler) markScheduled(ctx context.Context, pods []*waitingPod) {
	var g errgroup.Group
	g.SetLimit(s.cfg.Writers)
	for _, p := range pods {
		g.Go(func() error {
			h := &p.rec.Header
			if err := s.setScheduled(ctx, h, corev1.PodCondition{Status: corev1.ConditionTrue}, new(string)); err != nil && ctx.Err() == nil {
				s.cfg.Log.Debug("condition not written", "pod", h.Key.Namespace+"/"+h.Key.Name, "error", err)
			}
			return nil
		})
	}
	_ = g.Wait() // never fails
}

func unschedulable(reason, message string) corev1.PodCondition {
	return corev1.PodCondition{Status: corev1.ConditionFalse, Reason: reason, Message: message}
}

// setScheduled writes the condition PodScheduled, and the nominated node
// unless it is nil. What says it already is not written again.
func (s *Scheduler) setScheduled(ctx context.Context, h *state.Header, want corev1.PodCondition, nominated *string) error {
	want.Type, want.LastTransitionTime = corev1.PodScheduled, metav1.NewTime(s.cfg.Clock.Now()).Rfc3339Copy()
	_, err := s.cfg.Store.Update(ctx, podGK, h.Key.Namespace, h.Key.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		pod, ok := cur.(*corev1.Pod)
		if !ok || string(pod.UID) != h.UID || (pod.Spec.NodeName != "") != (want.Status == corev1.ConditionTrue) {
			return nil, errNotOurs
		}
		if nominated != nil {
			pod.Status.NominatedNodeName = *nominated
		}
		for i := range pod.Status.Conditions {
			c := &pod.Status.Conditions[i]
			if c.Type != corev1.PodScheduled {
				continue
			}
			next := want
			if c.Status == want.Status {
				next.LastTransitionTime = c.LastTransitionTime
			}
			next.ObservedGeneration, next.LastProbeTime = c.ObservedGeneration, c.LastProbeTime
			*c = next
			return pod, nil
		}
		pod.Status.Conditions = append(pod.Status.Conditions, want)
		return pod, nil
	}, registry.WriteOptions{Term: s.cfg.Term})
	if apierrors.IsNotFound(err) || errors.Is(err, errNotOurs) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("write PodScheduled: %w", err)
	}
	return nil
}
