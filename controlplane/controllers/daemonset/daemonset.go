// Package daemonset keeps one pod on every node that a DaemonSet's template
// fits, and updates them within its budget.
//
// Owned fields: the existence of the set's pods, their controller reference,
// its ControllerRevisions, and its status. Pods are placed by the scheduler;
// their node affinity names the node.
//
// A node that is silent or not ready is away: its pods are left as they are
// until it is back, and it counts neither as wanted nor against the budget,
// so that a fleet of which some are always off can be updated. Which they
// are stands in the condition NodesAway.
package daemonset

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/controllers/claim"
	"github.com/dunlin-project/dunlin/controlplane/controllers/history"
	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/controllers/lost"
	"github.com/dunlin-project/dunlin/controlplane/controllers/readiness"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// burst bounds the creates, and the deletes, of one round.
const burst = 250

var (
	gk     = schema.GroupKind{Group: appsv1.GroupName, Kind: "DaemonSet"}
	gvk    = appsv1.SchemeGroupVersion.WithKind("DaemonSet")
	nodeGK = schema.GroupKind{Kind: "Node"}
	kind   = claim.Kind[*appsv1.DaemonSet]{GK: gk, Selector: func(ds *appsv1.DaemonSet) *metav1.LabelSelector { return ds.Spec.Selector }}
)

type controller struct {
	env     loop.Env
	orphans *claim.Orphans
	seen    *readiness.Tracker
	failing *failures
}

// New makes the DaemonSet controller.
func New(env loop.Env) *loop.Controller {
	c := &controller{env: env, orphans: claim.NewOrphans(), seen: readiness.New(), failing: newFailures()}
	return &loop.Controller{
		Name: "daemonset", Workers: 2,
		Delay: 100 * time.Millisecond, // many nodes come and go together
		Sources: []loop.Source{
			loop.Self(gk.String()),
			loop.Controlled(claim.PodGK.String(), gk.String()),
			loop.Controlled(history.GK.String(), gk.String()),
			c.orphans.Source(env, gk.String(), kind.SelectorOf(env)),
			{Kind: nodeGK.String(), Keys: c.onNode},
		},
		Reconcile: c.reconcile,
	}
}

// onNode wakes every set: any may want the node.
func (c *controller) onNode(ev state.Event, add func(state.Key)) {
	c.env.Reader.Snapshot().Range(gk.String(), "", state.Key{}, func(r *state.Record) bool {
		add(r.Header.Key)
		return true
	})
}

// round is one reconcile.
type round struct {
	c    *controller
	ds   *appsv1.DaemonSet
	key  state.Key
	now  time.Time
	hash string
	// nodes that the set is or should be on, by name.
	nodes []node
	away  []string
	recs  map[string]*state.Record // pods by name
	// wait until a pod becomes available, or one may be tried again.
	wait time.Duration
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	owner, err := kind.Find(c.env, key)
	if owner.Gone {
		c.seen.Forget(key)
	}
	if err != nil || !owner.Live {
		return 0, err
	}
	ds, sel := owner.Object, owner.Selector
	h, err := history.Sync(ctx, c.env, history.Owner{Object: ds, GVK: gvk, Selector: sel, Template: &ds.Spec.Template})
	if err != nil {
		return 0, err
	}
	r := &round{c: c, ds: ds, key: key, now: c.env.Clock.Now(), hash: history.Hash(h.Current)}
	if err := r.look(ctx, sel); err != nil {
		return 0, err
	}
	done, failed := r.act(ctx)
	if done {
		if err := r.look(ctx, sel); err != nil { // what was just done shows at once
			return 0, errors.Join(failed, err)
		}
	}
	used := r.revisions()
	err = errors.Join(failed, r.writeStatus(ctx),
		history.Truncate(ctx, c.env, h, ds.Spec.RevisionHistoryLimit, func(rev *appsv1.ControllerRevision) bool { return used[history.Hash(rev)] }))
	return r.wait, err
}

// look reads the set's pods and all nodes.
func (r *round) look(ctx context.Context, sel labels.Selector) error {
	recs, err := r.c.orphans.Pods(ctx, r.c.env, claim.Owner{Object: r.ds, GVK: gvk, Selector: sel})
	if err != nil {
		return err
	}
	r.nodes, r.away, r.wait, r.recs = nil, nil, 0, make(map[string]*state.Record, len(recs))
	pods, leaving := map[string][]pod{}, map[string]int{}
	var living []types.UID
	for _, rec := range recs {
		name, x, err := r.pod(rec)
		if err != nil {
			return err
		}
		if rec.Header.Deleted != 0 {
			leaving[name]++
			continue
		}
		r.recs[x.name] = rec
		pods[name] = append(pods[name], x)
		living = append(living, types.UID(rec.Header.UID))
	}
	if r.ds.Spec.MinReadySeconds > 0 {
		r.c.seen.Keep(r.key, len(living), func(yield func(types.UID) bool) {
			for _, uid := range living {
				if !yield(uid) {
					return
				}
			}
		})
	}
	place := newPlacement(r.ds)
	var failed error
	r.c.env.Reader.Snapshot().Range(nodeGK.String(), "", state.Key{}, func(rec *state.Record) bool {
		obj, err := r.c.env.Store.Decode(rec)
		n, ok := obj.(*corev1.Node)
		if err != nil || !ok {
			failed = fmt.Errorf("decode node %s: %w", rec.Header.Key.Name, err)
			return false
		}
		x := node{name: n.Name, pods: pods[n.Name], leaving: leaving[n.Name]}
		delete(pods, n.Name)
		x.want, x.keep, x.away = place.judge(n)
		if x.away {
			r.away = append(r.away, n.Name)
		}
		if left := r.c.failing.left(failureKey{r.ds.UID, n.Name}, time.Now()); left > 0 {
			x.backingOff = true
			r.later(left)
		}
		if x.want || x.away || len(x.pods) > 0 {
			r.nodes = append(r.nodes, x)
		}
		return true
	})
	// Pods of nodes that are gone: those that were never bound are ours to
	// remove, the others the pod garbage collector's.
	for name, list := range pods {
		x := node{name: name}
		for _, p := range list {
			if !p.bound {
				x.pods = append(x.pods, p)
			}
		}
		if len(x.pods) > 0 {
			r.nodes = append(r.nodes, x)
		}
	}
	return failed
}

