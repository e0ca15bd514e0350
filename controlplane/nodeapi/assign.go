package nodeapi

import (
	"context"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/wire"
)

// assigner builds the assignments of connected nodes. What it keeps is a
// cache over the store: versions of what each node was given, and which
// objects each node's pods refer to.
//
// The generation of an assignment is a hash of its content, so every server
// gives the same one, and a restart of a server makes no node pull or write.
// Content is what the node needs: the status that the node itself writes is
// left out, or each report would bring a new generation.
type assigner struct {
	s *Server

	mu    sync.Mutex
	nodes map[string]*nodeState
	refs  map[state.Key]map[string]bool // object -> connected nodes that need it
	// serving are the nodes that serve Ingresses; nil is to be found out.
	serving map[string]bool
	// doomed are the volumes that are being deleted, by the node that has their
	// data: it is told, so that it removes that.
	doomed map[string]map[state.Key]bool
}

// nodeState is one connected node's. mu serialises builds; the fields under
// it are written by them alone.
type nodeState struct {
	name  string
	again atomic.Bool // a new session: adopted does not hold any more

	mu      sync.Mutex
	order   []entry          // pods, what they refer to, the node itself
	tokens  map[string]int64 // what the node holds or shall get, by the uid of the object: until when (Unix seconds), which is its version
	adopted bool             // the node said which tokens it holds
	cidrs   []string
	site    string
	missing []state.Key // refs, sorted, as registered in assigner.refs; written under assigner.mu too
	gen     uint64
}

func newAssigner(s *Server) *assigner {
	return &assigner{s: s, nodes: map[string]*nodeState{}, refs: map[state.Key]map[string]bool{}, doomed: map[string]map[state.Key]bool{}}
}

func (a *assigner) connect(node string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.nodes[node] == nil {
		a.nodes[node] = &nodeState{name: node, tokens: map[string]int64{}}
		return
	}
	// A new session of a node whose old one just went: it says again what it
	// holds. No lock: the caller holds others.
	a.nodes[node].again.Store(true)
}

func (a *assigner) disconnect(node string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.nodes[node]
	if n == nil {
		return
	}
	delete(a.nodes, node)
	a.unregister(n)
}

// unregister drops what register noted; a.mu is held.
func (a *assigner) unregister(n *nodeState) {
	for _, k := range n.missing {
		if m := a.refs[k]; m != nil {
			if delete(m, n.name); len(m) == 0 {
				delete(a.refs, k)
			}
		}
	}
}

func (a *assigner) state(node string) *nodeState {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.nodes[node]
}

// generation is the newest one built; 0 is unknown.
func (a *assigner) generation(node string) uint64 {
	a.mu.Lock()
	n := a.nodes[node]
	a.mu.Unlock()
	if n == nil {
		return 0
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.adopted || n.again.Load() {
		return 0
	}
	return n.gen
}

// ensureKeyring makes the gossip keys of a node's site before its assignment
// is built; no lock is held while that is written.
func (a *assigner) ensureKeyring(ctx context.Context, node string) {
	zone := zoneOf(a.s, node)
	if _, err := a.s.Keyring(ctx, zone); err != nil {
		a.s.warn("zone", zone, "gossip keys not made", err) // the node works without
	}
}

// zoneOf is the site of a node.
func zoneOf(s *Server, node string) string {
	if rec, ok := s.cfg.Store.Reader(nodeGK).Snapshot().Get(state.Key{Kind: "Node", Name: node}); ok {
		if z := rec.Header.Labels[corev1.LabelTopologyZone]; z != "" {
			return z
		}
	}
	return DefaultZone
}

// pull answers a node's PullRequest.
func (a *assigner) pull(ctx context.Context, sess *session, r *wire.PullRequest) (*wire.Assignment, error) {
	n := a.state(sess.node)
	if n == nil {
		return nil, &wire.Fault{Code: wire.FaultNotLeader, Message: "the session is over"}
	}
	a.ensureKeyring(ctx, sess.node)
	sess.holds(r.Generation)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.adopt(r.Have, a.s.cfg.Clock.Now())
	before := a.s.site(zoneOf(a.s, sess.node)).Keyring // no newer than what is built
	if err := a.build(n); err != nil {
		return nil, err
	}
	sess.mu.Lock()
	sess.nudged.Generation = n.gen
	sess.mu.Unlock()
	out := &wire.Assignment{Epoch: a.s.cfg.Epoch(), Generation: n.gen, UnixMilli: a.s.timeHint()}
	if r.Generation == n.gen {
		sess.sent(n.gen, before)
		sess.holds(n.gen)
		out.Unchanged = true
		return out, ctx.Err()
	}
	keys := a.s.site(n.site).Keyring
	sess.sent(n.gen, keys)
	out.PodCIDRs, out.Servers, out.Site = n.cidrs, a.s.cfg.Servers(), n.site
	out.Keyring, out.Seeds, out.Lost = keys, a.s.seeds(n.site, sess.node), a.s.cfg.Lost()
	for i := range n.order {
		e := &n.order[i]
		if e.skip {
			continue
		}
		if r.Have[e.uid()] == e.version {
			out.Keep = append(out.Keep, e.uid())
			continue
		}
		obj, err := a.s.cfg.Store.Decode(e.rec)
		if err != nil {
			return nil, err
		}
		data, err := encodeFor(obj)
		if err != nil {
			return nil, err
		}
		o := wire.Object{Ref: e.ref(), UID: e.uid(), ResourceVersion: e.version, Data: data}
		if rv := e.rec.Header.ResourceVersion; rv != e.version {
			o.Revision = rv
		}
		out.Objects = append(out.Objects, o)
	}
	if err := a.sendTokens(n, r.Have, out); err != nil {
		return nil, err
	}
	return out, ctx.Err()
}
