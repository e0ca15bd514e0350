package deployment

import (
	"cmp"
	"math"
	"slices"
	"strconv"

	appsv1 "k8s.io/api/apps/v1"
	intstrutil "k8s.io/apimachinery/pkg/util/intstr"
)

// The annotations by which kubectl and this controller talk; upstream's.
const (
	revisionAnnotation        = "deployment.kubernetes.io/revision"
	revisionHistoryAnnotation = "deployment.kubernetes.io/revision-history"
	desiredAnnotation         = "deployment.kubernetes.io/desired-replicas"
	maxAnnotation             = "deployment.kubernetes.io/max-replicas"
)

// resize is one decision: the set shall have so many replicas.
type resize struct {
	rs *appsv1.ReplicaSet
	to int32
}

func isRolling(d *appsv1.Deployment) bool {
	return d.Spec.Strategy.Type != appsv1.RecreateDeploymentStrategyType
}

func wanted(d *appsv1.Deployment) int32 { return replicas(d.Spec.Replicas) }

func replicas(n *int32) int32 {
	if n == nil {
		return 1
	}
	return *n
}

// budget resolves maxSurge (rounded up) and maxUnavailable (rounded down)
// against the wanted replicas. Both 0 would never move: then one may be
// unavailable. Where a rollback may come, the last pod is never taken before
// there is a new one, whatever the strategy allows.
func budget(d *appsv1.Deployment) (surge, unavailable int32) {
	if !isRolling(d) || d.Spec.Strategy.RollingUpdate == nil {
		return 0, 0
	}
	r := d.Spec.Strategy.RollingUpdate
	n := int(wanted(d))
	up, err := intstrutil.GetScaledValueFromIntOrPercent(intstrutil.ValueOrDefault(r.MaxSurge, intstrutil.FromInt32(0)), n, true)
	if err != nil {
		up = 0 // refused by validation
	}
	down, err := intstrutil.GetScaledValueFromIntOrPercent(intstrutil.ValueOrDefault(r.MaxUnavailable, intstrutil.FromInt32(0)), n, false)
	if err != nil {
		down = 0
	}
	if up == 0 && down == 0 {
		down = 1
	}
	if on, _ := wantsRollback(d); on && n > 0 {
		down = min(down, n-1)
		if up == 0 && down == 0 {
			up = 1
		}
	}
	return int32(up), int32(down)
}

// maxUnavailable is the budget as far as it can be used.
func maxUnavailable(d *appsv1.Deployment) int32 {
	if !isRolling(d) || wanted(d) == 0 {
		return 0
	}
	_, u := budget(d)
	return min(u, wanted(d))
}

// maxReplicas is what the Deployment may have at most, surge included.
func maxReplicas(d *appsv1.Deployment) int32 {
	surge, _ := budget(d)
	return wanted(d) + surge
}

func sumSpec(sets []*appsv1.ReplicaSet) (n int32) {
	for _, rs := range sets {
		n += replicas(rs.Spec.Replicas)
	}
	return n
}

// sumPods counts the pods that the sets have or want, whichever is more: a
// set that was cut has its pods until its own controller has removed them,
// and what grows meanwhile would go above the ceiling. ok is false while a
// set's controller has not seen its newest size: it may still be making pods
// for the one before.
func sumPods(sets []*appsv1.ReplicaSet) (n int32, ok bool) {
	ok = true
	for _, rs := range sets {
		n += max(replicas(rs.Spec.Replicas), rs.Status.Replicas)
		ok = ok && rs.Status.ObservedGeneration >= rs.Generation
	}
	return n, ok
}

// room is by how much sets may grow without going above the ceiling, given
// what all have.
func room(d *appsv1.Deployment, all []*appsv1.ReplicaSet) int32 {
	n, ok := sumPods(all)
	if !ok {
		return 0 // the set's next status wakes the Deployment
	}
	return max(maxReplicas(d)-n, 0)
}

func sumStatus(sets []*appsv1.ReplicaSet, f func(*appsv1.ReplicaSetStatus) int32) (n int32) {
	for _, rs := range sets {
		n += f(&rs.Status)
	}
	return n
}

