// Package lost knows the mark of a pod whose node cannot be reached: what it
// looks like, and how it comes and goes.
//
// A deletion timestamp can never be taken back, so a pod on an unreachable
// node is not deleted but marked: our controllers do not count it, services
// do not use it, and when the node is back the mark goes and the surplus is
// removed by the ordinary ranking.
package lost

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// SinceAnnotation holds the RFC 3339 time of the mark.
	SinceAnnotation = "dunlin.dev/lost-since"
	// ReturnedAnnotation holds the RFC 3339 time at which the mark went: such
	// a pod is kept rather than its replacement, if it is ready.
	ReturnedAnnotation = "dunlin.dev/returned"
	// Reason of the DisruptionTarget condition.
	Reason = "NodeUnreachable"
)

// Is says whether the pod carries the mark.
func Is(p *corev1.Pod) bool {
	for i := range p.Status.Conditions {
		c := &p.Status.Conditions[i]
		if c.Type == corev1.DisruptionTarget {
			return c.Status == corev1.ConditionTrue && c.Reason == Reason
		}
	}
	return false
}

// SetStatus marks a status: DisruptionTarget and not Ready.
func SetStatus(s *corev1.PodStatus, node string, now time.Time) {
	SetCondition(s, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: Reason,
		Message: "Node " + node + " does not renew its lease; whether the pod still runs is not known"}, now)
	SetNotReady(s, node, now)
}

// SetNotReady makes the pod not Ready because its node is silent.
func SetNotReady(s *corev1.PodStatus, node string, now time.Time) {
	SetCondition(s, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: Reason,
		Message: "Node " + node + " does not renew its lease"}, now)
}

// ClearStatus takes the mark away. Ready becomes what the node last said of
// the containers.
func ClearStatus(s *corev1.PodStatus, now time.Time) {
	kept := s.Conditions[:0]
	ready := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionFalse}
	ours := false
	for _, c := range s.Conditions {
		switch {
		case c.Type == corev1.DisruptionTarget && c.Reason == Reason:
			continue
		case c.Type == corev1.PodReady && c.Reason == Reason:
			ours = true
		case c.Type == corev1.ContainersReady:
			ready.Status, ready.Reason, ready.Message = c.Status, c.Reason, c.Message
		}
		kept = append(kept, c)
	}
	s.Conditions = kept
	if ours {
		SetCondition(s, ready, now)
	}
}

// SetCondition merges a condition by type; the transition time moves only
// with the status. It reports whether anything changed.
func SetCondition(s *corev1.PodStatus, c corev1.PodCondition, now time.Time) bool {
	c.LastTransitionTime = metav1.NewTime(now).Rfc3339Copy()
	for i := range s.Conditions {
		old := &s.Conditions[i]
		if old.Type != c.Type {
			continue
		}
		if old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		c.LastProbeTime, c.ObservedGeneration = old.LastProbeTime, old.ObservedGeneration
		changed := *old != c
		*old = c
		return changed
	}
	s.Conditions = append(s.Conditions, c)
	return true
}