// pod reads one record: mostly its header is enough.
func (r *round) pod(rec *state.Record) (nodeName string, x pod, err error) {
	h := &rec.Header
	x = pod{
		name: h.Key.Name, current: h.Labels[appsv1.ControllerRevisionHashLabelKey] == r.hash, bound: h.NodeName != "",
		ready: h.Ready, failed: h.Phase == string(corev1.PodFailed), done: h.Phase == string(corev1.PodSucceeded), created: h.Created,
	}
	nodeName = h.NodeName
	var p *corev1.Pod
	minReady := time.Duration(r.ds.Spec.MinReadySeconds) * time.Second
	if !x.bound || (x.bound && !x.ready) || minReady > 0 {
		if p, err = claim.Decode(r.c.env, rec); err != nil {
			return "", x, err
		}
		nodeName = target(p)
		x.silent = !x.ready && !claim.Over(rec) && silent(p)
	}
	x.available = x.ready && !x.failed && !x.done
	if minReady > 0 {
		left := minReady - r.c.seen.For(r.key, types.UID(h.UID), x.ready, p, r.now)
		if x.available && left > 0 {
			x.available = false
			r.later(left)
		}
	}
	return nodeName, x, nil
}

func silent(p *corev1.Pod) bool {
	for i := range p.Status.Conditions {
		if c := &p.Status.Conditions[i]; c.Type == corev1.PodReady {
			return c.Reason == lost.Reason
		}
	}
	return false
}

// later asks for another look after d at the latest.
func (r *round) later(d time.Duration) {
	if r.wait == 0 || d < r.wait {
		r.wait = max(d, time.Millisecond)
	}
}

func (r *round) revisions() map[string]bool {
	used := map[string]bool{}
	for _, rec := range r.recs {
		used[rec.Header.Labels[appsv1.ControllerRevisionHashLabelKey]] = true
	}
	return used
}

// act carries out the round's plan, and says whether there was anything to do.
func (r *round) act(ctx context.Context) (done bool, err error) {
	s, err := budget(r.ds, wanted(r.nodes))
	if err != nil {
		return false, loop.Terminal(fmt.Errorf("update strategy of %s: %w", r.ds.Name, err))
	}
	p := decide(r.nodes, s)
	for _, name := range p.failed {
		node := r.recs[name].Header.NodeName
		r.c.failing.note(failureKey{r.ds.UID, node}, time.Now())
		r.note(events.Warning, "FailedDaemonPod", "Found failed daemon pod %s/%s on node %s, will try to kill it", r.ds.Namespace, name, node)
	}
	for _, name := range p.done {
		r.note(events.Normal, "SucceededDaemonPod", "Found succeeded daemon pod %s/%s on node %s, will try to delete it",
			r.ds.Namespace, name, r.recs[name].Header.NodeName)
	}
	remove := p.remove[:min(len(p.remove), burst)]
	gone := loop.Parallel(ctx, len(remove), func(ctx context.Context, i int) error {
		if err := claim.Delete(ctx, r.c.env, r.recs[remove[i]]); err != nil {
			r.note(events.Warning, "FailedDelete", "Error deleting: %v", err)
			return err
		}
		r.note(events.Normal, "SuccessfulDelete", "Deleted pod: %s", remove[i])
		return nil
	})
	return len(p.remove)+len(p.create) > 0, errors.Join(gone, r.create(ctx, p.create[:min(len(p.create), burst)]))
}

// create makes pods in batches of 1, 2, 4, ...: when they are refused (by a
// quota, say), few attempts are wasted.
func (r *round) create(ctx context.Context, nodes []string) error {
	for batch := 1; len(nodes) > 0; batch *= 2 {
		now := nodes[:min(batch, len(nodes))]
		nodes = nodes[len(now):]
		err := loop.Parallel(ctx, len(now), func(ctx context.Context, i int) error {
			obj, err := r.c.env.Store.Create(ctx, newPod(r.ds, r.hash, now[i]), r.c.env.Write())
			switch {
			case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
				return nil
			case err != nil:
				if ctx.Err() == nil {
					r.note(events.Warning, "FailedCreate", "Error creating: %v", err)
				}
				return fmt.Errorf("create pod for node %s: %w", now[i], err)
			}
			if m, ok := obj.(metav1.Object); ok {
				r.note(events.Normal, "SuccessfulCreate", "Created pod: %s", m.GetName())
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *round) note(eventType, reason, format string, args ...any) {
	r.c.env.Events.Event(events.Ref(gk, r.ds), eventType, reason, fmt.Sprintf(format, args...))
}
