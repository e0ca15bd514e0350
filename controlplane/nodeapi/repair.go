package nodeapi

import (
	"context"
	"maps"
	"slices"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// repairs are what others changed of what a connected node owns: its mirror
// pods and its node conditions. They are put right from here, since the node
// itself has nothing new to say. Bounded by the nodes and their mirrors.
type repairs struct {
	mu    sync.Mutex
	nodes map[string]bool
	pods  map[string]string // namespace/name -> node
	wake  chan struct{}
}

func newRepairs() *repairs {
	return &repairs{nodes: map[string]bool{}, pods: map[string]string{}, wake: make(chan struct{}, 1)}
}

func (r *repairs) add(f func()) {
	r.mu.Lock()
	f()
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *repairs) node(name string) { r.add(func() { r.nodes[name] = true }) }

func (r *repairs) pod(key, node string) { r.add(func() { r.pods[key] = node }) }

func (r *repairs) take() (nodes []string, pods map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	nodes, pods = slices.Sorted(maps.Keys(r.nodes)), r.pods
	r.nodes, r.pods = map[string]bool{}, map[string]string{}
	return nodes, pods
}

// observe notes what an event calls for; it does not block.
func (s *Server) observe(e *state.Event) {
	h := &e.Record.Header
	switch h.Key.Kind {
	case "Pod":
		if h.NodeName == "" || (e.Type != state.Deleted && h.Deleted == 0) {
			return
		}
		sess := s.sessionOfNode(h.NodeName)
		if sess == nil {
			return
		}
		key := h.Key.Namespace + "/" + h.Key.Name
		sess.mu.Lock()
		_, mirror := sess.mirrors[key]
		sess.mu.Unlock()
		if mirror {
			s.repairs.pod(key, h.NodeName)
		}
	case "Node":
		if e.Type == state.Deleted {
			s.leases.forget(h.Key.Name)
		} else {
			s.leases.ensure(h.Key.Name)
		}
		if s.Connected(h.Key.Name) {
			s.repairs.node(h.Key.Name)
		}
	}
}

// repairLoop does the writing, apart from the watch, which must not wait for
// a disk.
func (s *Server) repairLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.repairs.wake:
		}
		nodes, pods := s.repairs.take()
		for _, n := range nodes {
			s.restoreNode(ctx, n)
		}
		for _, key := range slices.Sorted(maps.Keys(pods)) {
			s.restoreMirror(ctx, pods[key], key)
		}
	}
}

func (s *Server) restoreMirror(ctx context.Context, node, key string) {
	sess := s.sessionOfNode(node)
	if sess == nil || ctx.Err() != nil {
		return
	}
	sess.mu.Lock()
	p, ok := sess.mirrors[key]
	sess.mu.Unlock()
	if ok {
		_ = s.podNews(ctx, sess, &p) // its outcome is logged there
	}
}

// restoreNode writes a connected node's own conditions again when somebody
// changed them: the node lifecycle says Unknown while the lease is out, and
// deleting the Node object of a living node makes it register again.
func (s *Server) restoreNode(ctx context.Context, name string) {
	sess := s.sessionOfNode(name)
	if sess == nil || ctx.Err() != nil {
		return
	}
	// What the node says meanwhile is newer than what is written again here.
	err := sess.say(ctx, func() error {
		if sess.lastNode == nil {
			return nil // it says so itself when it has connected
		}
		_, err := s.getNode(name)
		at, expired := s.leases.lastRenewal(name)
		if !apierrors.IsNotFound(err) && (expired || at.IsZero()) {
			return nil
		}
		said, err := decodeNode(sess.lastNode)
		if err != nil {
			return err
		}
		return s.nodeNews(ctx, sess, said)
	})
	if err != nil && ctx.Err() == nil {
		s.warn("node", name, "node status not written", err)
	}
}

// say writes what the node says of itself, one word after the other.
func (sess *session) say(ctx context.Context, write func() error) error {
	select {
	case sess.saying <- struct{}{}:
		defer func() { <-sess.saying }()
		return write()
	case <-ctx.Done():
		return ctx.Err()
	}
}
