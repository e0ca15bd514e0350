package daemonset

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// NodesAway is the condition that names the nodes that a set waits for.
const NodesAway appsv1.DaemonSetConditionType = "NodesAway"

// computeStatus counts, as upstream does; nodes that are away count nowhere
// but in the condition. Pure.
func computeStatus(old appsv1.DaemonSetStatus, generation int64, nodes []node, now time.Time) appsv1.DaemonSetStatus {
	st := appsv1.DaemonSetStatus{ObservedGeneration: generation, CollisionCount: old.CollisionCount}
	var waiting []string
	for _, n := range nodes {
		switch {
		case n.away:
			waiting = append(waiting, n.name+" ("+pending(n.pods)+")")
			continue
		case !n.want:
			if len(n.pods) > 0 {
				st.NumberMisscheduled++
			}
			continue
		}
		st.DesiredNumberScheduled++
		if len(n.pods) == 0 {
			continue
		}
		st.CurrentNumberScheduled++
		first := slices.MinFunc(n.pods, order)
		if first.ready {
			st.NumberReady++
		}
		if first.available {
			st.NumberAvailable++
		}
		if first.current {
			st.UpdatedNumberScheduled++
		}
	}
	st.NumberUnavailable = st.DesiredNumberScheduled - st.NumberAvailable
	for _, c := range old.Conditions {
		if c.Type != NodesAway {
			st.Conditions = append(st.Conditions, c)
		}
	}
	if len(waiting) > 0 {
		st.Conditions = append(st.Conditions, awayCondition(old.Conditions, waiting, now))
	}
	return st
}

// pending is what a node that is away waits for.
func pending(pods []pod) string {
	switch {
	case len(pods) == 0:
		return "no pod yet"
	case slices.ContainsFunc(pods, func(p pod) bool { return !p.current }):
		return "old revision"
	}
	return "up to date"
}

func awayCondition(old []appsv1.DaemonSetCondition, waiting []string, now time.Time) appsv1.DaemonSetCondition {
	const most = 20 // names; a site that is cut off may have thousands
	names := waiting
	more := ""
	if len(names) > most {
		names, more = names[:most], fmt.Sprintf(" and %d more", len(waiting)-most)
	}
	c := appsv1.DaemonSetCondition{Type: NodesAway, Status: corev1.ConditionTrue, Reason: "NodesNotReady", LastTransitionTime: metav1.NewTime(now).Rfc3339Copy(),
		Message: fmt.Sprintf("%d node(s) are offline or not ready, count neither as desired nor as unavailable, and are brought up to date when they are back: %s%s",
			len(waiting), strings.Join(names, ", "), more)}
	for _, o := range old {
		if o.Type == NodesAway && o.Status == c.Status {
			c.LastTransitionTime = o.LastTransitionTime
		}
	}
	return c
}

func (r *round) writeStatus(ctx context.Context) error {
	st := computeStatus(r.ds.Status, r.ds.Generation, r.nodes, r.now)
	if apiequality.Semantic.DeepEqual(st, r.ds.Status) {
		return nil
	}
	_, err := r.c.env.Store.Update(ctx, gk, r.ds.Namespace, r.ds.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		ds, ok := cur.(*appsv1.DaemonSet)
		if !ok || ds.UID != r.ds.UID {
			return nil, loop.ErrMoved
		}
		ds.Status = st
		return ds, nil
	}, r.c.env.Write())
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("status: %w", err)
	}
	if was, is := away(r.ds.Status), away(st); is != "" && was == "" {
		r.note(events.Warning, "NodesAway", "%s", is)
	} else if is == "" && was != "" {
		r.note(events.Normal, "NodesBack", "All nodes are back")
	}
	return nil
}

func away(st appsv1.DaemonSetStatus) string {
	for _, c := range st.Conditions {
		if c.Type == NodesAway && c.Status == corev1.ConditionTrue {
			return c.Message
		}
	}
	return ""
}

// failures holds back the replacement of pods that a node refuses again and
// again. Bounded: an entry is forgotten when its node has been quiet.
type failures struct {
	mu   sync.Mutex
	seen map[failureKey]failure
}

type failureKey struct {
	set  types.UID
	node string
}

type failure struct {
	n     int
	until time.Time // monotonic
}

const (
	failureBase = time.Second
	failureMax  = 15 * time.Minute
)

func newFailures() *failures { return &failures{seen: map[failureKey]failure{}} }

// note counts a failure; the next pod waits twice as long.
func (f *failures) note(k failureKey, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, x := range f.seen {
		if now.Sub(x.until) > 2*failureMax {
			delete(f.seen, key)
		}
	}
	x := f.seen[k]
	d := failureMax
	if x.n < 10 {
		d = min(failureBase<<x.n, failureMax)
	}
	f.seen[k] = failure{x.n + 1, now.Add(d)}
}

// left is how long the next failed pod of the node is kept.
func (f *failures) left(k failureKey, now time.Time) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.seen[k].until.Sub(now)
}
