package nodelifecycle

import (
	"math"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
)

// ours are the taints that this controller owns; all others are users'.
var ours = map[string]bool{
	corev1.TaintNodeNotReady: true, corev1.TaintNodeUnreachable: true, corev1.TaintNodeUnschedulable: true,
	corev1.TaintNodeMemoryPressure: true, corev1.TaintNodeDiskPressure: true,
	corev1.TaintNodePIDPressure: true, corev1.TaintNodeNetworkUnavailable: true,
}

// desiredTaints computes a node's taints from its conditions. A frozen node
// keeps the NoExecute taint that it has. Pure.
func desiredTaints(n *corev1.Node, v verdict, now time.Time) []corev1.Taint {
	var want []corev1.Taint
	add := func(key string, effects ...corev1.TaintEffect) {
		for _, e := range effects {
			want = append(want, corev1.Taint{Key: key, Effect: e})
		}
	}
	has := map[corev1.NodeConditionType]corev1.ConditionStatus{}
	for _, c := range n.Status.Conditions {
		has[c.Type] = c.Status
	}
	ready, known := has[corev1.NodeReady]
	switch {
	case v.silent:
		add(corev1.TaintNodeUnreachable, corev1.TaintEffectNoSchedule)
		if v.evict || unreachable(n, corev1.TaintEffectNoExecute) {
			add(corev1.TaintNodeUnreachable, corev1.TaintEffectNoExecute)
		}
	case !known:
		add(corev1.TaintNodeNotReady, corev1.TaintEffectNoSchedule) // it has not said anything yet
	case ready == corev1.ConditionFalse:
		add(corev1.TaintNodeNotReady, corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute)
	}
	for t, key := range map[corev1.NodeConditionType]string{
		corev1.NodeMemoryPressure: corev1.TaintNodeMemoryPressure, corev1.NodeDiskPressure: corev1.TaintNodeDiskPressure,
		corev1.NodePIDPressure: corev1.TaintNodePIDPressure, corev1.NodeNetworkUnavailable: corev1.TaintNodeNetworkUnavailable,
	} {
		if has[t] == corev1.ConditionTrue {
			add(key, corev1.TaintEffectNoSchedule)
		}
	}
	if n.Spec.Unschedulable {
		add(corev1.TaintNodeUnschedulable, corev1.TaintEffectNoSchedule)
	}
	return mergeTaints(n.Spec.Taints, want, now)
}

// mergeTaints keeps users' taints and the order and times of those that
// stay, and adds the missing ones in a stable order.
func mergeTaints(have, want []corev1.Taint, now time.Time) []corev1.Taint {
	var out []corev1.Taint
	same := func(a corev1.Taint) func(corev1.Taint) bool {
		return func(b corev1.Taint) bool { return a.Key == b.Key && a.Effect == b.Effect }
	}
	for _, t := range have {
		if !ours[t.Key] || slices.ContainsFunc(want, same(t)) {
			out = append(out, t)
		}
	}
	slices.SortFunc(want, func(a, b corev1.Taint) int {
		if a.Key+string(a.Effect) < b.Key+string(b.Effect) {
			return -1
		}
		return 1
	})
	at := metav1.NewTime(now).Rfc3339Copy()
	for _, t := range want {
		if !slices.ContainsFunc(have, same(t)) {
			t.TimeAdded = &at
			out = append(out, t)
		}
	}
	return out
}

// unreachable says whether the node has the unreachable taint of that effect.
func unreachable(n *corev1.Node, effect corev1.TaintEffect) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeUnreachable && t.Effect == effect
	})
}

// never is a wait without an end.
const never = time.Duration(math.MaxInt64)

// tolerance is how long from now the pod may stay under the NoExecute taints
// (0: not at all; never: for ever). elapsed says how long a taint has been
// there. Every taint must be tolerated; the shortest period counts. Pure.
func tolerance(tolerations []corev1.Toleration, taints []corev1.Taint, elapsed func(*corev1.Taint) time.Duration) time.Duration {
	left := never
	for i := range taints {
		t := &taints[i]
		tolerated, seconds := false, int64(math.MaxInt64)
		for j := range tolerations {
			o := &tolerations[j]
			if !plan.Tolerates(o, t) {
				continue
			}
			tolerated = true
			if o.TolerationSeconds != nil {
				seconds = min(seconds, max(*o.TolerationSeconds, 0))
			}
		}
		if !tolerated {
			return 0
		}
		if seconds < int64(never/time.Second) {
			left = min(left, max(time.Duration(seconds)*time.Second-elapsed(t), 0))
		}
	}
	return left
}
