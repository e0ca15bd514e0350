package statefulset

import (
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/claim"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// NamesTaken is the condition that names the set's pods that cannot be made
// since another pod has their name, and what that one waits for. One on a
// silent node stands in NodesAway instead.
const NamesTaken appsv1.StatefulSetConditionType = "NamesTaken"

// recheck is how often a set looks again at names that are taken: what makes
// them free wakes it, this is for what it is not told of (a node that falls
// silent under a pod that was not Ready).
const recheck = 30 * time.Second

var nodeGK = schema.GroupKind{Kind: "Node"}

// nameSource wakes the set for which a pod's end, whoever's it was, makes a
// name free.
func (c *controller) nameSource() loop.Source {
	return loop.Source{Kind: claim.PodGK.String(), Keys: func(ev state.Event, add func(state.Key)) {
		k := ev.Record.Header.Key
		i := strings.LastIndexByte(k.Name, '-')
		if ev.Type != state.Deleted || i < 1 || ordinal(k.Name[:i], k.Name) < 0 {
			return
		}
		set := state.Key{Kind: gk.String(), Namespace: k.Namespace, Name: k.Name[:i]}
		if _, ok := c.env.Reader.Snapshot().Get(set); ok {
			add(set)
		}
	}}
}

// taken finds the pods of others that have the names of missing ones: mostly
// those of a set of the same name that was deleted and made anew while they
// still end. Nothing is tried until a name is free: it would fail each time.
func (r *round) taken() error {
	snap := r.c.env.Reader.Snapshot()
	for i := range r.replicas {
		x := &r.replicas[i]
		if x.exists {
			continue
		}
		rec, ok := snap.Get(state.Key{Kind: claim.PodGK.String(), Namespace: r.set.Namespace, Name: x.name})
		if !ok {
			continue
		}
		x.taken = true
		r.later(recheck)
		p, err := claim.Decode(r.c.env, rec)
		if err != nil {
			return err
		}
		owner, _ := loop.ControllerOf(rec)
		earlier := owner.Kind == gk.String() && owner.Name == r.set.Name
		silent, err := r.silent(p)
		switch {
		case err != nil:
			return err
		case silent && (earlier || p.DeletionTimestamp != nil):
			r.away = append(r.away, awayPod{name: x.name, node: p.Spec.NodeName, earlier: true})
		case p.DeletionTimestamp != nil && p.Spec.NodeName != "":
			r.held = append(r.held, fmt.Sprintf("the earlier pod %s is still being stopped on node %s", x.name, p.Spec.NodeName))
		case p.DeletionTimestamp != nil || earlier:
			r.held = append(r.held, fmt.Sprintf("the earlier pod %s is being deleted", x.name))
		default:
			r.foreign = true
			r.held = append(r.held, fmt.Sprintf("pod %s exists and is not of this set (%s): delete it, or give the set another name", x.name, ownerText(owner)))
		}
	}
	return nil
}

func ownerText(o state.Owner) string {
	if o.Name == "" {
		return "it has no controller"
	}
	return "its controller is " + o.Kind + " " + o.Name
}

// silent says whether a pod's node is not heard of: by the pod's mark, or,
// where that has none since it was not Ready before either, by the node.
func (r *round) silent(p *corev1.Pod) (bool, error) {
	if p.Spec.NodeName == "" {
		return false, nil
	}
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; c.Type == corev1.PodReady && c.Reason == lost.Reason {
			return true, nil
		}
	}
	obj, err := r.c.env.Store.Get(nodeGK, "", p.Spec.NodeName)
	if apierrors.IsNotFound(err) {
		return false, nil // its pods are removed
	}
	n, ok := obj.(*corev1.Node)
	if err != nil || !ok {
		return false, fmt.Errorf("node %s: %w", p.Spec.NodeName, err)
	}
	for i := range n.Status.Conditions {
		if c := &n.Status.Conditions[i]; c.Type == corev1.NodeReady {
			return c.Status != corev1.ConditionTrue, nil
		}
	}
	return false, nil
}

func takenCondition(old []appsv1.StatefulSetCondition, held []string, foreign bool, now time.Time) appsv1.StatefulSetCondition {
	reason := "PodStopping"
	if foreign {
		reason = "PodOfAnother"
	}
	more := ""
	if n := len(held); n > mostNames {
		held, more = held[:mostNames], fmt.Sprintf(" and %d more", n-mostNames)
	}
	return keepSince(old, appsv1.StatefulSetCondition{Type: NamesTaken, Status: corev1.ConditionTrue, Reason: reason,
		LastTransitionTime: metav1.NewTime(now).Rfc3339Copy(),
		Message:            "pods are missing until their names are free: " + strings.Join(held, "; ") + more})
}

// mostNames that a condition lists, as of a DaemonSet.
const mostNames = 20

// keepSince gives a condition the time at which it began.
func keepSince(old []appsv1.StatefulSetCondition, c appsv1.StatefulSetCondition) appsv1.StatefulSetCondition {
	if i := slices.IndexFunc(old, func(o appsv1.StatefulSetCondition) bool { return o.Type == c.Type }); i >= 0 {
		c.LastTransitionTime = old[i].LastTransitionTime
	}
	return c
}

// news are the conditions that there were not before, to be told as events.
func news(old, now []appsv1.StatefulSetCondition) (out []appsv1.StatefulSetCondition) {
	for _, c := range now {
		if c.Type != NodesAway && c.Type != NamesTaken {
			continue
		}
		if !slices.ContainsFunc(old, func(o appsv1.StatefulSetCondition) bool { return o.Type == c.Type && o.Reason == c.Reason }) {
			out = append(out, c)
		}
	}
	return out
}
