// Package podgc removes pods that nothing else will: those of nodes that are
// gone, those that are being deleted but never had a node, and the oldest
// terminated ones beyond a bound.
//
// Owned fields: phase Failed of pods whose node is gone, and the deletion of
// such pods.
package podgc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

const (
	// round is how often the pods are looked through.
	round = 20 * time.Second
	// quarantine is how long a node must have been missing before its pods
	// count as gone: it may be registering anew.
	quarantine = 40 * time.Second
	// keepTerminated is how many terminated pods are kept.
	keepTerminated = 2000
)

var (
	podGK  = schema.GroupKind{Kind: "Pod"}
	nodeGK = schema.GroupKind{Kind: "Node"}
)

// Config of the controller; zero values are defaults.
type Config struct {
	KeepTerminated int
	Quarantine     time.Duration
}

type controller struct {
	env loop.Env
	cfg Config

	mu      sync.Mutex
	missing map[string]time.Time // node -> since when (monotonic) it is missing
}

// New makes the controller; its one key is the whole cluster.
func New(env loop.Env, cfg Config) *loop.Controller {
	if cfg.KeepTerminated <= 0 {
		cfg.KeepTerminated = keepTerminated
	}
	if cfg.Quarantine <= 0 {
		cfg.Quarantine = quarantine
	}
	c := &controller{env: env, cfg: cfg, missing: map[string]time.Time{}}
	all := state.Key{Name: "pods"}
	return &loop.Controller{
		Name: "pod-gc",
		// A deleted node is worth a look at once: it starts its quarantine. One
		// that was declared dead, too: its pods are waited for elsewhere.
		Sources: []loop.Source{{Kind: nodeGK.String(), Keys: func(ev state.Event, add func(state.Key)) {
			if ev.Type == state.Deleted || ev.Record.Header.Labels[manifests.LabelDead] != "" {
				add(all)
			}
		}}},
		Background: func(ctx context.Context, add func(state.Key)) error {
			t := time.NewTicker(round)
			defer t.Stop()
			for {
				add(all)
				select {
				case <-ctx.Done():
					return nil
				case <-t.C:
				}
			}
		},
		Reconcile: c.reconcile,
	}
}

func (c *controller) reconcile(ctx context.Context, _ state.Key) (time.Duration, error) {
	snap := c.env.Reader.Snapshot()
	victims, again := c.choose(snap, time.Now())
	err := loop.Parallel(ctx, len(victims), func(ctx context.Context, i int) error { return c.remove(ctx, victims[i]) })
	return again, err
}

// victim is a pod to remove; fail sets it Failed before, with a reason.
type victim struct {
	rec    *state.Record
	reason string
}

// choose picks the pods to remove, by headers alone.
func (c *controller) choose(snap state.Snapshot, now time.Time) (out []victim, again time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	nodes, dead, marked := map[string]bool{}, map[string]bool{}, map[string]bool{}
	snap.Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		nodes[r.Header.Key.Name] = true
		if r.Header.Labels[manifests.LabelDead] != "" {
			marked[r.Header.Key.Name] = true
		}
		return true
	})
	isDead := func(name string) bool { // only nodes with pods on their way out are looked at
		d, known := dead[name]
		if !known {
			d = c.declaredDead(snap, name)
			dead[name] = d
		}
		return d
	}
	var terminated []*state.Record
	missing := map[string]time.Time{}
	snap.Range(podGK.String(), "", state.Key{}, func(r *state.Record) bool {
		h := &r.Header
		over := h.Phase == string(corev1.PodFailed) || h.Phase == string(corev1.PodSucceeded)
		switch {
		case h.NodeName != "" && !nodes[h.NodeName]:
			since, known := c.missing[h.NodeName]
			if !known {
				since = now
			}
			missing[h.NodeName] = since
			wait, ever := c.kept(r)
			if !ever {
				return true // its name must not be given to another one
			}
			if left := wait - now.Sub(since); left > 0 {
				if again == 0 || left < again {
					again = left
				}
			} else if len(h.Finalizers) == 0 || h.Deleted == 0 {
				out = append(out, victim{r, "PodGC: node no longer exists"})
			}
		case h.NodeName != "" && (h.Deleted != 0 || marked[h.NodeName]) && !over && isDead(h.NodeName):
			// A pod that is being deleted there: as upstream. Any other: only where
			// the node was declared dead here, which also keeps it from returning.
			if len(h.Finalizers) == 0 || h.DeletionGrace == nil || *h.DeletionGrace > 0 {
				out = append(out, victim{r, "PodGC: node was declared dead"})
			}
		case h.NodeName == "" && h.Deleted != 0:
			if len(h.Finalizers) == 0 {
				out = append(out, victim{r, ""})
			}
		case over && h.Deleted == 0:
			terminated = append(terminated, r)
		}
		return true
	})
	c.missing = missing
	if n := len(terminated) - c.cfg.KeepTerminated; n > 0 {
		slices.SortStableFunc(terminated, func(a, b *state.Record) int { return int(a.Header.Created - b.Header.Created) })
		for _, r := range terminated[:n] {
			out = append(out, victim{r, ""})
		}
	}
	return out, again
}

