package nodelifecycle

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ConditionHeld is the condition of a silent Node whose pods are not moved,
// though they would be if it were alone; its reason says why.
const ConditionHeld corev1.NodeConditionType = "EvictionHeld"

// Reasons of ConditionHeld.
const (
	reasonFrozen    = "ZoneFrozen"
	reasonReturning = "ZoneReturning"
	reasonLimited   = "RateLimited"
	reasonNotHeld   = "NotHeld"
)

// held says why a node's pods are not moved; status False is that nothing
// holds them. The text does not count, so that it is written once. Pure.
func held(v verdict, zone string, every time.Duration) (c corev1.NodeCondition) {
	c = corev1.NodeCondition{Type: ConditionHeld, Status: corev1.ConditionTrue}
	switch {
	case v.silent && v.frozen && v.only:
		c.Reason = reasonFrozen
		c.Message = fmt.Sprintf("It is the only node of the cluster, so there is nowhere to move its pods, and that it is silent may be the link (its zone is %q): they are not moved. 'dunlin node declare-dead' gives them up if it is off for good.", zone)
	case v.silent && v.frozen && v.alone:
		c.Reason = reasonFrozen
		c.Message = fmt.Sprintf("It is the only node of zone %q, so its silence is taken for a broken link: its pods are not moved. 'dunlin node declare-dead' releases them if it is off.", zone)
	case v.silent && v.frozen:
		c.Reason = reasonFrozen
		c.Message = fmt.Sprintf("So many nodes of zone %q are silent together that the link is taken for broken, and not they: their pods are not moved. 'dunlin node declare-dead' releases those of a node that is off.", zone)
	case v.silent && v.returning:
		c.Reason = reasonReturning
		c.Message = fmt.Sprintf("Others of zone %q came back a moment ago, and this node may be on its way: its pods are not moved yet.", zone)
	case v.silent && !v.evict:
		c.Reason = reasonLimited
		c.Message = fmt.Sprintf("The nodes of zone %q that are silent are given up one after the other, one each %s: its pods are moved when it is its turn.", zone, every)
	default:
		c.Status, c.Reason, c.Message = corev1.ConditionFalse, reasonNotHeld, "Nothing keeps its pods from being moved."
	}
	return c
}

// setHeld puts the condition into a status, if it is another one; a node that
// was never held has none. It reports whether anything changed.
func setHeld(s *corev1.NodeStatus, want corev1.NodeCondition, now metav1.Time) bool {
	want.LastHeartbeatTime, want.LastTransitionTime = now, now
	for i := range s.Conditions {
		old := &s.Conditions[i]
		switch {
		case old.Type != ConditionHeld:
			continue
		case old.Status == want.Status && old.Reason == want.Reason && old.Message == want.Message:
			return false
		case old.Status == want.Status:
			want.LastTransitionTime = old.LastTransitionTime
		}
		*old = want
		return true
	}
	if want.Status == corev1.ConditionFalse {
		return false
	}
	s.Conditions = append(s.Conditions, want)
	return true
}
