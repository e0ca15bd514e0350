// Package nodelifecycle turns lease ages into node conditions and taints,
// and taints into evicted or lost pods.
//
// Owned fields: the Ready condition of a silent node, the taints
// node.kubernetes.io/*, and of pods the mark of package lost, the Ready
// condition while their node is silent, and deletion by NoExecute taints.
//
// What to do is decided by the pure functions in policy.go and taints.go.
// One goroutine (Background) looks at the leases; reconciles act on its last
// verdict of a node.
package nodelifecycle

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

const (
	// lookEvery is how often the leases are looked at.
	lookEvery = 250 * time.Millisecond
	// evictEvery is the rate at which a zone's nodes are given up, after the
	// first.
	evictEvery = 10 * time.Second
	// reasonSilent is the reason of Ready=Unknown; upstream's.
	reasonSilent = "NodeStatusUnknown"
)

var (
	nodeGK = schema.GroupKind{Kind: "Node"}
	podGK  = schema.GroupKind{Kind: "Pod"}
)

// Config of the controller.
type Config struct {
	Leases Leases
	// LeaderZone is this server's site; "" is DefaultZone.
	LeaderZone string
	// EvictEvery overrides the rate for tests; 0 is the default.
	EvictEvery time.Duration
}

type controller struct {
	env      loop.Env
	cfg      Config
	assessor *assessor // owned by look, under mu

	mu       sync.Mutex
	verdicts map[string]verdict          // nil until the leases were looked at
	tainted  map[string]bool             // nodes with NoExecute taints, as last reconciled
	clocks   map[string]map[string]since // node -> taint
}

// New makes the controller.
func New(env loop.Env, cfg Config) *loop.Controller {
	if cfg.EvictEvery <= 0 {
		cfg.EvictEvery = evictEvery
	}
	c := &controller{env: env, cfg: cfg, assessor: newAssessor(cfg.LeaderZone, cfg.EvictEvery),
		tainted: map[string]bool{}, clocks: map[string]map[string]since{}}
	return &loop.Controller{
		Name: "node-lifecycle", Workers: 4,
		Sources: []loop.Source{
			loop.Self(nodeGK.String()),
			{Kind: podGK.String(), Keys: c.podChanged},
		},
		Background: c.watch,
		Reconcile:  c.reconcile,
	}
}

func nodeKey(name string) state.Key { return state.Key{Kind: nodeGK.String(), Name: name} }

// podChanged wakes the node of a pod that came to stand on tainted ground.
func (c *controller) podChanged(ev state.Event, add func(state.Key)) {
	h := &ev.Record.Header
	if h.NodeName == "" || ev.Type == state.Deleted || (ev.Prev != nil && ev.Prev.Header.NodeName == h.NodeName && ev.Prev.Spec == ev.Record.Spec) {
		return
	}
	c.mu.Lock()
	tainted := c.tainted[h.NodeName]
	c.mu.Unlock()
	if tainted {
		add(nodeKey(h.NodeName))
	}
}

