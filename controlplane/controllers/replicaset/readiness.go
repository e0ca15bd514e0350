package replicaset

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// readiness remembers when pods became ready, on this server's monotonic
// clock: the transition time in a pod's status is of the node's wall clock,
// which may be wrong in either direction. Bounded by the pods of sets with
// minReadySeconds.
type readiness struct {
	mu   sync.Mutex
	sets map[state.Key]map[types.UID]*readyMark
}

type readyMark struct {
	sawUnready bool
	readyAt    time.Time // monotonic; zero while not ready
}

func newReadiness() *readiness {
	return &readiness{sets: map[state.Key]map[types.UID]*readyMark{}}
}

// readyFor is how long the pod has been ready. A pod that was already ready
// when it was first seen (by this leader) is believed to be so since its
// status says, or since it was first seen if that lies in the future.
func (r *readiness) readyFor(set state.Key, uid types.UID, ready bool, pod *corev1.Pod, wall time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	pods := r.sets[set]
	if pods == nil {
		pods = map[types.UID]*readyMark{}
		r.sets[set] = pods
	}
	m := pods[uid]
	if m == nil {
		m = &readyMark{}
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

// keep forgets the pods of the set that are not among the counted ones.
func (r *readiness) keep(set state.Key, counted []one) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pods := r.sets[set]
	if len(pods) <= len(counted) {
		return
	}
	live := make(map[types.UID]struct{}, len(counted))
	for _, o := range counted {
		live[types.UID(o.rec.Header.UID)] = struct{}{}
	}
	for uid := range pods {
		if _, ok := live[uid]; !ok {
			delete(pods, uid)
		}
	}
}

func (r *readiness) forget(set state.Key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.sets, set)
}
