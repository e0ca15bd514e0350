package deployment

import (
	"fmt"
	"math"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Reasons of the conditions; upstream's.
const (
	reasonNewSet       = "NewReplicaSetCreated"
	reasonFoundSet     = "FoundNewReplicaSet"
	reasonSetUpdated   = "ReplicaSetUpdated"
	reasonSetAvailable = "NewReplicaSetAvailable"
	reasonSetError     = "ReplicaSetCreateError"
	reasonWatched      = "NewReplicaSetWatched" // ours
	reasonTimedOut     = "ProgressDeadlineExceeded"
	reasonPaused       = "DeploymentPaused"
	reasonResumed      = "DeploymentResumed"
	reasonEnough       = "MinimumReplicasAvailable"
	reasonNotEnough    = "MinimumReplicasUnavailable"
)

func hasDeadline(d *appsv1.Deployment) bool {
	return d.Spec.ProgressDeadlineSeconds != nil && *d.Spec.ProgressDeadlineSeconds != math.MaxInt32
}

func condition(s *appsv1.DeploymentStatus, t appsv1.DeploymentConditionType) *appsv1.DeploymentCondition {
	for i := range s.Conditions {
		if s.Conditions[i].Type == t {
			return &s.Conditions[i]
		}
	}
	return nil
}

// setCondition replaces the condition of the type, unless status and reason
// are as before. The transition time moves only with the status.
func setCondition(s *appsv1.DeploymentStatus, t appsv1.DeploymentConditionType, status corev1.ConditionStatus, reason, message string, now time.Time) {
	at := metav1.NewTime(now).Rfc3339Copy()
	c := appsv1.DeploymentCondition{Type: t, Status: status, LastUpdateTime: at, LastTransitionTime: at, Reason: reason, Message: message}
	if old := condition(s, t); old != nil {
		if old.Status == status && old.Reason == reason {
			return
		}
		if old.Status == status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		*old = c
		return
	}
	s.Conditions = append(s.Conditions, c)
}

func removeCondition(s *appsv1.DeploymentStatus, t appsv1.DeploymentConditionType) {
	var kept []appsv1.DeploymentCondition
	for _, c := range s.Conditions {
		if c.Type != t {
			kept = append(kept, c)
		}
	}
	s.Conditions = kept
}

// countStatus fills the counts and the Available condition. d.Status is the
// status so far, conditions of this round included.
func countStatus(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet, now time.Time) appsv1.DeploymentStatus {
	all := concat(old, newRS)
	st := *d.Status.DeepCopy()
	st.ObservedGeneration = d.Generation
	st.Replicas = sumStatus(all, func(s *appsv1.ReplicaSetStatus) int32 { return s.Replicas })
	st.UpdatedReplicas = 0
	if newRS != nil {
		st.UpdatedReplicas = newRS.Status.Replicas
	}
	st.ReadyReplicas = sumStatus(all, func(s *appsv1.ReplicaSetStatus) int32 { return s.ReadyReplicas })
	st.AvailableReplicas = sumStatus(all, available)
	st.UnavailableReplicas = max(sumSpec(all)-st.AvailableReplicas, 0)
	if st.AvailableReplicas >= wanted(d)-maxUnavailable(d) {
		setCondition(&st, appsv1.DeploymentAvailable, corev1.ConditionTrue, reasonEnough, "Deployment has minimum availability.", now)
	} else {
		setCondition(&st, appsv1.DeploymentAvailable, corev1.ConditionFalse, reasonNotEnough, "Deployment does not have minimum availability.", now)
	}
	rolledBackCondition(d, newRS, &st, now)
	return st
}

func complete(d *appsv1.Deployment, st *appsv1.DeploymentStatus) bool {
	n := wanted(d)
	return st.UpdatedReplicas == n && st.Replicas == n && st.AvailableReplicas == n && st.ObservedGeneration >= d.Generation
}

// progressed says that the new status is nearer to the end than the old one.
// While pods crash again and again, one that is Ready again is no step ahead:
// a version that is so now and then would never be given up.
func progressed(old, st *appsv1.DeploymentStatus, crashing bool) bool {
	return st.UpdatedReplicas > old.UpdatedReplicas ||
		st.Replicas-st.UpdatedReplicas < old.Replicas-old.UpdatedReplicas ||
		!crashing && (st.ReadyReplicas > old.ReadyReplicas || st.AvailableReplicas > old.AvailableReplicas)
}

// timedOut says that nothing progressed for the deadline; left is how long
// until it does (0: no deadline runs). The last progress is the condition's
// update time, so that the deadline is kept in the replicated state.
func timedOut(d *appsv1.Deployment, st *appsv1.DeploymentStatus, now time.Time) (out bool, left time.Duration) {
	c := condition(st, appsv1.DeploymentProgressing)
	if !hasDeadline(d) || c == nil || c.Reason == reasonSetAvailable {
		return false, 0
	}
	if c.Reason == reasonTimedOut {
		return true, 0
	}
	deadline := time.Duration(*d.Spec.ProgressDeadlineSeconds) * time.Second
	left = c.LastUpdateTime.Add(deadline).Sub(now)
	if left > deadline {
		left = deadline // a clock that was set back does not stretch it for ever
	}
	return left < 0, max(left, 0)
}

// rolloutStatus is the status while a rollout is watched (not paused, not
// merely scaled): counts, Progressing and ReplicaFailure. again is when to
// look at the deadline; 0 for never.
func rolloutStatus(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet, w watch, now time.Time) (st appsv1.DeploymentStatus, again time.Duration) {
	st = countStatus(d, old, newRS, now)
	current := condition(&d.Status, appsv1.DeploymentProgressing)
	done := st.Replicas == st.UpdatedReplicas && current != nil && current.Reason == reasonSetAvailable
	what := fmt.Sprintf("Deployment %q", d.Name)
	if newRS != nil {
		what = fmt.Sprintf("ReplicaSet %q", newRS.Name)
	}
	switch {
	case !hasDeadline(d):
		removeCondition(&st, appsv1.DeploymentProgressing)
	case w.on && w.full:
		w.condition(d, old, newRS, &st, now)
	case current != nil && (current.Reason == reasonWatched && !w.on || current.Reason == reasonSetAvailable && w.on):
		// It has proven itself; or it was complete without a pod, of which
		// nothing was learned.
		touch(&st, what+" is progressing.", now)
	case done:
	case complete(d, &st):
		setCondition(&st, appsv1.DeploymentProgressing, corev1.ConditionTrue, reasonSetAvailable, what+" has successfully progressed.", now)
	case progressed(&d.Status, &st, w.crashing):
		touch(&st, what+" is progressing.", now)
	default:
		out, left := timedOut(d, &st, now)
		if out {
			setCondition(&st, appsv1.DeploymentProgressing, corev1.ConditionFalse, reasonTimedOut, what+" has timed out progressing.", now)
		} else if left > 0 {
			again = left + time.Second
		}
	}
	if again == 0 && hasDeadline(d) && !complete(d, &st) && (!w.on || !w.full) {
		if out, left := timedOut(d, &st, now); !out && left > 0 {
			again = left + time.Second
		}
	}
	replicaFailure(&st, old, newRS, now)
	return st, again
}

// touch renews the Progressing condition although its reason may be the
// same: its update time is what the deadline counts from.
func touch(st *appsv1.DeploymentStatus, message string, now time.Time) {
	at := metav1.NewTime(now).Rfc3339Copy()
	c := appsv1.DeploymentCondition{Type: appsv1.DeploymentProgressing, Status: corev1.ConditionTrue,
		LastUpdateTime: at, LastTransitionTime: at, Reason: reasonSetUpdated, Message: message}
	if old := condition(st, appsv1.DeploymentProgressing); old != nil {
		if old.Status == corev1.ConditionTrue {
			c.LastTransitionTime = old.LastTransitionTime
		}
		*old = c
		return
	}
	st.Conditions = append(st.Conditions, c)
}

// replicaFailure shows the newest set's trouble with its pods, or else an
// older one's.
func replicaFailure(st *appsv1.DeploymentStatus, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet, now time.Time) {
	find := func(rs *appsv1.ReplicaSet) *appsv1.ReplicaSetCondition {
		if rs != nil {
			for i := range rs.Status.Conditions {
				if c := &rs.Status.Conditions[i]; c.Type == appsv1.ReplicaSetReplicaFailure {
					return c
				}
			}
		}
		return nil
	}
	c := find(newRS)
	for i := 0; c == nil && i < len(old); i++ {
		c = find(old[i])
	}
	if c == nil {
		removeCondition(st, appsv1.DeploymentReplicaFailure)
		return
	}
	setCondition(st, appsv1.DeploymentReplicaFailure, c.Status, c.Reason, c.Message, now)
}

// pauseCondition notes a pause or its end in the Progressing condition, so
// that the deadline does not run meanwhile.
func pauseCondition(d *appsv1.Deployment, st *appsv1.DeploymentStatus, now time.Time) {
	if !hasDeadline(d) {
		return
	}
	c := condition(st, appsv1.DeploymentProgressing)
	if c != nil && c.Reason == reasonTimedOut {
		return
	}
	paused := c != nil && c.Reason == reasonPaused
	switch {
	case d.Spec.Paused && !paused:
		setCondition(st, appsv1.DeploymentProgressing, corev1.ConditionUnknown, reasonPaused, "Deployment is paused", now)
	case !d.Spec.Paused && paused:
		setCondition(st, appsv1.DeploymentProgressing, corev1.ConditionUnknown, reasonResumed, "Deployment is resumed", now)
	}
}
