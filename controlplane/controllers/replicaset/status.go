package replicaset

import (
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// member is one counted pod, as far as status needs it.
type member struct {
	labels map[string]string
	ready  bool
	// readyFor is how long it has been ready; only read with minReadySeconds.
	readyFor time.Duration
}

// computeStatus counts. failure is the error of this round's creates or
// deletes, with its reason, or nil. wait is when the next member becomes
// available; 0 for none.
func computeStatus(s set, members []member, failReason string, failure error, now time.Time) (st appsv1.ReplicaSetStatus, wait time.Duration) {
	st = *s.status.DeepCopy()
	st.Replicas = int32(len(members))
	st.FullyLabeledReplicas, st.ReadyReplicas, st.AvailableReplicas = 0, 0, 0
	want := labels.Set(s.template.Labels).AsSelectorPreValidated()
	minReady := time.Duration(s.minReady) * time.Second
	for _, m := range members {
		if want.Matches(labels.Set(m.labels)) {
			st.FullyLabeledReplicas++
		}
		if !m.ready {
			continue
		}
		st.ReadyReplicas++
		if left := minReady - m.readyFor; minReady == 0 || left <= 0 {
			st.AvailableReplicas++
		} else if wait == 0 || left < wait {
			wait = left
		}
	}
	st.ObservedGeneration = s.meta.GetGeneration()
	st.Conditions = failureCondition(st.Conditions, failReason, failure, now)
	return st, wait
}

func failureCondition(conds []appsv1.ReplicaSetCondition, reason string, failure error, now time.Time) []appsv1.ReplicaSetCondition {
	var out []appsv1.ReplicaSetCondition
	var old *appsv1.ReplicaSetCondition
	for i, c := range conds {
		if c.Type == appsv1.ReplicaSetReplicaFailure {
			old = &conds[i]
			continue
		}
		out = append(out, c)
	}
	if failure == nil {
		return out
	}
	c := appsv1.ReplicaSetCondition{Type: appsv1.ReplicaSetReplicaFailure, Status: corev1.ConditionTrue,
		LastTransitionTime: metav1.NewTime(now).Rfc3339Copy(), Reason: reason, Message: failure.Error()}
	if old != nil && old.Reason == reason {
		// The same trouble as before: its text may name a new pod each time,
		// which is not worth a write.
		c = *old
	}
	return append(out, c)
}

func sameStatus(a, b appsv1.ReplicaSetStatus) bool { return apiequality.Semantic.DeepEqual(a, b) }