// watch looks at the leases until ctx ends.
func (c *controller) watch(ctx context.Context, add func(state.Key)) error {
	t := time.NewTicker(lookEvery)
	defer t.Stop()
	for {
		for _, name := range c.look(time.Now()) {
			add(nodeKey(name))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// look assesses all nodes and returns those whose verdict changed.
func (c *controller) look(now time.Time) (changed []string) {
	leases, kept := c.cfg.Leases.InTerm(c.env.Term)
	if !kept {
		return nil
	}
	zones := map[string]string{}
	c.env.Reader.Snapshot().Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		zones[r.Header.Key.Name] = r.Header.Labels[corev1.LabelTopologyZone]
		return true
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.verdicts == nil {
		c.assessor.resume(c.heldBack(zones), now)
	}
	next := c.assessor.assess(leases, zones, c.givenUp, now)
	for name, v := range next {
		if c.verdicts[name] != v {
			changed = append(changed, name)
		}
	}
	c.verdicts = next
	return changed
}

// heldBack are the nodes, with their zones, that are silent and whose pods
// stay because of the zone: under the leader before.
func (c *controller) heldBack(zones map[string]string) map[string]string {
	out := map[string]string{}
	for name, zone := range zones {
		obj, err := c.env.Store.Get(nodeGK, "", name)
		if err != nil {
			continue
		}
		n, ok := obj.(*corev1.Node)
		if ok && slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
			return c.Type == ConditionHeld && c.Status == corev1.ConditionTrue && c.Reason != reasonLimited
		}) {
			out[name] = zone
		}
	}
	return out
}

// givenUp says that the node's pods were moved before: under an earlier
// leader, or before a freeze.
func (c *controller) givenUp(name string) bool {
	obj, err := c.env.Store.Get(nodeGK, "", name)
	if err != nil {
		return false
	}
	n, ok := obj.(*corev1.Node)
	return ok && unreachable(n, corev1.TaintEffectNoExecute)
}

func (c *controller) reconcile(ctx context.Context, key state.Key) (time.Duration, error) {
	obj, err := c.env.Store.Get(nodeGK, "", key.Name)
	if apierrors.IsNotFound(err) {
		c.mu.Lock()
		delete(c.tainted, key.Name)
		delete(c.clocks, key.Name)
		c.mu.Unlock()
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	node, ok := obj.(*corev1.Node)
	if !ok {
		return 0, loop.Terminal(fmt.Errorf("node %s is a %T", key.Name, obj))
	}
	c.mu.Lock()
	v, assessed := c.verdicts[key.Name]
	looked := c.verdicts != nil
	c.mu.Unlock()
	if !looked {
		// To take nodes for alive of which nothing is known yet would bring back
		// the pods of those that are dead, and end what stands in for them.
		return lookEvery, nil
	} else if !assessed {
		v = verdict{known: true} // no lease is kept for it: judged by its own word alone
	} else if !v.known {
		return time.Second, nil // a new leader waits for the first sign
	} else if v.silent && !c.cfg.Leases.Expired(key.Name) {
		// It came back since the last look: to act on that look would undo what
		// the node's own connection puts right, which wakes this key again, as
		// fast as both can write. The next look brings the key back.
		return 0, nil
	}
	if node, err = c.setCondition(ctx, node, v); err != nil {
		return 0, err
	}
	if node, err = c.setTaints(ctx, node, v); err != nil {
		return 0, err
	}
	return c.pods(ctx, node, v)
}

// setCondition makes Ready Unknown while the lease is expired, and True when
// it is renewed again (the agent's own report may then say otherwise), and
// says what keeps its pods from being moved.
func (c *controller) setCondition(ctx context.Context, node *corev1.Node, v verdict) (*corev1.Node, error) {
	now := metav1.NewTime(c.env.Clock.Now()).Rfc3339Copy()
	want := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown, Reason: reasonSilent,
		Message: "The agent stopped renewing its lease.", LastHeartbeatTime: now, LastTransitionTime: now}
	ready := corev1.NodeCondition{}
	for _, cond := range node.Status.Conditions {
		if cond.Type == corev1.NodeReady {
			ready = cond
		}
	}
	changed := true
	switch {
	case v.silent && ready.Status != corev1.ConditionUnknown:
		c.note(node, events.Normal, "NodeNotReady", "Node "+node.Name+" status is now: NodeNotReady (its lease expired)")
	case !v.silent && ready.Status == corev1.ConditionUnknown && ready.Reason == reasonSilent && ready.Type != "":
		want.Status, want.Reason, want.Message = corev1.ConditionTrue, "AgentReady", "The agent renews its lease."
		c.note(node, events.Normal, "NodeReady", "Node "+node.Name+" status is now: NodeReady")
	default:
		changed = false
	}
	hold := held(v, cmp.Or(node.Labels[corev1.LabelTopologyZone], DefaultZone), c.cfg.EvictEvery)
	if probe := node.Status.DeepCopy(); !setHeld(probe, hold, now) && !changed {
		return node, nil
	}
	return c.update(ctx, node, registry.Status, func(n *corev1.Node) {
		setHeld(&n.Status, hold, now)
		if !changed {
			return
		}
		for i := range n.Status.Conditions {
			if n.Status.Conditions[i].Type == corev1.NodeReady {
				n.Status.Conditions[i] = want
				return
			}
		}
		n.Status.Conditions = append(n.Status.Conditions, want)
	})
}

func (c *controller) setTaints(ctx context.Context, node *corev1.Node, v verdict) (*corev1.Node, error) {
	now := c.env.Clock.Now()
	if !apiequality.Semantic.DeepEqual(desiredTaints(node, v, now), node.Spec.Taints) {
		var err error
		node, err = c.update(ctx, node, registry.Main, func(n *corev1.Node) { n.Spec.Taints = desiredTaints(n, v, now) })
		if err != nil {
			return nil, err
		}
	}
	c.startClocks(node)
	return node, nil
}

var errMoved = loop.ErrMoved

func (c *controller) update(ctx context.Context, node *corev1.Node, sub registry.Subresource, change func(*corev1.Node)) (*corev1.Node, error) {
	obj, err := c.env.Store.Update(ctx, nodeGK, "", node.Name, sub, func(cur runtime.Object) (runtime.Object, error) {
		n, ok := cur.(*corev1.Node)
		if !ok || n.UID != node.UID {
			return nil, errMoved
		}
		change(n)
		return n, nil
	}, c.env.Write())
	if err != nil {
		return nil, fmt.Errorf("update node %s: %w", node.Name, err)
	}
	n, ok := obj.(*corev1.Node)
	if !ok {
		return nil, fmt.Errorf("update node %s: got a %T", node.Name, obj)
	}
	return n, nil
}

// since is when a taint's time began, on the monotonic clock: as it says
// itself, by some leader's wall clock, and as this leader saw it.
type since struct{ from, seen time.Time }

// startClocks notes, on the monotonic clock, since when each NoExecute taint
// counts. One that was there before this leader is believed to be as old as
// it says, unless the clock cannot be trusted: then it counts from now.
func (c *controller) startClocks(node *corev1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	old, seenNode := c.clocks[node.Name]
	clocks := map[string]since{}
	for i := range node.Spec.Taints {
		t := &node.Spec.Taints[i]
		if t.Effect != corev1.TaintEffectNoExecute {
			continue
		}
		id := taintID(t)
		at, ok := old[id]
		if !ok {
			at = since{time.Now(), time.Now()}
			trusted := c.env.Trust == nil || c.env.Trust() == nil
			if !seenNode && trusted && t.TimeAdded != nil {
				at.from = at.from.Add(-max(c.env.Clock.Now().Sub(t.TimeAdded.Time), 0))
			}
		}
		clocks[id] = at
	}
	c.clocks[node.Name] = clocks
	c.tainted[node.Name] = len(clocks) > 0
}

func taintID(t *corev1.Taint) string { return t.Key + "=" + t.Value }

func (c *controller) elapsed(node string) (elapsed, witnessed func(*corev1.Taint) time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	clocks := c.clocks[node]
	of := func(begin func(since) time.Time) func(*corev1.Taint) time.Duration {
		return func(t *corev1.Taint) time.Duration {
			if at, ok := clocks[taintID(t)]; ok {
				return time.Since(begin(at))
			}
			return 0
		}
	}
	return of(func(s since) time.Time { return s.from }), of(func(s since) time.Time { return s.seen })
}

func (c *controller) note(node *corev1.Node, eventType, reason, message string) {
	c.env.Events.Event(events.Ref(nodeGK, node), eventType, reason, message)
}
