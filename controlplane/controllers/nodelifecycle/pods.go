package nodelifecycle

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// fate is what becomes of one pod.
type fate uint8

const (
	stay    fate = iota
	unready      // its node is silent: not Ready, nothing more
	lose         // lost: counted no more
	found        // take the mark away
	evict        // delete
	free         // delete at once: it has surely stopped by itself
	retire       // delete: it has stopped by itself and was replaced
)

// podFate decides about one pod of a node. again is when to look once more;
// never if not at all. elapsed is how long a taint has been there; witnessed
// how long of that this leader has seen itself, which is all that counts where
// two of a pod must not run. Pure.
func podFate(pod *corev1.Pod, taints []corev1.Taint, v verdict, ownerKind string, elapsed, witnessed func(*corev1.Taint) time.Duration) (f fate, again time.Duration) {
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return stay, never
	}
	var users, unreachable []corev1.Taint
	for _, t := range taints {
		switch {
		case t.Effect != corev1.TaintEffectNoExecute:
		case t.Key == corev1.TaintNodeUnreachable:
			unreachable = append(unreachable, t)
		default:
			users = append(users, t)
		}
	}
	again = never
	if pod.DeletionTimestamp == nil && len(users) > 0 {
		left := tolerance(pod.Spec.Tolerations, users, elapsed)
		if left == 0 {
			return evict, never
		}
		again = left
	}
	switch {
	case v.frozen:
		return stay, again
	case len(unreachable) > 0:
		left := tolerance(pod.Spec.Tolerations, unreachable, elapsed)
		if after, wait := lost.ReplacedAfter(pod, ownerKind); wait {
			left = never
		} else if left != never {
			left = max(left, after-elapsed(&unreachable[0]))
		}
		if stops, finite := lost.StopsAfter(pod); finite {
			// It asked to be there at most once: nothing takes its place before
			// it has stopped by itself. A StatefulSet's name is then freed.
			stops -= witnessed(&unreachable[0])
			if ownerKind == statefulSet && stops <= 0 {
				return free, never
			}
			if left = max(left, stops); ownerKind == statefulSet {
				left = stops
			}
		}
		if left <= 0 {
			return lose, again
		}
		return unready, min(again, left)
	case !v.silent && !v.stale:
		// It has stopped by itself and another one runs: counted again, it
		// could be started beside that before its controller has decided. (A
		// Job may start two, and counts what each made.)
		if _, finite := lost.StopsAfter(pod); finite && lost.Is(pod) && pod.DeletionTimestamp == nil && ownerKind != "Job.batch" {
			return retire, never
		}
		return found, again
	}
	return stay, again
}

// pods brings every pod of the node to its fate, and returns when to look
// again.
func (c *controller) pods(ctx context.Context, node *corev1.Node, v verdict) (time.Duration, error) {
	elapsed, witnessed := c.elapsed(node.Name)
	type step struct {
		pod  *corev1.Pod
		fate fate
	}
	var steps []step
	again := never
	var failed error
	quiet := !v.silent && !c.hasClocks(node.Name)
	c.env.Reader.Snapshot().PodsOnNode(node.Name, func(r *state.Record) bool {
		if quiet && r.Header.Ready && !lost.MayBe(r) {
			return true // neither marked nor to be
		}
		obj, err := c.env.Store.Decode(r)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("decode pod %s: %w", r.Header.Key.Name, err))
			return true
		}
		pod, ok := obj.(*corev1.Pod)
		if !ok {
			return true
		}
		owner, _ := loop.ControllerOf(r)
		f, wait := podFate(pod, node.Spec.Taints, v, owner.Kind, elapsed, witnessed)
		if f == evict {
			wait = time.Second // while it ends it may have to lose, or get, the mark of silence
		}
		again = min(again, wait)
		if needed(pod, f) {
			steps = append(steps, step{pod, f})
		}
		return true
	})
	err := loop.Parallel(ctx, len(steps), func(ctx context.Context, i int) error { return c.act(ctx, node, steps[i].pod, steps[i].fate) })
	if again == never {
		again = 0
	}
	return again, errors.Join(failed, err)
}

func (c *controller) hasClocks(node string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.clocks[node]) > 0
}

