package nodeapi

import (
	"bytes"
	"context"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// Figures of what nodes use are asked for when somebody reads them, and kept
// for a moment: a node that nobody asks about sends nothing.
const (
	usageFresh   = 10 * time.Second
	usageTimeout = 5 * time.Second
	usageBytes   = 1 << 20
	usageAtOnce  = 32
)

// usages are the answers of a moment ago, by node.
type usages struct {
	slots chan struct{}
	mu    sync.Mutex
	list  map[string]*usageOf
}

type usageOf struct {
	mu  sync.Mutex // one question a node at a time
	at  time.Time
	got *wire.NodeUsage
}

func newUsages() *usages {
	return &usages{slots: make(chan struct{}, usageAtOnce), list: map[string]*usageOf{}}
}

// Usage is what a node and its pods use, at most ten seconds ago. Errors are
// *apierrors.StatusError: a node that is not connected, or that is of a
// version that does not tell.
func (s *Server) Usage(ctx context.Context, node string) (*wire.NodeUsage, error) {
	if s.sessionOfNode(node) == nil {
		s.usages.mu.Lock()
		delete(s.usages.list, node)
		s.usages.mu.Unlock()
		return nil, notConnected(node)
	}
	s.usages.mu.Lock()
	u := s.usages.list[node]
	if u == nil {
		u = &usageOf{}
		s.usages.list[node] = u
	}
	s.usages.mu.Unlock()
	select {
	case s.usages.slots <- struct{}{}:
		defer func() { <-s.usages.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.got != nil && time.Since(u.at) < usageFresh {
		return u.got, nil
	}
	got, err := s.askUsage(ctx, node)
	if err != nil {
		return nil, err
	}
	u.at, u.got = time.Now(), got
	return got, nil
}

func (s *Server) askUsage(ctx context.Context, node string) (*wire.NodeUsage, error) {
	ctx, cancel := context.WithTimeout(ctx, usageTimeout)
	defer cancel()
	c, err := s.OpenStream(ctx, node, wire.StreamRequest{Kind: "usage"})
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	var b bytes.Buffer
	if err := copyStream(ctx, &bounded{w: &b, left: usageBytes}, c); err != nil {
		return nil, err
	}
	u := new(wire.NodeUsage)
	if err := wire.ReadMessage(&b, u); err != nil {
		return nil, streamBroke(ctx, err)
	}
	return u, nil
}
