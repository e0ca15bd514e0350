package podproxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// tlsTimeout bounds the handshake with a pod.
const tlsTimeout = 10 * time.Second

// dial connects to the pod of the request that asks first; address is its UID
// and port.
func (s *Server) dial(ctx context.Context, _, address string) (net.Conn, error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return nil, fmt.Errorf("%s is not a port", port)
	}
	c := callOf(ctx)
	if c == nil {
		return nil, errors.New("podproxy: a connection for no request")
	}
	conn, err := s.pods.dial(ctx, c, int32(n))
	if errors.Is(err, errFull) || apierrors.IsTooManyRequests(err) {
		s.tr.CloseIdleConnections() // makes room
		conn, err = s.pods.dial(ctx, c, int32(n))
	}
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// dialTLS: who a pod is, is known from its UID; its certificate says nothing
// more, and is not looked at, as upstream's proxy does not.
func (s *Server) dialTLS(ctx context.Context, network, address string) (net.Conn, error) {
	raw, err := s.dial(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}) //nolint:gosec // see above
	hctx, cancel := context.WithTimeout(ctx, tlsTimeout)
	defer cancel()
	if err := c.HandshakeContext(hctx); err != nil {
		_ = raw.Close()
		return nil, err
	}
	return c, nil
}

// sessions are those with the nodes of pods that are proxied to: one for each
// pod, as long as a connection is open in it.
type sessions struct {
	nodes Nodes
	idle  time.Duration
	full  func()

	mu sync.Mutex
	by map[string]*session // by UID of the pod
}

// session is shared by the connections to one pod.
type session struct {
	used int // connections, and who wants to be one; sessions.mu guards it

	mu sync.Mutex // held while it is opened
	m  *mux.Mux
}

var errFull = fmt.Errorf("%d connections to this pod are open already", connsMost)

func (s *sessions) dial(ctx context.Context, c *call, port int32) (net.Conn, error) {
	uid := string(c.pod.UID)
	s.mu.Lock()
	p := s.by[uid]
	if p == nil {
		p = &session{}
		s.by[uid] = p
	}
	if p.used >= connsMost {
		s.mu.Unlock()
		return nil, errFull
	}
	p.used++
	s.mu.Unlock()
	st, err := p.stream(ctx, s.nodes, c, port)
	if err != nil {
		s.done(uid, p)
		return nil, err
	}
	conn := &podConn{Stream: st, over: sync.OnceFunc(func() { s.done(uid, p) }), addr: podAddr(c.pod.Name + ":" + strconv.Itoa(int(port)))}
	conn.timer = time.AfterFunc(s.idle, func() { st.ResetAs(os.ErrDeadlineExceeded) })
	conn.idle = s.idle
	return conn, nil
}

// done gives back a place; with the last one the session ends.
func (s *sessions) done(uid string, p *session) {
	s.mu.Lock()
	p.used--
	last := p.used == 0
	if last {
		delete(s.by, uid)
	}
	s.mu.Unlock()
	if last {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.m != nil {
			p.m.Close("")
		}
	}
}

// stream opens one connection, and the session if there is none.
func (p *session) stream(ctx context.Context, nodes Nodes, c *call, port int32) (*mux.Stream, error) {
	p.mu.Lock()
	if p.m == nil || p.m.Err() != nil {
		m, err := nodes.Session(ctx, c.pod, "portforward", "")
		if err != nil {
			p.mu.Unlock()
			return nil, err
		}
		p.m = m
	}
	m := p.m
	p.mu.Unlock()
	b, err := wire.Marshal(&wire.DialRequest{Port: port, Address: true})
	if err != nil {
		return nil, err
	}
	st, err := m.Open(b)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { st.Reset("the client gave up") })
	defer stop()
	reply := new(wire.DialReply)
	if err := wire.ReadMessage(st, reply); err != nil {
		st.Reset("no answer")
		return nil, err
	}
	if reply.Error != "" {
		_ = st.Close()
		return nil, errors.New(reply.Error)
	}
	return st, nil
}

// podConn is a stream as a net.Conn. It has no deadlines: who uses it knows
// how to close it.
type podConn struct {
	*mux.Stream
	over  func()
	addr  podAddr
	timer *time.Timer
	idle  time.Duration
}

type podAddr string

// Network implements net.Addr.
func (podAddr) Network() string { return "pod" }

// String implements net.Addr.
func (a podAddr) String() string { return string(a) }

// Read implements net.Conn.
func (c *podConn) Read(p []byte) (int, error) {
	n, err := c.Stream.Read(p)
	c.timer.Reset(c.idle)
	return n, err
}

// Write implements net.Conn.
func (c *podConn) Write(p []byte) (int, error) {
	n, err := c.Stream.Write(p)
	c.timer.Reset(c.idle)
	return n, err
}

// Close implements net.Conn.
func (c *podConn) Close() error {
	c.timer.Stop()
	err := c.Stream.Close()
	c.over()
	return err
}

// LocalAddr implements net.Conn.
func (c *podConn) LocalAddr() net.Addr { return podAddr("proxy") }

// RemoteAddr implements net.Conn.
func (c *podConn) RemoteAddr() net.Addr { return c.addr }

// SetDeadline implements net.Conn.
func (c *podConn) SetDeadline(time.Time) error { return os.ErrNoDeadline }

// SetReadDeadline implements net.Conn.
func (c *podConn) SetReadDeadline(time.Time) error { return os.ErrNoDeadline }

// SetWriteDeadline implements net.Conn.
func (c *podConn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
