package statefulset

import (
	"context"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// NodesAway is the condition that names the nodes that a set waits for, and its
// pods there; a DaemonSet has one of the same name.
const NodesAway appsv1.StatefulSetConditionType = "NodesAway"

// computeStatus counts, as upstream does.
func (r *round) computeStatus() appsv1.StatefulSetStatus {
	st := appsv1.StatefulSetStatus{ObservedGeneration: r.set.Generation, CollisionCount: r.set.Status.CollisionCount,
		CurrentRevision: r.before.Name, UpdateRevision: r.h.Current.Name}
	for _, list := range [][]replica{r.replicas, r.condemned} {
		for i := range list {
			x := &list[i]
			if !x.exists {
				continue
			}
			st.Replicas++
			if x.ready {
				st.ReadyReplicas++
			}
			if x.available {
				st.AvailableReplicas++
			}
			if x.leaving {
				continue
			}
			if r.recs[x.name].Header.Labels[appsv1.ControllerRevisionHashLabelKey] == st.CurrentRevision {
				st.CurrentReplicas++
			}
			if x.current {
				st.UpdatedReplicas++
			}
		}
	}
	if n := *r.set.Spec.Replicas; st.UpdatedReplicas == n && st.ReadyReplicas == n && st.Replicas == n {
		st.CurrentRevision, st.CurrentReplicas = st.UpdateRevision, st.UpdatedReplicas
	}
	for _, c := range r.set.Status.Conditions {
		if c.Type != NodesAway && c.Type != NamesTaken {
			st.Conditions = append(st.Conditions, c)
		}
	}
	if len(r.away) > 0 {
		st.Conditions = append(st.Conditions, awayCondition(r.set.Status.Conditions, r.away, r.now))
	}
	if len(r.held) > 0 {
		st.Conditions = append(st.Conditions, takenCondition(r.set.Status.Conditions, r.held, r.foreign, r.now))
	}
	return st
}

func awayCondition(old []appsv1.StatefulSetCondition, away []awayPod, now time.Time) appsv1.StatefulSetCondition {
	nodes := map[string]bool{}
	var pods []string
	for _, p := range away {
		nodes[p.node] = true
		text := p.name + " (node " + p.node + ")"
		if p.earlier {
			text = p.name + " (an earlier pod of that name, node " + p.node + ")"
		}
		pods = append(pods, text)
	}
	more := ""
	if len(pods) > mostNames {
		pods, more = pods[:mostNames], fmt.Sprintf(" and %d more", len(away)-mostNames)
	}
	return keepSince(old, appsv1.StatefulSetCondition{Type: NodesAway, Status: corev1.ConditionTrue, Reason: "NodesNotReady", LastTransitionTime: metav1.NewTime(now).Rfc3339Copy(),
		Message: fmt.Sprintf("%d node(s) are offline or not ready: %s%s may still run where nobody can be asked, so nothing takes their place: bring the node back, declare it dead ('dunlin node declare-dead NAME'), or, where it was deleted already, delete the pod by force if it surely runs no more",
			len(nodes), strings.Join(pods, ", "), more)})
}

func (r *round) writeStatus(ctx context.Context) error {
	st := r.computeStatus()
	if apiequality.Semantic.DeepEqual(st, r.set.Status) {
		return nil
	}
	_, err := r.c.env.Store.Update(ctx, gk, r.set.Namespace, r.set.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		s, ok := cur.(*appsv1.StatefulSet)
		if !ok || s.UID != r.set.UID {
			return nil, loop.ErrMoved
		}
		s.Status = st
		return s, nil
	}, r.c.env.Write())
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	for _, c := range news(r.set.Status.Conditions, st.Conditions) {
		kind := events.Warning
		if c.Type == NamesTaken && !r.foreign {
			kind = events.Normal // what was deleted ends
		}
		r.note(kind, string(c.Type), "%s", c.Message)
	}
	return nil
}
