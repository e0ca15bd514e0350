package peers

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/wire"
)

// bootID tells this process from another one with a copy of its folder.
var bootID = rand.Text()

// maxRequests bounds what one other server asks at the same time: as many
// writes as its API has requests in flight.
const maxRequests = 1024

// requests are what servers ask each other.
var requests = []wire.Type{
	wire.TypeProposeRequest, wire.TypeReadRequest, wire.TypeServerStatusRequest,
	wire.TypeServerKeysRequest, wire.TypeAnnounceRequest, wire.TypeNetCheckRequest,
}

// peerConn is the connection to one other server.
type peerConn struct {
	ready chan struct{} // closed once conn or err is set
	conn  *wire.Conn
	err   error
}

// over says whether the connection has ended.
func (p *peerConn) over() bool {
	select {
	case <-p.ready:
	default:
		return false
	}
	if p.err != nil {
		return true
	}
	select {
	case <-p.conn.Done():
		return true
	default:
		return false
	}
}

// Call asks another server. A *wire.Fault is its answer; ErrUnreachable says
// that the request never left; any other error leaves open whether it was
// done.
func (m *Mesh) Call(ctx context.Context, id string, req, reply wire.Message) error {
	c, err := m.conn(ctx, id)
	if err != nil {
		return err
	}
	return c.Call(ctx, req, reply)
}

// conn is the connection to a server, dialled if there is none. All who ask
// meanwhile wait for the same attempt.
func (m *Mesh) conn(ctx context.Context, id string) (*wire.Conn, error) {
	m.mu.Lock()
	p := m.conns[id]
	if p == nil || p.over() {
		if m.ctx.Err() != nil {
			m.mu.Unlock()
			return nil, unreachable(id, net.ErrClosed)
		}
		p = &peerConn{ready: make(chan struct{})}
		m.conns[id] = p
		m.wg.Go(func() { m.connect(id, p) })
	}
	m.mu.Unlock()
	select {
	case <-p.ready:
		return p.conn, p.err
	case <-ctx.Done():
		return nil, unreachable(id, ctx.Err())
	}
}

// connect dials and serves one connection until it ends.
func (m *Mesh) connect(id string, p *peerConn) {
	ctx, cancel := context.WithTimeout(m.ctx, 2*dialTimeout)
	c, err := m.dial(ctx, id, wire.ALPNServer)
	cancel()
	if err != nil {
		p.err = err
		m.drop(id, p)
		close(p.ready)
		return
	}
	m.runConn(id, p, c)
}

func (m *Mesh) runConn(id string, p *peerConn, c net.Conn) {
	p.conn = wire.NewConn(c, nil, wire.Options{Initiator: true, IdleTimeout: -1})
	close(p.ready)
	_ = p.conn.Run(m.ctx) // why it ended is said by the next greeting
	m.drop(id, p)
}

// adopt uses a connection that was opened to find out who is there.
func (m *Mesh) adopt(id string, c net.Conn) {
	p := &peerConn{ready: make(chan struct{})}
	m.mu.Lock()
	if m.conns[id] != nil || m.ctx.Err() != nil {
		m.mu.Unlock()
		_ = c.Close()
		return
	}
	m.conns[id] = p
	m.wg.Go(func() { m.runConn(id, p, c) })
	m.mu.Unlock()
}

func (m *Mesh) drop(id string, p *peerConn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.conns[id] == p {
		delete(m.conns, id)
	}
}

// serveServer serves ALPNServer: what another server asks.
func (m *Mesh) serveServer(ctx context.Context, c *listener.Conn) {
	id, err := m.accept(c)
	if err != nil || m.serve == nil {
		return
	}
	setUserTimeout(c.Raw)
	wc := wire.NewConn(c, wire.HandlerFunc(func(ctx context.Context, t wire.Type, body []byte) (wire.Message, error) {
		return m.serve(ctx, id, t, body)
	}), wire.Options{Accept: requests, IdleTimeout: -1, MaxConcurrent: maxRequests})
	_ = wc.Run(ctx)
}

// userTimeout is how long the other side's kernel may leave data
// unacknowledged: a cut link, or a machine that is gone. A slow disk is
// neither.
const userTimeout = 4 * time.Second

func setUserTimeout(c net.Conn) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return
	}
	rc, err := sc.SyscallConn()
	if err != nil {
		return
	}
	// Where it cannot be set, keep-alive and Raft's own time-out remain.
	_ = rc.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
	})
}

// IsFault says whether an answer was a fault of a code, and returns it.
func IsFault(err error, code uint32) (*wire.Fault, bool) {
	var f *wire.Fault
	if errors.As(err, &f) && f.Code == code {
		return f, true
	}
	return nil, false
}
