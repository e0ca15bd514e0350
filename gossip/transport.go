package gossip

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/hashicorp/memberlist"
)

// endingTransport ends what it dials when it shuts down. Memberlist waits ten
// seconds for a member that does not answer, and three seeds may be tried one
// after the other: an agent that stops would be gone for half a minute, and its
// node's leases with it.
type endingTransport struct {
	memberlist.Transport
	dial   func(ctx context.Context, addr string) (net.Conn, error)
	ctx    context.Context
	cancel context.CancelFunc
}

// contextDialer is what a transport that is not the network's has.
type contextDialer interface {
	DialContext(ctx context.Context, addr string) (net.Conn, error)
}

func ending(t memberlist.Transport) *endingTransport {
	e := &endingTransport{Transport: t}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	if d, ok := t.(contextDialer); ok {
		e.dial = d.DialContext
	} else {
		e.dial = func(ctx context.Context, addr string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", addr)
		}
	}
	return e
}

// DialTimeout implements memberlist.Transport.
func (e *endingTransport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(e.ctx, timeout)
	defer cancel()
	c, err := e.dial(ctx, addr)
	if err != nil {
		return nil, fmt.Errorf("gossip: dial: %w", err)
	}
	return &endingConn{Conn: c, stop: context.AfterFunc(e.ctx, func() { _ = c.Close() })}, nil
}

// Shutdown implements memberlist.Transport.
func (e *endingTransport) Shutdown() error {
	e.cancel()
	return e.Transport.Shutdown()
}

type endingConn struct {
	net.Conn
	stop func() bool
}

// Close implements net.Conn.
func (c *endingConn) Close() error {
	c.stop()
	return c.Conn.Close()
}
