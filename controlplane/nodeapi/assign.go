package nodeapi

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/controllers/endpoints"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
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
}

// nodeState is one connected node's. mu serialises builds; the fields under
// it are written by them alone.
type nodeState struct {
	name  string
	again atomic.Bool // a new session: adopted does not hold any more

	mu      sync.Mutex
	objs    map[state.Key]*entry
	tokens  map[string]*token
	adopted bool // the node said which tokens it holds
	order   []*entry
	cidrs   []string
	site    string
	missing []state.Key // refs, sorted, as registered in assigner.refs
	gen     uint64
	built   bool
}

// entry is one object of an assignment, for one version of its record.
type entry struct {
	rec     *state.Record
	ref     wire.Ref
	uid     string
	version uint64 // what the node keeps as the object's resourceVersion
	refs    []state.Key
	tokens  []tokenWant
	skip    bool // a mirror pod: the node has its own
}

func newAssigner(s *Server) *assigner {
	return &assigner{s: s, nodes: map[string]*nodeState{}, refs: map[state.Key]map[string]bool{}}
}

func (a *assigner) connect(node string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.nodes[node] == nil {
		a.nodes[node] = &nodeState{name: node, objs: map[state.Key]*entry{}, tokens: map[string]*token{}}
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
	for k, nodes := range a.refs {
		if delete(nodes, node); len(nodes) == 0 {
			delete(a.refs, k)
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

// run follows the store and nudges nodes whose assignment changed.
func (a *assigner) run(ctx context.Context) error {
	reader := a.s.cfg.Store.Reader(podGK)
	refresh := time.NewTicker(time.Minute)
	defer refresh.Stop()
	for ctx.Err() == nil {
		after := reader.Snapshot().ResourceVersion()
		w, err := reader.Watch("", "", after)
		if err == nil {
			a.rebuild(a.connected()) // whatever the watch missed
			err = a.follow(ctx, w, refresh.C)
		}
		if err != nil && ctx.Err() == nil && !errors.Is(err, state.ErrTooOld) {
			a.s.log.Warn("watch of the store ended", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
		}
	}
	return nil
}

func (a *assigner) connected() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]string, 0, len(a.nodes))
	for n := range a.nodes {
		out = append(out, n)
	}
	slices.Sort(out)
	return out
}

func (a *assigner) follow(ctx context.Context, w state.Watcher, refresh <-chan time.Time) error {
	for {
		wctx, cancel := context.WithTimeout(ctx, time.Minute)
		batch, _, err := w.Next(wctx)
		waited := wctx.Err() != nil // asked before cancel makes it always so
		cancel()
		if err != nil && (ctx.Err() != nil || !waited || errors.Is(err, state.ErrTooOld)) {
			return err
		}
		dirty := map[string]bool{}
		for i := range batch {
			a.affected(&batch[i], dirty)
		}
		select {
		case <-refresh: // tokens that are due
			for _, n := range a.connected() {
				dirty[n] = true
			}
		default:
		}
		if len(dirty) > 0 {
			names := make([]string, 0, len(dirty))
			for n := range dirty {
				names = append(names, n)
			}
			slices.Sort(names)
			a.rebuild(names)
		}
		for i := range batch {
			a.s.observe(&batch[i])
		}
	}
}

// affected marks the connected nodes to which an event matters.
func (a *assigner) affected(e *state.Event, dirty map[string]bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	mark := func(n string) {
		if a.nodes[n] != nil {
			dirty[n] = true
		}
	}
	k := e.Record.Header.Key
	switch k.Kind {
	case "Pod":
		mark(e.Record.Header.NodeName)
		if e.Prev != nil {
			mark(e.Prev.Header.NodeName)
		}
		return
	case "Node":
		mark(k.Name)
		return
	}
	for n := range a.refs[k] {
		mark(n)
	}
	if k.Kind == "Secret" && k.Namespace == tokenNamespace && strings.HasPrefix(k.Name, ringPrefix) {
		for n := range a.nodes { // rare: a ring was made or rotated
			dirty[n] = true
		}
	}
}

// rebuild builds the nodes' assignments and nudges those whose generation
// changed.
func (a *assigner) rebuild(nodes []string) {
	for _, name := range nodes {
		n := a.state(name)
		if n == nil {
			continue
		}
		n.mu.Lock()
		before, known := n.gen, n.adopted && !n.again.Load()
		err := a.build(n)
		gen := n.gen
		n.mu.Unlock()
		if err != nil {
			a.s.log.Error("assignment cannot be built", "node", name, "error", err)
			continue
		}
		if gen == before || !known {
			continue // nothing new, or it has not pulled yet and will
		}
		if sess := a.s.sessionOfNode(name); sess != nil {
			a.nudge(sess, gen)
		}
	}
}

// nudge tells the node once for each generation. A stalled connection holds
// one goroutine at most, until its write timeout ends the session.
func (a *assigner) nudge(sess *session, gen uint64) {
	select {
	case <-sess.up:
	default:
		return // it pulls when it is up
	}
	sess.mu.Lock()
	known, sending := sess.nudged == gen && gen != 0, sess.nudging
	sess.nudged, sess.nudging = gen, sending || !known
	sess.mu.Unlock()
	if known {
		return
	}
	if a.s.cfg.Nudge != nil {
		if b, err := wire.Marshal(&wire.Nudge{Generation: gen}); err == nil {
			a.s.cfg.Nudge(sess.uid, b)
		}
	}
	if sending {
		return
	}
	a.s.nudges.Go(func() {
		for sent := uint64(0); ; {
			sess.mu.Lock()
			gen := sess.nudged
			if sent == gen && sent != 0 {
				sess.nudging = false
				sess.mu.Unlock()
				return
			}
			sess.mu.Unlock()
			// A hint: the next lease reply carries it too.
			if err := sess.conn.Send(&wire.Nudge{Generation: gen}); err != nil {
				return
			}
			sent = gen
		}
	})
}

// build brings n up to the newest snapshot; n.mu is held.
func (a *assigner) build(n *nodeState) error {
	snap := a.s.cfg.Store.Reader(podGK).Snapshot()
	next := make(map[state.Key]*entry, len(n.objs))
	order := n.order[:0:0]
	take := func(rec *state.Record) (*entry, error) {
		if e := next[rec.Header.Key]; e != nil {
			return e, nil
		}
		e := n.objs[rec.Header.Key]
		if e == nil || e.rec != rec {
			var err error
			if e, err = a.describe(rec); err != nil {
				return nil, err
			}
		}
		next[rec.Header.Key] = e
		if !e.skip {
			order = append(order, e)
		}
		return e, nil
	}
	var failed error
	var refs []state.Key
	var wants []tokenWant
	snap.PodsOnNode(n.name, func(rec *state.Record) bool {
		e, err := take(rec)
		if err != nil {
			failed = fmt.Errorf("pod %s/%s: %w", rec.Header.Key.Namespace, rec.Header.Key.Name, err)
			return false
		}
		if !e.skip {
			refs = append(refs, e.refs...)
			wants = append(wants, e.tokens...)
		}
		return true
	})
	if failed != nil {
		return failed
	}
	slices.SortFunc(refs, compareKeys)
	refs = slices.Compact(refs)
	for _, k := range refs {
		if rec, ok := snap.Get(k); ok {
			if _, err := take(rec); err != nil {
				return fmt.Errorf("%s %s/%s: %w", k.Kind, k.Namespace, k.Name, err)
			}
		}
	}
	n.cidrs, n.site = nil, DefaultZone
	if rec, ok := snap.Get(state.Key{Kind: "Node", Name: n.name}); ok {
		if _, err := take(rec); err != nil {
			return fmt.Errorf("node: %w", err)
		}
		n.cidrs = cidrsOf(rec)
		if z := rec.Header.Labels[corev1.LabelTopologyZone]; z != "" {
			n.site = z
		}
	}
	n.objs, n.order = next, order
	a.register(n, refs)
	a.refreshTokens(n, wants)
	n.gen = n.hash(a.s)
	n.built = true
	return nil
}

// DefaultZone is the site of nodes and servers without a zone label.
const DefaultZone = "default"

func cidrsOf(rec *state.Record) []string {
	var out []string
	for _, c := range rec.Header.Claims {
		if len(c) > len("podcidr/") && c[:len("podcidr/")] == "podcidr/" {
			out = append(out, c[len("podcidr/"):])
		}
	}
	return out
}

func compareKeys(a, b state.Key) int {
	return cmpStrings(a.Kind, b.Kind, a.Namespace, b.Namespace, a.Name, b.Name)
}

func cmpStrings(pairs ...string) int {
	for i := 0; i+1 < len(pairs); i += 2 {
		switch {
		case pairs[i] < pairs[i+1]:
			return -1
		case pairs[i] > pairs[i+1]:
			return 1
		}
	}
	return 0
}

// register makes events of the referenced objects, also of missing ones,
// reach the node.
func (a *assigner) register(n *nodeState, refs []state.Key) {
	if slices.Equal(refs, n.missing) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, k := range n.missing {
		if m := a.refs[k]; m != nil {
			if delete(m, n.name); len(m) == 0 {
				delete(a.refs, k)
			}
		}
	}
	n.missing = refs
	if a.nodes[n.name] != n {
		return // disconnected meanwhile
	}
	for _, k := range refs {
		if a.refs[k] == nil {
			a.refs[k] = map[string]bool{}
		}
		a.refs[k][n.name] = true
	}
}

// hash is the generation: never 0.
func (n *nodeState) hash(s *Server) uint64 {
	h := sha256.New()
	field := func(parts ...string) {
		for _, p := range parts {
			var l [4]byte
			binary.BigEndian.PutUint32(l[:], uint32(len(p)))
			h.Write(l[:])
			h.Write([]byte(p))
		}
		h.Write([]byte{0xff})
	}
	lines := make([]string, 0, len(n.order)+len(n.tokens))
	for _, e := range n.order {
		lines = append(lines, fmt.Sprintf("%s=%d", e.uid, e.version))
	}
	for uid, t := range n.tokens {
		lines = append(lines, fmt.Sprintf("%s=%d", uid, t.expires))
	}
	slices.Sort(lines)
	field(lines...)
	field(n.cidrs...)
	field(n.site)
	field(s.cfg.Servers()...)
	for _, k := range s.site(n.site).Keyring {
		field(string(k))
	}
	if g := binary.BigEndian.Uint64(h.Sum(nil)); g != 0 {
		return g
	}
	return 1
}

// describe decodes a record once and keeps what the assignment needs of it.
func (a *assigner) describe(rec *state.Record) (*entry, error) {
	e := &entry{rec: rec, uid: rec.Header.UID, version: rec.Header.ResourceVersion,
		ref: wire.Ref{Kind: rec.Header.Key.Kind, Namespace: rec.Header.Key.Namespace, Name: rec.Header.Key.Name}}
	switch rec.Header.Key.Kind {
	case "Pod", "Node":
		obj, err := a.s.cfg.Store.Decode(rec)
		if err != nil {
			return nil, err
		}
		if pod, ok := obj.(*corev1.Pod); ok {
			if _, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
				e.skip = true
				return e, nil
			}
			e.refs = podRefs(pod)
			e.tokens = podTokens(pod)
		}
		b, err := encodeFor(obj)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(b)
		e.version = binary.BigEndian.Uint64(sum[:8])
	}
	return e, nil
}

// podRefs are the keys of what a pod's node needs for it.
func podRefs(pod *corev1.Pod) []state.Key {
	var out []state.Key
	for _, r := range auth.PodReferences(pod) {
		kind := ""
		switch r.Resource {
		case "secrets":
			kind = "Secret"
		case "configmaps":
			kind = "ConfigMap"
		case "serviceaccounts":
			kind = "ServiceAccount"
		case "runtimeclasses":
			kind = "RuntimeClass.node.k8s.io"
		default:
			continue // the node does not need it
		}
		out = append(out, state.Key{Kind: kind, Namespace: r.Namespace, Name: r.Name})
	}
	return out
}

// encodeFor is the object as the node gets it, deterministically.
func encodeFor(obj runtime.Object) ([]byte, error) {
	obj = strip(obj)
	b, err := direct.Marshal(obj)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return b, nil
}

// strip removes what the node does not need or wrote itself. The result is
// private.
func strip(obj runtime.Object) runtime.Object {
	obj = obj.DeepCopyObject()
	if m, ok := obj.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	switch o := obj.(type) {
	case *corev1.Pod:
		o.ResourceVersion = ""
		o.Status = foreignStatus(&o.Status)
		delete(o.Annotations, endpoints.PortsAnnotation)
	case *corev1.Node:
		o.ResourceVersion = ""
		o.Status = corev1.NodeStatus{}
	}
	if kinds, _, err := manifests.Scheme().ObjectKinds(obj); err == nil && len(kinds) > 0 {
		obj.GetObjectKind().SetGroupVersionKind(kinds[0])
	}
	return obj
}

// foreignStatus is what others than the node decide in a pod's status: that
// it is over, and conditions that the node's own verdict counts in
// (readiness gates, a mark for disruption).
func foreignStatus(st *corev1.PodStatus) corev1.PodStatus {
	var out corev1.PodStatus
	if st.Phase == corev1.PodFailed || st.Phase == corev1.PodSucceeded {
		out.Phase, out.Reason, out.Message = st.Phase, st.Reason, st.Message
	}
	out.QOSClass = st.QOSClass
	for _, c := range st.Conditions {
		if !nodeOwnsCondition(c.Type) {
			c.LastProbeTime = metav1.Time{}
			out.Conditions = append(out.Conditions, c)
		}
	}
	return out
}

// ensureKeyring makes the gossip keys of a node's site before its assignment
// is built; no lock is held while that is written.
func (a *assigner) ensureKeyring(ctx context.Context, node string) {
	zone := DefaultZone
	if rec, ok := a.s.cfg.Store.Reader(nodeGK).Snapshot().Get(state.Key{Kind: "Node", Name: node}); ok {
		if z := rec.Header.Labels[corev1.LabelTopologyZone]; z != "" {
			zone = z
		}
	}
	if _, err := a.s.Keyring(ctx, zone); err != nil {
		a.s.warn("zone", zone, "gossip keys not made", err) // the node works without
	}
}

// pull answers a node's PullRequest.
func (a *assigner) pull(ctx context.Context, sess *session, r *wire.PullRequest) (*wire.Assignment, error) {
	n := a.state(sess.node)
	if n == nil {
		return nil, &wire.Fault{Code: wire.FaultNotLeader, Message: "the session is over"}
	}
	a.ensureKeyring(ctx, sess.node)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.adopt(r.Have, a.s.cfg.Clock.Now())
	if err := a.build(n); err != nil {
		return nil, err
	}
	sess.mu.Lock()
	sess.nudged = n.gen
	sess.mu.Unlock()
	out := &wire.Assignment{Epoch: a.s.cfg.Epoch, Generation: n.gen, UnixMilli: a.s.timeHint()}
	if r.Generation == n.gen {
		out.Unchanged = true
		return out, ctx.Err()
	}
	out.PodCIDRs, out.Servers, out.Site = n.cidrs, a.s.cfg.Servers(), n.site
	out.Keyring, out.Seeds = a.s.site(n.site).Keyring, a.s.seeds(n.site, sess.node)
	for _, e := range n.order {
		if r.Have[e.uid] == e.version {
			out.Keep = append(out.Keep, e.uid)
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
		out.Objects = append(out.Objects, wire.Object{Ref: e.ref, UID: e.uid, ResourceVersion: e.version, Data: data})
	}
	if err := a.sendTokens(n, r.Have, out); err != nil {
		return nil, err
	}
	return out, ctx.Err()
}