// declaredDead: a user said that the node is off for good, and it is silent.
func (c *controller) declaredDead(snap state.Snapshot, name string) bool {
	r, ok := snap.Get(state.Key{Kind: nodeGK.String(), Name: name})
	if !ok {
		return false
	}
	obj, err := c.env.Store.Decode(r)
	n, ok := obj.(*corev1.Node)
	if err != nil || !ok {
		return false
	}
	silent, out := false, false
	for i := range n.Spec.Taints {
		switch n.Spec.Taints[i].Key {
		case corev1.TaintNodeOutOfService:
			out = true
		case corev1.TaintNodeUnreachable:
			silent = true
		}
	}
	return silent && out
}

// kept is how long a pod is kept whose node object is gone; ever is false if
// it is kept until a user removes it. Deleting a Node is not declaring it
// dead: a StatefulSet's pod may still run there, unless it stops by itself.
func (c *controller) kept(r *state.Record) (wait time.Duration, ever bool) {
	o, ok := loop.ControllerOf(r)
	if !ok || o.Kind != "StatefulSet.apps" {
		return c.cfg.Quarantine, true
	}
	obj, err := c.env.Store.Decode(r)
	if p, ok := obj.(*corev1.Pod); err == nil && ok {
		if after, finite := lost.StopsAfter(p); finite {
			return max(c.cfg.Quarantine, after), true
		}
	}
	return 0, false
}

var errMoved = errors.New("another pod has the name by now")

func (c *controller) remove(ctx context.Context, v victim) error {
	h := &v.rec.Header
	if v.reason != "" && h.Phase != string(corev1.PodFailed) && h.Phase != string(corev1.PodSucceeded) {
		_, err := c.env.Store.Update(ctx, podGK, h.Key.Namespace, h.Key.Name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
			p, ok := cur.(*corev1.Pod)
			if !ok || string(p.UID) != h.UID {
				return nil, errMoved
			}
			p.Status.Phase = corev1.PodFailed
			lost.SetCondition(&p.Status, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue,
				Reason: "DeletionByPodGC", Message: v.reason}, c.env.Clock.Now())
			return p, nil
		}, c.env.Write())
		if apierrors.IsNotFound(err) || errors.Is(err, errMoved) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("fail pod %s/%s: %w", h.Key.Namespace, h.Key.Name, err)
		}
	}
	uid, zero := types.UID(h.UID), int64(0)
	_, _, err := c.env.Store.Delete(ctx, podGK, h.Key.Namespace, h.Key.Name, registry.DeleteOptions{UID: &uid, GracePeriodSeconds: &zero, Term: c.env.Term})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("remove pod %s/%s: %w", h.Key.Namespace, h.Key.Name, err)
	}
	return nil
}
