package deployment

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// watchDefault is how long a version is watched where there is no progress
// deadline: upstream's default of that.
const watchDefault = 10 * time.Minute

// watch is what is known of the newest set of a Deployment that rolls back by
// itself; the zero value of any other.
type watch struct {
	// on: the set has yet to prove itself, and there is one to go back to.
	on bool
	// full: it has all the pods that it may have, and all are available.
	full bool
	// replaced: since the watch began one of its pods was made anew.
	replaced bool
	// crashing: a container of one of its pods, or of an older set's, ended
	// again and again.
	crashing      bool
	failing, pods int           // of its pods so many fail now
	left          time.Duration // until it has proven itself; 0: not to be waited for
}

// watchFor is for how long all pods of a new version must be available, with
// no break, before the last pod of the version before it is taken.
func watchFor(d *appsv1.Deployment) time.Duration {
	if hasDeadline(d) {
		return time.Duration(*d.Spec.ProgressDeadlineSeconds) * time.Second
	}
	return watchDefault
}

// goodAs is the revision as which the set was known good last; 0: never.
func goodAs(rs *appsv1.ReplicaSet) int64 {
	n, err := strconv.ParseInt(rs.Annotations[manifests.AnnotationGoodRevision], 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// proven says that the set is known good as its present revision.
func proven(rs *appsv1.ReplicaSet) bool {
	good := goodAs(rs)
	return good != 0 && good == revision(rs.Annotations)
}

// lastGood is the set to go back to: of those that are known good the one
// that was so last.
func lastGood(sets []*appsv1.ReplicaSet) (rs *appsv1.ReplicaSet) {
	for _, s := range sets {
		if s.DeletionTimestamp == nil && goodAs(s) != 0 && (rs == nil || goodAs(s) > goodAs(rs)) {
			rs = s
		}
	}
	return rs
}

// watched says whether the newest set has yet to prove itself. One that was
// good before, to which the user or the controller went back, has not.
func watched(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet) bool {
	on, _ := wantsRollback(d)
	return on && newRS != nil && wanted(d) > 0 && goodAs(newRS) == 0 && lastGood(old) != nil
}

// kept is the set of which one pod stays for as long as the newest has not
// proven itself; nil: none.
func kept(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet) *appsv1.ReplicaSet {
	if !isRolling(d) || !watched(d, old, newRS) {
		return nil
	}
	if good := lastGood(old); replicas(good.Spec.Replicas) > 0 {
		return good
	}
	return nil
}

// full says that the newest set has what it may have beside the kept pod, and
// that all of that is available.
func full(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet) bool {
	n, others := replicas(newRS.Spec.Replicas), sumSpec(old)
	s := &newRS.Status
	return n > 0 && s.ObservedGeneration >= newRS.Generation && s.Replicas == n && s.AvailableReplicas == n &&
		others <= 1 && (n == wanted(d) || n+others == maxReplicas(d))
}

// spare lets new sizes leave one pod of the kept set, and makes room for it in
// the biggest other set where there would be too many.
func spare(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet, list []resize) []resize {
	keep := kept(d, old, newRS)
	at, biggest, total := -1, -1, int32(0)
	size := map[*appsv1.ReplicaSet]int32{}
	for _, rs := range concat(old, newRS) {
		size[rs] = replicas(rs.Spec.Replicas)
	}
	for i, z := range list {
		size[z.rs] = z.to
		if z.rs == keep {
			at = i
		} else if biggest < 0 || z.to > list[biggest].to {
			biggest = i
		}
	}
	if at < 0 || list[at].to > 0 {
		return list
	}
	list[at].to, size[keep] = 1, 1
	for _, n := range size {
		total += n
	}
	if total > maxReplicas(d) && biggest >= 0 && list[biggest].to > 0 {
		list[biggest].to--
	}
	return list
}

// nameGood remembers which set served when rollbacks began to be wanted: of
// those before the newest the one with the most available pods.
func (r *round) nameGood(ctx context.Context) error {
	if on, _ := wantsRollback(r.d); !on || r.newRS != nil && goodAs(r.newRS) != 0 || lastGood(r.old) != nil {
		return nil
	}
	var best *appsv1.ReplicaSet
	for _, rs := range r.old {
		if rs.DeletionTimestamp == nil && rs.Status.AvailableReplicas > 0 && (best == nil || rs.Status.AvailableReplicas > best.Status.AvailableReplicas) {
			best = rs
		}
	}
	if best == nil {
		return nil
	}
	return r.callGood(ctx, best)
}

// callGood notes on the set that it is good as its present revision.
func (r *round) callGood(ctx context.Context, was *appsv1.ReplicaSet) error {
	rev := was.Annotations[revisionAnnotation]
	if rev == "" {
		return nil
	}
	rs, err := r.updateSet(ctx, was, func(rs *appsv1.ReplicaSet) {
		rs.Annotations[manifests.AnnotationGoodRevision] = rev
	})
	if err != nil {
		return err
	}
	r.replace(was, rs)
	return nil
}

// lookAtNewest fills the watch, and ends it once the set has proven itself:
// that is written before anything is taken because of it.
func (r *round) lookAtNewest(ctx context.Context) error {
	r.watch = watch{}
	key := state.Key{Kind: deploymentGK.String(), Namespace: r.d.Namespace, Name: r.d.Name}
	if on, _ := wantsRollback(r.d); !on || r.newRS == nil || wanted(r.d) == 0 || proven(r.newRS) {
		r.c.ready.Forget(key)
		return nil
	}
	steady, err := r.newestPods(key)
	if err != nil {
		return err
	}
	for _, rs := range r.old {
		if err := r.pods(rs, func(_ *state.Record, pod *corev1.Pod) {
			r.watch.crashing = r.watch.crashing || crashed(pod)
		}); err != nil {
			return err
		}
	}
	r.watch.on = watched(r.d, r.old, r.newRS)
	r.watch.full = full(r.d, r.old, r.newRS)
	if !r.watch.on || !r.watch.full {
		return nil
	}
	if r.watch.left = watchFor(r.d) - steady; r.watch.left > 0 {
		return nil
	}
	r.watch.on, r.watch.left = false, 0
	return r.callGood(ctx, r.newRS)
}

// newestPods looks at the newest set's pods; steady is for how long all of
// them have been ready.
func (r *round) newestPods(key state.Key) (steady time.Duration, err error) {
	began := r.now
	if c := condition(&r.d.Status, appsv1.DeploymentProgressing); c != nil && c.Reason == reasonWatched {
		began = c.LastUpdateTime.Time
	}
	living := map[types.UID]bool{}
	err = r.pods(r.newRS, func(rec *state.Record, pod *corev1.Pod) {
		r.watch.pods++
		if fails(pod) {
			r.watch.failing++
		}
		r.watch.crashing = r.watch.crashing || crashed(pod)
		r.watch.replaced = r.watch.replaced || pod.CreationTimestamp.After(began)
		if ended(rec) {
			return // its successor is looked at
		}
		ready := false
		for _, c := range pod.Status.Conditions {
			ready = ready || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}
		since := r.c.ready.For(key, pod.UID, ready, pod, r.now)
		if len(living) == 0 || since < steady {
			steady = since
		}
		living[pod.UID] = true
	})
	r.c.ready.Keep(key, len(living), maps.Keys(living))
	if len(living) != int(replicas(r.newRS.Spec.Replicas)) {
		return 0, err // the set's status does not know it yet
	}
	return steady, err
}

// pods calls f with each pod of a set that is not being deleted and whose node
// is there: one that is away is no fault of the template.
func (r *round) pods(rs *appsv1.ReplicaSet, f func(*state.Record, *corev1.Pod)) (err error) {
	r.c.env.Reader.Snapshot().ByOwner(string(rs.UID), func(rec *state.Record) bool {
		if rec.Header.Key.Kind != podGK.String() || rec.Header.Deleted != 0 {
			return true
		}
		obj, derr := r.c.env.Store.Decode(rec)
		if derr != nil {
			err = fmt.Errorf("decode pod %s: %w", rec.Header.Key.Name, derr)
			return false
		}
		if pod, ok := obj.(*corev1.Pod); ok && !lost.Is(pod) {
			f(rec, pod)
		}
		return true
	})
	return err
}

// condition says that the newest set is watched, and since when. The deadline
// counts from there if a pod fails later, and anew where one was merely made
// elsewhere.
func (w watch) condition(d *appsv1.Deployment, old []*appsv1.ReplicaSet, newRS *appsv1.ReplicaSet, st *appsv1.DeploymentStatus, now time.Time) {
	good := lastGood(old)
	if w.replaced {
		removeCondition(st, appsv1.DeploymentProgressing)
	}
	setCondition(st, appsv1.DeploymentProgressing, corev1.ConditionTrue, reasonWatched,
		fmt.Sprintf("ReplicaSet %q must stay available for %d s; until then one pod of revision %d (ReplicaSet %q) is kept.",
			newRS.Name, watchFor(d)/time.Second, revision(good.Annotations), good.Name), now)
}
