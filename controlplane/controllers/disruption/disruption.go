// Package disruption keeps the status of PodDisruptionBudgets: how many of
// their pods are healthy, and how many may be evicted now. The eviction
// sub-resource (package api) takes from that number.
//
// Owned fields: the budget's status, of which the eviction sub-resource
// lowers disruptionsAllowed and adds to disruptedPods.
package disruption

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/eviction"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// deletionTimeout is how long an evicted pod counts as going before it counts
// again, from when this controller saw it: the time in disruptedPods is of
// whichever server evicted, and servers' clocks may be hours apart.
const deletionTimeout = 2 * time.Minute

var (
	gk    = schema.GroupKind{Group: policyv1.GroupName, Kind: "PodDisruptionBudget"}
	podGK = schema.GroupKind{Kind: "Pod"}
)

// scaled are the kinds whose number of pods is a budget's denominator.
var scaled = []schema.GroupKind{
	{Group: appsv1.GroupName, Kind: "ReplicaSet"}, {Group: appsv1.GroupName, Kind: "Deployment"},
	{Group: appsv1.GroupName, Kind: "StatefulSet"}, {Kind: "ReplicationController"},
}

type controller struct {
	env loop.Env
	// going has, for each budget, the evicted pods that may still be there.
	// Its one worker owns it. A new leader's is empty: it waits longer.
	going map[state.Key]map[string]evicted
}

// evicted is one entry of disruptedPods, and when it was seen first.
type evicted struct{ at, seen time.Time }

// New makes the disruption controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env, going: map[state.Key]map[string]evicted{}}
	sources := []loop.Source{loop.Self(gk.String()), {Kind: podGK.String(), Keys: c.onPod}}
	for _, k := range scaled {
		sources = append(sources, loop.Source{Kind: k.String(), Keys: c.onScale})
	}
	return &loop.Controller{Name: "disruption", Delay: 50 * time.Millisecond, Sources: sources, Reconcile: c.reconcile}
}

// onPod wakes the budgets that select the pod, before or after the change.
func (c *controller) onPod(ev state.Event, add func(state.Key)) {
	c.env.Reader.Snapshot().Range(gk.String(), ev.Record.Header.Key.Namespace, state.Key{}, func(r *state.Record) bool {
		s, err := c.selector(r)
		if err != nil {
			return true
		}
		for _, p := range []*state.Record{ev.Record, ev.Prev} {
			if p != nil && s.Matches(labels.Set(p.Header.Labels)) {
				add(r.Header.Key)
			}
		}
		return true
	})
}

// onScale wakes all budgets of a namespace when a workload's spec changed.
func (c *controller) onScale(ev state.Event, add func(state.Key)) {
	if ev.Prev != nil && ev.Prev.Header.Generation == ev.Record.Header.Generation {
		return
	}
	c.env.Reader.Snapshot().Range(gk.String(), ev.Record.Header.Key.Namespace, state.Key{}, func(r *state.Record) bool {
		add(r.Header.Key)
		return true
	})
}

func (c *controller) selector(r *state.Record) (labels.Selector, error) {
	obj, err := c.env.Store.Decode(r)
	if err != nil {
		return nil, err
	}
	b, ok := obj.(*policyv1.PodDisruptionBudget)
	if !ok {
		return nil, fmt.Errorf("not a PodDisruptionBudget: %T", obj)
	}
	return metav1.LabelSelectorAsSelector(b.Spec.Selector)
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(gk, key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		delete(c.going, key)
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	b, ok := obj.(*policyv1.PodDisruptionBudget)
	if !ok {
		return 0, loop.Terminal(fmt.Errorf("not a PodDisruptionBudget: %T", obj))
	}
	sel, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		return 0, loop.Terminal(fmt.Errorf("selector: %w", err))
	}
	var pods []member
	scales := map[string]int32{}
	var broken error
	snap := c.env.Reader.Snapshot()
	snap.Range(podGK.String(), key.Namespace, state.Key{}, func(r *state.Record) bool {
		h := &r.Header
		if !sel.Matches(labels.Set(h.Labels)) || h.Phase == string(corev1.PodSucceeded) || h.Phase == string(corev1.PodFailed) {
			return true
		}
		m := member{name: h.Key.Name, ready: h.Ready, leaving: h.Deleted != 0}
		if o, ok := loop.ControllerOf(r); ok {
			m.owner = o.UID
			if _, known := scales[o.UID]; !known {
				uid, n, err := c.scale(snap, key.Namespace, o)
				if err != nil && broken == nil {
					broken = fmt.Errorf("found no controllers for pod %q: %w", h.Key.Name, err)
				}
				scales[o.UID] = 0 // a ReplicaSet of a Deployment counts as the Deployment
				scales[uid] = n
			}
		}
		pods = append(pods, m)
		return true
	})
	now := c.env.Clock.Now()
	st, wait, err := computeStatus(b, pods, scales, broken, c.see(key, b.Status.DisruptedPods, now), now)
	if err != nil {
		c.env.Events.Event(events.Ref(gk, b), events.Warning, "CalculateExpectedPodCountFailed", "Failed to calculate the number of expected pods: "+err.Error())
	}
	return wait, c.write(ctx, b, st)
}

