// Package lost knows the mark of a pod whose node cannot be reached: what it
// looks like, and how it comes and goes.
//
// A deletion timestamp can never be taken back, so a pod on an unreachable
// node is not deleted but marked: our controllers do not count it, services
// do not use it, and when the node is back the mark goes and the surplus is
// removed by the ordinary ranking.
package lost

import (
	"bytes"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/state"

	"github.com/dunlin-project/dunlin/manifests"
)

const (
	// SinceAnnotation holds the RFC 3339 time of the mark.
	SinceAnnotation = manifests.AnnotationLostSince
	// ReturnedAnnotation holds from when to when the pod had the mark: two RFC
	// 3339 times with a slash between (an interval of ISO 8601).
	ReturnedAnnotation = manifests.AnnotationReturned
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

// MayBe says whether the record's pod could carry the mark, without decoding
// it: the annotation's name stands in its metadata's bytes.
func MayBe(r *state.Record) bool {
	return r.Meta != nil && bytes.Contains(r.Meta.Data, []byte(SinceAnnotation))
}

// StopsAfter is how long after its node was last heard of a pod has surely
// stopped by itself: its own deadline (manifests.AnnotationStopDeadline),
// its grace period, and a margin of 5 s and 1 % for clocks that run unevenly.
// finite is false if it has no deadline and runs on for ever.
func StopsAfter(p *corev1.Pod) (d time.Duration, finite bool) {
	s, err := manifests.StopDeadline(p)
	if err != nil || s == 0 {
		return 0, false // the node refuses to run such a pod
	}
	grace := int64(corev1.DefaultTerminationGracePeriodSeconds)
	if g := p.Spec.TerminationGracePeriodSeconds; g != nil {
		grace = *g
	}
	return s + s/100 + time.Duration(grace)*time.Second + 5*time.Second, true
}

// Keep says what the pod's return means where it or its replacement has to
// go: above 0 it is kept rather, below 0 it goes first, as soon as others stand
// in for it; 0 it is ranked as any other, as is a pod that was never away.
func Keep(p *corev1.Pod) int {
	// Counted though it still has the mark: its node has reported it ready, and
	// the mark is about to go.
	if _, returned := p.Annotations[ReturnedAnnotation]; !returned && !Is(p) {
		return 0
	}
	switch manifests.Returns(p, manifests.KeepOriginal) {
	case manifests.KeepReplacement:
		return -1
	case manifests.KeepBetter:
		return 0
	}
	return 1
}

// Away is from when to when the pod was away last; ok is false for one that
// never was. Who is still marked is away until now. The times are those of the
// servers' clocks, to the second.
func Away(p *corev1.Pod, now time.Time) (from, to time.Time, ok bool) {
	if v, marked := p.Annotations[SinceAnnotation]; marked {
		from, err := time.Parse(time.RFC3339, v)
		return from, now, err == nil
	}
	a, b, _ := strings.Cut(p.Annotations[ReturnedAnnotation], "/")
	from, err := time.Parse(time.RFC3339, a)
	if err != nil {
		return from, to, false
	}
	to, err = time.Parse(time.RFC3339, b)
	return from, to, err == nil
}

// ReplacedAfter is how long after its node was given up a pod becomes lost,
// and so is replaced: what it says, or the default of its controller's kind.
// never is that it is waited for. Who has no controller that could replace it,
// or only in its own place, is always waited for.
func ReplacedAfter(p *corev1.Pod, ownerKind string) (d time.Duration, never bool) {
	switch ownerKind {
	case "ReplicaSet.apps", "ReplicationController":
	case "Job.batch":
		d = 5 * time.Minute
	default:
		return 0, true
	}
	if own, never, set := manifests.ReplaceAfter(p); set {
		return own, never
	}
	return d, false
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