func available(s *appsv1.ReplicaSetStatus) int32 { return s.AvailableReplicas }

// withReplicas are the sets that want pods.
func withReplicas(sets []*appsv1.ReplicaSet) (out []*appsv1.ReplicaSet) {
	for _, rs := range sets {
		if replicas(rs.Spec.Replicas) > 0 {
			out = append(out, rs)
		}
	}
	return out
}

func concat(old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet) []*appsv1.ReplicaSet {
	if newRS == nil {
		return old
	}
	return append(slices.Clip(old), newRS)
}

func without(sets []*appsv1.ReplicaSet, rs *appsv1.ReplicaSet) (out []*appsv1.ReplicaSet) {
	for _, s := range sets {
		if s != rs {
			out = append(out, s)
		}
	}
	return out
}

func byCreation(a, b *appsv1.ReplicaSet) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
}

// newReplicas is how many the new set may have now, given what all have.
func newReplicas(d *appsv1.Deployment, all []*appsv1.ReplicaSet, newCount int32) int32 {
	if !isRolling(d) {
		return wanted(d)
	}
	return newCount + min(room(d, all), wanted(d)-newCount)
}

// growNew decides the new set's size in a rolling update. ok is false when
// it is right already.
func growNew(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet) (resize, bool) {
	has := replicas(newRS.Spec.Replicas)
	to := wanted(d)
	if has == to {
		return resize{}, false
	}
	if has < to {
		to = newReplicas(d, concat(old, newRS), has)
	}
	return resize{newRS, to}, to != has
}

// shrinkOld decides what the old sets may lose in a rolling update without
// falling below the wanted replicas less maxUnavailable: first pods that are
// not available anyway, then available ones, oldest set first. One pod of the
// set that could be gone back to stays until the newest has proven itself.
func shrinkOld(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet) []resize {
	old = slices.Clone(old)
	slices.SortFunc(old, byCreation)
	all := concat(old, newRS)
	minAvailable := wanted(d) - maxUnavailable(d)
	newUnavailable := replicas(newRS.Spec.Replicas) - newRS.Status.AvailableReplicas
	allowed := sumSpec(all) - minAvailable - newUnavailable
	if sumSpec(old) == 0 || allowed <= 0 {
		return nil
	}
	size, least := map[*appsv1.ReplicaSet]int32{}, map[*appsv1.ReplicaSet]int32{}
	for _, rs := range old {
		size[rs] = replicas(rs.Spec.Replicas)
	}
	if keep := kept(d, old, newRS); keep != nil {
		least[keep] = 1
	}
	for _, rs := range old {
		cut := min(allowed, size[rs]-max(rs.Status.AvailableReplicas, least[rs]))
		if cut > 0 {
			size[rs] -= cut
			allowed -= cut
		}
	}
	spare := min(sumStatus(all, available)-minAvailable, allowed)
	for _, rs := range old {
		cut := min(spare, size[rs]-least[rs])
		if cut > 0 {
			size[rs] -= cut
			spare -= cut
		}
	}
	var out []resize
	for _, rs := range old {
		if size[rs] != replicas(rs.Spec.Replicas) {
			out = append(out, resize{rs, size[rs]})
		}
	}
	return out
}

// isScaling says that spec.replicas changed since the sets were last sized.
func isScaling(d *appsv1.Deployment, all []*appsv1.ReplicaSet) bool {
	for _, rs := range withReplicas(all) {
		if n, ok := intAnnotation(rs, desiredAnnotation); ok && n != wanted(d) {
			return true
		}
	}
	return false
}

func intAnnotation(rs *appsv1.ReplicaSet, key string) (int32, bool) {
	v, ok := rs.Annotations[key]
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseInt(v, 10, 32)
	return int32(n), err == nil
}