// see returns how long each evicted pod still counts as going, and remembers
// those that are new. While the clock is not trusted they all go on counting.
func (c *controller) see(key state.Key, pods map[string]metav1.Time, now time.Time) map[string]time.Duration {
	if len(pods) == 0 {
		delete(c.going, key)
		return nil
	}
	trusted := c.env.Trust == nil || c.env.Trust() == nil
	known, left := make(map[string]evicted, len(pods)), make(map[string]time.Duration, len(pods))
	for name, at := range pods {
		e, ok := c.going[key][name]
		if !ok || !e.at.Equal(at.Time) || e.seen.After(now) || !trusted {
			e = evicted{at: at.Time, seen: now}
		}
		known[name], left[name] = e, deletionTimeout-now.Sub(e.seen)
	}
	c.going[key] = known
	return left
}

// scale is how many pods the controller of a pod shall have, and whose number
// that is.
func (c *controller) scale(snap state.Snapshot, namespace string, o state.Owner) (uid string, n int32, err error) {
	r, ok := snap.Get(state.Key{Kind: o.Kind, Namespace: namespace, Name: o.Name})
	if !ok || r.Header.UID != o.UID {
		return o.UID, 0, nil // its owner is gone: it counts for nothing
	}
	obj, err := c.env.Store.Decode(r)
	if err != nil {
		return "", 0, err
	}
	if _, ok := obj.(*appsv1.ReplicaSet); ok {
		if d, ok := loop.ControllerOf(r); ok && d.Kind == "Deployment.apps" {
			return c.scale(snap, namespace, d)
		}
	}
	s, err := registry.ScaleOf(obj)
	if err != nil {
		return "", 0, fmt.Errorf("%s %s has no scale", o.Kind, o.Name)
	}
	return o.UID, s.Spec.Replicas, nil
}

// member is one pod that a budget selects.
type member struct {
	name    string
	owner   string // uid; "" if it has no controller
	ready   bool
	leaving bool
}

// computeStatus counts. scales has each owner's wanted number; broken is set
// if one could not be found; going has how long evicted pods still count as
// such. wait is when the first of them counts again. Pure.
func computeStatus(b *policyv1.PodDisruptionBudget, pods []member, scales map[string]int32, broken error, going map[string]time.Duration, now time.Time) (st policyv1.PodDisruptionBudgetStatus, wait time.Duration, err error) {
	st = *b.Status.DeepCopy()
	expected, desired, err := expectation(b, pods, scales, broken)
	if err != nil {
		st.DisruptionsAllowed = 0
		meta.SetStatusCondition(&st.Conditions, metav1.Condition{Type: policyv1.DisruptionAllowedCondition, Status: metav1.ConditionFalse,
			Reason: policyv1.SyncFailedReason, Message: err.Error(), ObservedGeneration: st.ObservedGeneration, LastTransitionTime: metav1.NewTime(now).Rfc3339Copy()})
		return st, 0, err
	}
	st.CurrentHealthy, st.DisruptedPods = 0, nil
	for _, p := range pods {
		if p.leaving {
			continue
		}
		if at, ok := b.Status.DisruptedPods[p.name]; ok {
			if left := going[p.name]; left > 0 {
				if st.DisruptedPods == nil {
					st.DisruptedPods = map[string]metav1.Time{}
				}
				st.DisruptedPods[p.name] = at
				if wait == 0 || left < wait {
					wait = left
				}
				continue
			}
		}
		if p.ready {
			st.CurrentHealthy++
		}
	}
	st.ExpectedPods, st.DesiredHealthy, st.ObservedGeneration = expected, desired, b.Generation
	st.DisruptionsAllowed = max(st.CurrentHealthy-desired, 0)
	if expected <= 0 {
		st.DisruptionsAllowed = 0
	}
	eviction.SetCondition(&st, b.Generation, now)
	return st, wait, nil
}

// expectation is how many pods there shall be, and how many of them healthy.
func expectation(b *policyv1.PodDisruptionBudget, pods []member, scales map[string]int32, broken error) (expected, desired int32, err error) {
	v := b.Spec.MinAvailable
	if b.Spec.MaxUnavailable != nil {
		v = b.Spec.MaxUnavailable
	} else if v == nil {
		return 0, 0, nil // forbids nothing, allows nothing: upstream's reading
	} else if v.Type == intstr.Int {
		return int32(len(pods)), v.IntVal, nil
	}
	if broken != nil {
		return 0, 0, broken
	}
	for _, n := range scales {
		expected += n
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(v, int(expected), true)
	if err != nil {
		return 0, 0, err
	}
	if b.Spec.MaxUnavailable != nil {
		return expected, max(expected-int32(n), 0), nil
	}
	return expected, int32(n), nil
}

func (c *controller) write(ctx context.Context, b *policyv1.PodDisruptionBudget, st policyv1.PodDisruptionBudgetStatus) error {
	if apiequality.Semantic.DeepEqual(st, b.Status) {
		return nil
	}
	_, err := c.env.Store.Update(ctx, gk, b.Namespace, b.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		x, ok := cur.(*policyv1.PodDisruptionBudget)
		// An eviction may have taken from it since: then count again.
		if !ok || x.UID != b.UID || !apiequality.Semantic.DeepEqual(x.Status, b.Status) {
			return nil, loop.ErrMoved
		}
		x.Status = st
		return x, nil
	}, c.env.Write())
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("status: %w", err)
	}
	return nil
}
