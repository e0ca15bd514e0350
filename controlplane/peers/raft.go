package peers

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/wire"
)

// raftTimeout bounds one exchange of Raft's. It is generous, since a follower
// answers after its disk did; a link that is cut is noticed by userTimeout.
const raftTimeout = 10 * time.Second

// stream is Raft's stream layer: its addresses are server ids.
type stream struct {
	m      *Mesh
	queue  chan net.Conn
	closed chan struct{}
	once   sync.Once

	mu    sync.Mutex
	conns map[*raftConn]struct{} // both directions
}

func newStream(m *Mesh) *stream {
	return &stream{m: m, queue: make(chan net.Conn), closed: make(chan struct{}), conns: map[*raftConn]struct{}{}}
}

// StopRaft ends Raft's connections: what waits for another server's answer
// fails at once.
func (m *Mesh) StopRaft() { _ = m.raft.Close() }

// RaftTransport makes Raft's transport. Who uses it closes it, before the
// Mesh.
func (m *Mesh) RaftTransport() Transport {
	return Transport{raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
		Stream: m.raft, MaxPool: 3, Timeout: raftTimeout,
		// What it could log, the other side's silence, is said by the Mesh.
		Logger: hclog.New(&hclog.LoggerOptions{Output: io.Discard, Level: hclog.Off}),
	})}
}

// Accept implements net.Listener.
func (s *stream) Accept() (net.Conn, error) {
	select {
	case c := <-s.queue:
		return c, nil
	case <-s.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (s *stream) Close() error {
	s.once.Do(func() {
		s.mu.Lock()
		close(s.closed)
		conns := slices.Collect(maps.Keys(s.conns))
		s.mu.Unlock()
		for _, c := range conns {
			_ = c.Close()
		}
	})
	return nil
}

// closeAll ends the connections with a server, or with every other one ("").
func (s *stream) closeAll(id string) {
	s.mu.Lock()
	var conns []*raftConn
	for c := range s.conns {
		if c.with != "" && (id == "" || c.with == id) {
			conns = append(conns, c)
		}
	}
	s.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
	}
}

// wrap counts a connection as Raft's, with a server ("" is this one); nil when
// Raft has ended.
func (s *stream) wrap(c net.Conn, with string) *raftConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.closed:
		return nil
	default:
	}
	rc := &raftConn{Conn: c, s: s, with: with, done: make(chan struct{})}
	s.conns[rc] = struct{}{}
	return rc
}

// Addr implements net.Listener.
func (s *stream) Addr() net.Addr { return serverAddr(s.m.cfg.ID) }

type serverAddr string

// Network implements net.Addr.
func (serverAddr) Network() string { return "dunlin" }

// String implements net.Addr.
func (a serverAddr) String() string { return string(a) }

// Dial implements raft.StreamLayer.
func (s *stream) Dial(id raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	if string(id) == s.m.cfg.ID {
		return s.self(timeout)
	}
	ctx, cancel := context.WithTimeout(s.m.ctx, timeout)
	defer cancel()
	c, err := s.m.dial(ctx, string(id), wire.ALPNRaft)
	if err != nil {
		return nil, err
	}
	rc := s.wrap(c, string(id))
	if rc == nil {
		_ = c.Close()
		return nil, net.ErrClosed
	}
	return rc, nil
}

// self is a connection of this server with itself: a lone voter asks itself
// to stand for election at once.
func (s *stream) self(timeout time.Duration) (net.Conn, error) {
	x, y := net.Pipe()
	a, b := s.wrap(x, ""), s.wrap(y, "")
	if a == nil || b == nil {
		return nil, net.ErrClosed
	}
	t := time.NewTimer(timeout)
	defer t.Stop()
	var err error
	select {
	case s.queue <- b:
		return a, nil
	case <-s.closed:
		err = net.ErrClosed
	case <-t.C:
		err = context.DeadlineExceeded
	}
	return nil, errors.Join(err, a.Close(), b.Close())
}

// serveRaft hands a connection to Raft and waits until that closes it.
func (m *Mesh) serveRaft(ctx context.Context, c *listener.Conn) {
	id, err := m.accept(c)
	if err != nil {
		return
	}
	setUserTimeout(c.Raw)
	rc := m.raft.wrap(c, id)
	if rc == nil {
		return
	}
	defer func() { _ = rc.Close() }()
	select {
	case m.raft.queue <- rc:
	case <-m.raft.closed:
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-rc.done:
	case <-m.raft.closed:
	case <-ctx.Done():
	}
}

// raftConn tells when it is closed.
type raftConn struct {
	net.Conn
	s    *stream
	with string // the other server's id
	once sync.Once
	done chan struct{}
}

// Close implements net.Conn.
func (c *raftConn) Close() error {
	c.once.Do(func() {
		close(c.done)
		c.s.mu.Lock()
		delete(c.s.conns, c)
		c.s.mu.Unlock()
	})
	return c.Conn.Close()
}
