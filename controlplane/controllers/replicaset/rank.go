package replicaset

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
)

// victim is what the deletion order looks at.
type victim struct {
	pod      *corev1.Pod
	assigned bool
	phase    corev1.PodPhase
	ready    bool
	readyAt  time.Time
	cost     int32
	keep     int // lost.Keep
	standIn  bool
	crowd    int // pods of the same owner on its node
	restarts int32
	created  time.Time
}

func newVictim(p *corev1.Pod, crowd map[string]int) victim {
	v := victim{pod: p, assigned: p.Spec.NodeName != "", phase: p.Status.Phase, created: p.CreationTimestamp.Time, crowd: crowd[p.Spec.NodeName]}
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			v.ready, v.readyAt = true, c.LastTransitionTime.Time
		}
	}
	// An invalid cost is refused by validation; 0 if it slipped through.
	if n, err := strconv.ParseInt(p.Annotations[corev1.PodDeletionCost], 10, 32); err == nil {
		v.cost = int32(n)
	}
	v.keep = lost.Keep(p)
	for i := range p.Status.ContainerStatuses {
		v.restarts = max(v.restarts, p.Status.ContainerStatuses[i].RestartCount)
	}
	return v
}

var phaseRank = map[corev1.PodPhase]int{corev1.PodPending: 0, "": 0, corev1.PodUnknown: 1, corev1.PodRunning: 2}

// before is upstream's order of deletion (ActivePodsWithRanks), with one
// more rule of ours: a pod that came back from an unreachable node is kept
// rather than its replacement, which goes rather than any other.
func (a victim) before(b victim) int {
	return cmp.Or(
		boolFirst(!a.assigned, !b.assigned),
		cmp.Compare(phaseRank[a.phase], phaseRank[b.phase]),
		boolFirst(!a.ready, !b.ready),
		cmp.Compare(a.cost, b.cost),
		cmp.Compare(a.keep, b.keep),
		boolFirst(a.standIn, b.standIn),
		cmp.Compare(b.crowd, a.crowd),
		b.readyAt.Compare(a.readyAt),
		cmp.Compare(b.restarts, a.restarts),
		b.created.Compare(a.created),
		cmp.Compare(a.pod.Name, b.pod.Name),
	)
}

func boolFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// markStandIns finds the pods that were made while one that is kept was away.
func markStandIns(all []victim) {
	type span struct{ from, to time.Time }
	var away []span
	for i := range all {
		if all[i].keep <= 0 {
			continue
		}
		// Still marked: until after every pod that there is.
		if from, to, ok := lost.Away(all[i].pod, time.Unix(1<<40, 0)); ok {
			away = append(away, span{from, to})
		}
	}
	for i := range all {
		v := &all[i]
		v.standIn = v.keep == 0 && slices.ContainsFunc(away, func(s span) bool {
			return !v.created.Before(s.from) && !v.created.After(s.to)
		})
	}
}

// chooseVictims returns at most n of the pods, in the order in which to
// delete them. crowd counts the owner's pods by node name. Pods that came back
// and shall go rather than their replacements go first, but a ready one of
// these only when enough others are ready, and nothing goes in its place: then
// fewer than n are returned. Pure.
func chooseVictims(pods []*corev1.Pod, crowd map[string]int, n int) []*corev1.Pod {
	all := make([]victim, len(pods))
	for i, p := range pods {
		all[i] = newVictim(p, crowd)
	}
	markStandIns(all)
	slices.SortFunc(all, victim.before)
	n = min(n, len(all))
	ready, back := 0, 0
	for i := range all {
		if all[i].ready {
			ready++
		}
		if all[i].keep < 0 {
			back++
		}
	}
	out := make([]*corev1.Pod, 0, n)
	for _, v := range all {
		if v.keep >= 0 || len(out) == n || v.ready && ready <= len(all)-n {
			continue
		}
		if v.ready {
			ready--
		}
		out = append(out, v.pod)
	}
	left := max(n-back, 0)
	for _, v := range all {
		if v.keep >= 0 && left > 0 {
			left--
			out = append(out, v.pod)
		}
	}
	return out
}
