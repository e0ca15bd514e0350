package ingress

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// listener is an open port with its server.
type listener struct {
	tcp    *net.TCPListener
	server *http.Server
	secure bool
	addr   string // as it was asked for
}

// listen brings the listeners to what is wanted: none without an Ingress, and
// HTTPS only where one has TLS. e.mu is held.
func (e *engine) listen() {
	if e.handed {
		return
	}
	wanted := map[string]string{}
	if len(e.ingresses) > 0 {
		wanted["http"] = e.cfg.HTTP
	}
	for _, ing := range e.ingresses {
		if len(ing.TLS) > 0 {
			wanted["https"] = e.cfg.HTTPS
		}
	}
	for place, l := range e.listeners {
		if wanted[place] != l.addr {
			l.end()
			delete(e.listeners, place)
		}
	}
	now := time.Now()
	for place, addr := range wanted {
		if f, ok := e.failures[place]; addr == "" || e.listeners[place] != nil || ok && now.Before(f.again) {
			continue
		}
		l, err := e.open(place, addr)
		if err != nil {
			if e.failures[place].err != err.Error() {
				e.log.Warn("port not served", "place", place, "address", addr, "error", err)
			}
			e.failures[place] = failure{err.Error(), now.Add(retryListen)}
			continue
		}
		delete(e.failures, place)
		e.listeners[place] = l
	}
	for place := range e.failures {
		if wanted[place] == "" {
			delete(e.failures, place)
		}
	}
	for _, f := range e.parked { // of a predecessor, and not wanted
		_ = f.Close()
	}
	clear(e.parked)
}

// open listens, or takes a predecessor's listener for the same address.
func (e *engine) open(place, addr string) (*listener, error) {
	l := &listener{secure: place == "https", addr: addr, server: e.newServer(place == "https")}
	if f := e.parked[place+" "+addr]; f != nil {
		x, err := net.FileListener(f)
		if err != nil {
			return nil, fmt.Errorf("take over a listener: %w", err)
		}
		l.tcp, _ = x.(*net.TCPListener)
	}
	if l.tcp == nil {
		var lc net.ListenConfig
		x, err := lc.Listen(context.Background(), "tcp", addr)
		if err != nil {
			return nil, err
		}
		l.tcp = x.(*net.TCPListener)
	}
	guarded := &guard{TCPListener: l.tcp, e: e}
	go func() {
		if l.secure {
			_ = l.server.ServeTLS(guarded, "", "")
			return
		}
		_ = l.server.Serve(guarded)
	}()
	return l, nil
}

// end stops listening; connections go on to the end of their requests.
func (l *listener) end() {
	_ = l.tcp.Close()
	go func() { _ = l.server.Shutdown(context.Background()) }()
}

// Listeners implements companion.Worker.
func (e *engine) Listeners() (map[string]*os.File, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[string]*os.File{}
	for place, l := range e.listeners {
		f, err := l.tcp.File()
		if err != nil {
			return out, err
		}
		out[place+" "+l.addr] = f
	}
	return out, nil
}

// LetGo implements companion.Worker.
func (e *engine) LetGo() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.handed = true
	for place, l := range e.listeners {
		l.end()
		delete(e.listeners, place)
	}
}

// sources counts connections by where they come from.
type sources struct {
	mu *sync.Mutex
	n  map[netip.Addr]int64
}

func newSources() sources { return sources{&sync.Mutex{}, map[netip.Addr]int64{}} }

func (s sources) add(a netip.Addr, n int64) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.n[a] += n
	left := s.n[a]
	if left == 0 {
		delete(s.n, a)
	}
	return left
}

// guard counts and bounds connections.
type guard struct {
	*net.TCPListener
	e *engine
}

// Accept refuses what is too much by a reset: an answer would cost a
// handshake.
func (g *guard) Accept() (net.Conn, error) {
	for {
		c, err := g.AcceptTCP()
		if err != nil {
			return nil, err
		}
		limit, from := g.e.limit.Load(), sourceOf(c.RemoteAddr())
		why := fault(-1)
		switch {
		case g.e.counters.conns.Add(1) > limit:
			why = faultConnections
		case g.e.sources.add(from, 1) > max(limit/sourceShare, 1) && !from.IsLoopback():
			why = faultSource
			g.e.sources.add(from, -1)
		}
		if why < 0 {
			return &conn{TCPConn: c, e: g.e, from: from}, nil
		}
		g.e.counters.conns.Add(-1)
		g.e.counters.faults[why].Add(1)
		_ = c.SetLinger(0)
		_ = c.Close()
	}
}

// conn is a client's connection, counted until it is closed, also when it was
// upgraded.
type conn struct {
	*net.TCPConn
	e      *engine
	from   netip.Addr
	closed atomic.Bool
}

// Close implements net.Conn.
func (c *conn) Close() error {
	if c.closed.Swap(true) {
		return net.ErrClosed
	}
	c.e.sources.add(c.from, -1)
	c.e.counters.conns.Add(-1)
	return c.TCPConn.Close()
}