// needed says whether the fate is not yet what the pod shows.
func needed(pod *corev1.Pod, f fate) bool {
	ready, marked := false, false
	for i := range pod.Status.Conditions {
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodReady {
			ready, marked = c.Status == corev1.ConditionTrue, c.Reason == lost.Reason
		}
	}
	switch f {
	case unready:
		return ready
	case lose:
		return ready || !lost.Is(pod)
	case found:
		return marked || lost.Is(pod)
	case evict, free, retire:
		return true
	}
	return false
}

func (c *controller) act(ctx context.Context, node *corev1.Node, pod *corev1.Pod, f fate) error {
	now := c.env.Clock.Now()
	stamp := now.UTC().Format(time.RFC3339)
	about := events.Ref(podGK, pod)
	switch f {
	case unready:
		return c.status(ctx, pod, func(p *corev1.Pod) { lost.SetNotReady(&p.Status, node.Name, now) })
	case lose:
		c.env.Events.Event(about, events.Warning, "NodeUnreachable", "Node "+node.Name+" does not renew its lease: the pod is not counted until it is back")
		return c.status(ctx, pod, func(p *corev1.Pod) {
			lost.SetStatus(&p.Status, node.Name, now)
			annotate(p, lost.SinceAnnotation, stamp)
			delete(p.Annotations, lost.ReturnedAnnotation)
		})
	case found:
		c.env.Events.Event(about, events.Normal, "NodeReachable", "Node "+node.Name+" is back, and the pod counts again")
		return c.status(ctx, pod, func(p *corev1.Pod) {
			if lost.Is(p) {
				annotate(p, lost.ReturnedAnnotation, p.Annotations[lost.SinceAnnotation]+"/"+stamp)
			}
			delete(p.Annotations, lost.SinceAnnotation)
			lost.ClearStatus(&p.Status, now)
		})
	case evict:
		return c.evict(ctx, pod, now)
	case retire:
		c.env.Events.Event(about, events.Normal, "NodeReachable", "Node "+node.Name+" is back; the pod stopped by itself at its stop deadline and was replaced, so it goes")
		return c.delete(ctx, pod, nil)
	case free:
		c.env.Events.Event(about, events.Warning, "NodeUnreachable", "Node "+node.Name+" is silent for longer than the pod's stop deadline: it has stopped by itself, and its name is free")
		zero := int64(0) // it runs no more: its node is not asked
		return c.delete(ctx, pod, &zero)
	}
	return nil
}

func annotate(p *corev1.Pod, key, value string) {
	if p.Annotations == nil {
		p.Annotations = map[string]string{}
	}
	p.Annotations[key] = value
}

// evict deletes a pod that does not tolerate a NoExecute taint.
func (c *controller) evict(ctx context.Context, pod *corev1.Pod, now time.Time) error {
	c.env.Events.Event(events.Ref(podGK, pod), events.Normal, "TaintManagerEviction", "Marking for deletion Pod "+pod.Namespace+"/"+pod.Name)
	err := c.status(ctx, pod, func(p *corev1.Pod) {
		lost.SetCondition(&p.Status, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue,
			Reason: "DeletionByTaintManager", Message: "Taint manager: deleting due to NoExecute taint"}, now)
	})
	if err != nil {
		return err
	}
	return c.delete(ctx, pod, nil)
}

// delete removes the pod, if it is still that one; grace in seconds, nil is its
// own.
func (c *controller) delete(ctx context.Context, pod *corev1.Pod, grace *int64) error {
	uid := pod.UID
	_, _, err := c.env.Store.Delete(ctx, podGK, pod.Namespace, pod.Name, registry.DeleteOptions{UID: &uid, GracePeriodSeconds: grace, Term: c.env.Term})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete pod %s: %w", pod.Name, err)
	}
	return nil
}

// status writes a pod's status and annotations, if it is still that pod.
func (c *controller) status(ctx context.Context, pod *corev1.Pod, change func(*corev1.Pod)) error {
	_, err := c.env.Store.Update(ctx, podGK, pod.Namespace, pod.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
		p, ok := cur.(*corev1.Pod)
		if !ok || p.UID != pod.UID || p.Spec.NodeName != pod.Spec.NodeName {
			return nil, errMoved
		}
		change(p)
		return p, nil
	}, c.env.Write())
	if apierrors.IsNotFound(err) || errors.Is(err, errMoved) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("status of pod %s: %w", pod.Name, err)
	}
	return nil
}

// statefulSet is the kind of controller whose pods' names are theirs.
const statefulSet = "StatefulSet.apps"
