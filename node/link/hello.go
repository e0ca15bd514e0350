package link

import (
	"fmt"
	"time"

	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// greeting is this node's Hello.
func (l *Link) greeting(g pki.Grant, c *conn) *wire.Hello {
	return &wire.Hello{
		ClusterID: g.ClusterID, Epoch: g.Epoch, Feature: feature.Level, Version: l.c.Version,
		NodeName: g.NodeName, NodeUID: g.NodeUID, BootID: l.c.BootID, UnixMilli: l.c.Clock.Now().UnixMilli(),
		Addresses: []string{c.raw.LocalAddr().String()},
	}
}

// hello exchanges the first messages and judges the server's.
func (l *Link) hello(c *conn, g pki.Grant) (*wire.Hello, error) {
	_ = c.SetDeadline(time.Now().Add(helloTimeout))
	defer func() { _ = c.SetDeadline(time.Time{}) }()
	sent := time.Now()
	err := wire.WriteMessage(c, l.greeting(g, c))
	if err != nil {
		return nil, fmt.Errorf("link: hello: %w", err)
	}
	h := new(wire.Hello)
	if err := wire.ReadMessage(c, h); err != nil {
		return nil, fmt.Errorf("link: hello: %w", err)
	}
	switch {
	case len(h.Leader) > 0:
		return h, errRedirect
	case h.Refused == wire.RefusedNotLeading:
		return nil, errNoLeader
	case h.Refused != "" && !h.Stop:
		return nil, fmt.Errorf("%w: %s", ErrRefused, h.Refused)
	}
	if reason := refuseServer(h, g); reason != "" {
		return nil, fmt.Errorf("link: server %s not accepted: %s", c.addr, reason)
	}
	if h.Refused != "" { // the word of a server of our cluster, and not of an old one
		l.stopped(h.Refused)
		return nil, fmt.Errorf("%w: %s", ErrRefused, h.Refused)
	}
	if !h.Limited {
		l.stopped("")
	}
	if h.Epoch > g.Epoch {
		if err := l.c.Identity.Update(func(g *pki.Grant) { g.Epoch = h.Epoch }); err != nil {
			return nil, err // an epoch that is not kept could be forgotten
		}
	}
	l.timeHint(h.UnixMilli, time.Since(sent)/2)
	return h, nil
}

func (l *Link) stopped(reason string) {
	if l.c.Stopped != nil {
		l.c.Stopped(reason)
		l.hint()
	}
}

// refuseServer is the node's side of the negotiation; "" accepts.
func refuseServer(h *wire.Hello, g pki.Grant) string {
	switch {
	case h.ClusterID != g.ClusterID:
		return fmt.Sprintf("it is of cluster %s, this node of %s", h.ClusterID, g.ClusterID)
	case h.Epoch < g.Epoch:
		return fmt.Sprintf("it is from before a recovery of the cluster (epoch %d, seen %d)", h.Epoch, g.Epoch)
	}
	if _, err := feature.Common(h.Feature, h.Version); err != nil {
		return fmt.Sprintf("its %v by this node; upgrade the servers first", err)
	}
	return ""
}