// rescale decides all sizes when the Deployment was scaled or is paused: one
// active set takes all; a finished rollout drops the old ones; in the middle
// of one the change is spread in proportion.
func rescale(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet) []resize {
	if rs := activeOrLatest(old, newRS); rs != nil {
		has, to := replicas(rs.Spec.Replicas), wanted(d)
		if others := without(concat(old, newRS), rs); to > has && isRolling(d) {
			n, ok := sumPods(others)
			if !ok {
				n = maxReplicas(d)
			}
			to = min(to, max(has, maxReplicas(d)-n))
		}
		return []resize{{rs, to}}
	}
	if saturated(d, newRS) {
		var out []resize
		for _, rs := range withReplicas(old) {
			out = append(out, resize{rs, 0})
		}
		return out
	}
	if !isRolling(d) {
		return nil
	}
	return proportional(d, concat(old, newRS))
}

func activeOrLatest(old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet) *appsv1.ReplicaSet {
	switch active := withReplicas(concat(old, newRS)); len(active) {
	case 0:
		if newRS != nil || len(old) == 0 {
			return newRS
		}
		return slices.MaxFunc(old, byCreation)
	case 1:
		return active[0]
	}
	return nil
}

// saturated says that the new set has all that is wanted, and all available.
func saturated(d *appsv1.Deployment, newRS *appsv1.ReplicaSet) bool {
	if newRS == nil {
		return false
	}
	desired, ok := intAnnotation(newRS, desiredAnnotation)
	n := wanted(d)
	return ok && replicas(newRS.Spec.Replicas) == n && desired == n && newRS.Status.AvailableReplicas == n
}

// proportional spreads the difference between what the sets have and what
// the Deployment may have over them by size; the biggest takes the rest.
func proportional(d *appsv1.Deployment, all []*appsv1.ReplicaSet) []resize {
	active := withReplicas(all)
	var allowed int32
	if wanted(d) > 0 {
		allowed = maxReplicas(d)
	}
	toAdd := allowed - sumSpec(active)
	if toAdd > 0 {
		toAdd = min(toAdd, room(d, all))
	}
	slices.SortFunc(active, func(a, b *appsv1.ReplicaSet) int {
		age := byCreation(b, a) // newer first when growing
		if toAdd < 0 {
			age = byCreation(a, b)
		}
		return cmp.Or(cmp.Compare(replicas(b.Spec.Replicas), replicas(a.Spec.Replicas)), age)
	})
	out := make([]resize, 0, len(active))
	var added int32
	for _, rs := range active {
		share := int32(0)
		if toAdd != added {
			share = fraction(d, rs)
			if toAdd > 0 {
				share = min(share, toAdd-added)
			} else {
				share = max(share, toAdd-added)
			}
		}
		out = append(out, resize{rs, replicas(rs.Spec.Replicas) + share})
		added += share
	}
	if len(out) > 0 && toAdd != 0 {
		out[0].to = max(out[0].to+toAdd-added, 0)
	}
	if toAdd < 0 {
		keepFloor(d, out)
	}
	return out
}

// keepFloor moves cuts from available pods to unavailable ones, of whatever
// set, as far as the shares would leave fewer available ones than the strategy
// allows. Upstream's shares look at sizes alone: of a rollout that is stuck,
// with 3 old pods that serve and 2 new ones that never will, a scaling from 5 to
// 3 leaves it one that serves, whatever maxUnavailable says.
func keepFloor(d *appsv1.Deployment, out []resize) {
	stays := func(r *resize) int32 { return min(r.to, r.rs.Status.AvailableReplicas) }
	short := wanted(d) - maxUnavailable(d)
	for i := range out {
		short -= stays(&out[i])
	}
	for i := range out {
		r := &out[i]
		for j := range out {
			other := &out[j]
			n := min(short, min(r.rs.Status.AvailableReplicas, replicas(r.rs.Spec.Replicas))-r.to, other.to-stays(other))
			if n > 0 {
				r.to, other.to, short = r.to+n, other.to-n, short-n
			}
		}
	}
}

// fraction is by how much the set changes if it keeps its share.
func fraction(d *appsv1.Deployment, rs *appsv1.ReplicaSet) int32 {
	has := replicas(rs.Spec.Replicas)
	if wanted(d) == 0 {
		return -has
	}
	before, ok := intAnnotation(rs, maxAnnotation)
	if !ok || before == 0 {
		before = d.Status.Replicas
	}
	if before == 0 {
		return 0
	}
	size := float64(has) * float64(maxReplicas(d)) / float64(before)
	return int32(math.Round(size)) - has
}
