// Package readiness remembers since when pods are ready, for
// minReadySeconds.
package readiness

import (
	"iter"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Tracker remembers when pods became ready, on this server's monotonic
// clock: the transition time in a pod's status is of the node's wall clock,
// which may be wrong in either direction. Bounded by the pods of owners with
// minReadySeconds. Safe for concurrent use; it owns no goroutine.
type Tracker struct {
	mu     sync.Mutex
	owners map[state.Key]map[types.UID]*mark
}

type mark struct {
	sawUnready bool
	readyAt    time.Time // monotonic; zero while not ready
}

// New returns a Tracker that has seen nothing.
func New() *Tracker { return &Tracker{owners: map[state.Key]map[types.UID]*mark{}} }

// For is how long the owner's pod has been ready. A pod that was already
// ready when it was first seen (by this leader) is believed to be so since
// its status says, or since it was first seen if that lies in the future.
// pod may be nil while it is not ready.
func (r *Tracker) For(owner state.Key, uid types.UID, ready bool, pod *corev1.Pod, wall time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	pods := r.owners[owner]
	if pods == nil {
		pods = map[types.UID]*mark{}
		r.owners[owner] = pods
	}
	m := pods[uid]
	if m == nil {
		m = &mark{}
		pods[uid] = m
	}
	if !ready {
		m.sawUnready, m.readyAt = true, time.Time{}
		return 0
	}
	if m.readyAt.IsZero() {
		m.readyAt = time.Now()
	}
	d := time.Since(m.readyAt)
	if m.sawUnready || pod == nil {
		return d
	}
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady {
			d = max(d, wall.Sub(c.LastTransitionTime.Time))
		}
	}
	return d
}

// Keep forgets the owner's pods that are not among the n living ones.
func (r *Tracker) Keep(owner state.Key, n int, living iter.Seq[types.UID]) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pods := r.owners[owner]
	if len(pods) <= n {
		return
	}
	live := make(map[types.UID]struct{}, n)
	for uid := range living {
		live[uid] = struct{}{}
	}
	for uid := range pods {
		if _, ok := live[uid]; !ok {
			delete(pods, uid)
		}
	}
}

// Forget forgets an owner that is gone.
func (r *Tracker) Forget(owner state.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.owners, owner)
}
