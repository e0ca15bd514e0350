// Package listener is the one port of a server: it finishes TLS handshakes
// and hands every connection to the protocol that ALPN names. The API's
// connections go to an http.Server through a net.Listener; the node
// protocol, joins, streams and Raft have handlers.
//
// Owner and goroutines: Run accepts; every connection has one goroutine for
// its handshake, and after it one that runs the handler. Close ends all of
// them and waits.
package listener

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/dunlin-project/dunlin/pki"
)

// UpgradePath is where a node asks for its protocol over HTTP/1.1, for
// networks whose middleboxes drop connections with an ALPN they do not know.
const UpgradePath = "/dunlin/v1/connect"

// Conn is an accepted connection of one of our own protocols.
type Conn struct {
	net.Conn
	TLS  tls.ConnectionState
	Peer pki.Peer
	// Raw is the TCP connection under TLS, for socket options.
	Raw net.Conn
}

// Handler serves one connection and returns when it is done with it. ctx
// ends when the listener closes. The connection is closed after it returns.
type Handler func(ctx context.Context, c *Conn)

// Config of a Listener.
type Config struct {
	Listener net.Listener // TCP
	// GetCertificate gives the serving certificate.
	GetCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	Verifier       *pki.Verifier
	// Handlers by ALPN name.
	Handlers map[string]Handler
	// MaxHandshakes bounds handshakes in progress; default 256. While there
	// are so many, nothing more is accepted: the backlog waits.
	MaxHandshakes int
	// MaxPerSource bounds handshakes in progress from one address, so that one
	// that never finishes them cannot take all; default half of
	// MaxHandshakes.
	MaxPerSource int
	// HandshakeTimeout; default 10 s.
	HandshakeTimeout time.Duration
	Log              *slog.Logger
}

// Listener is the port.
type Listener struct {
	cfg  Config
	tls  *tls.Config
	http *httpListener
	log  *slog.Logger

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	slots  chan struct{}
	warn   *rate.Limiter

	mu      sync.Mutex
	closing bool
	conns   map[net.Conn]struct{}
	sources map[string]int
}

// New prepares a Listener; nothing is accepted before Run.
func New(cfg Config) (*Listener, error) {
	if cfg.Listener == nil || cfg.GetCertificate == nil || cfg.Verifier == nil {
		return nil, errors.New("listener: a socket, a certificate and a verifier are required")
	}
	if cfg.MaxHandshakes <= 0 {
		cfg.MaxHandshakes = 256
	}
	if cfg.MaxPerSource <= 0 {
		cfg.MaxPerSource = max(cfg.MaxHandshakes/2, 1)
	}
	if cfg.HandshakeTimeout <= 0 {
		cfg.HandshakeTimeout = 10 * time.Second
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	l := &Listener{
		cfg: cfg, log: cfg.Log,
		slots: make(chan struct{}, cfg.MaxHandshakes),
		warn:  rate.NewLimiter(rate.Every(10*time.Second), 3),
		conns: map[net.Conn]struct{}{}, sources: map[string]int{},
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.http = &httpListener{addr: cfg.Listener.Addr(), queue: make(chan net.Conn), closed: make(chan struct{})}
	protos := []string{"h2", "http/1.1"}
	for p := range cfg.Handlers {
		protos = append(protos, p)
	}
	slices.Sort(protos[2:])
	l.tls = &tls.Config{
		MinVersion:       tls.VersionTLS12,
		GetCertificate:   cfg.GetCertificate,
		NextProtos:       protos,
		ClientAuth:       tls.RequestClientCert,
		Time:             cfg.Verifier.Clock.Now,
		VerifyConnection: cfg.Verifier.VerifyConnection(func(p string) bool { return cfg.Handlers[p] != nil }),
	}
	return l, nil
}

// HTTP is what an http.Server serves: connections that speak h2, http/1.1 or
// named no protocol. They are *tls.Conn with the handshake done, so
// http.Server.Serve does HTTP/2 on them.
func (l *Listener) HTTP() net.Listener { return l.http }

// Run accepts until Close or until ctx ends; then it closes everything,
// waits and returns nil.
func (l *Listener) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { l.shut() })
	defer stop()
	var delay time.Duration
	for {
		select {
		case l.slots <- struct{}{}:
		case <-l.ctx.Done():
			return l.Close()
		}
		c, err := l.cfg.Listener.Accept()
		if err == nil {
			delay = 0
			l.start(c)
			continue
		}
		<-l.slots
		if l.ctx.Err() != nil {
			return l.Close()
		}
		if errors.Is(err, net.ErrClosed) {
			_ = l.Close()
			return fmt.Errorf("listener: %w", err)
		}
		// Out of descriptors, mostly: wait, do not exit.
		delay = min(max(2*delay, 5*time.Millisecond), time.Second)
		if l.warn.Allow() {
			l.log.Warn("cannot accept connections", "error", err, "retry", delay)
		}
		t := time.NewTimer(delay)
		select {
		case <-t.C:
		case <-l.ctx.Done():
			t.Stop()
		}
	}
}

// shut begins to close without waiting.
func (l *Listener) shut() {
	l.mu.Lock()
	l.closing = true
	conns := make([]net.Conn, 0, len(l.conns))
	for c := range l.conns {
		conns = append(conns, c)
	}
	l.mu.Unlock()
	l.cancel()
	_ = l.cfg.Listener.Close()
	l.http.close()
	for _, c := range conns {
		_ = c.Close()
	}
}

// Close stops accepting, ends every connection of our own protocols and
// waits for their handlers. Connections given to the http.Server are its
// own to close.
func (l *Listener) Close() error {
	l.shut()
	l.wg.Wait()
	return nil
}

// start owns one slot for the time of the handshake.
func (l *Listener) start(c net.Conn) {
	src := sourceOf(c)
	l.mu.Lock()
	if l.closing || l.sources[src] >= l.cfg.MaxPerSource {
		l.mu.Unlock()
		<-l.slots
		_ = c.Close()
		return
	}
	l.sources[src]++
	l.conns[c] = struct{}{}
	l.wg.Add(1)
	l.mu.Unlock()
	go func() {
		tc := tls.Server(c, l.tls)
		err := l.handshake(tc)
		<-l.slots
		l.mu.Lock()
		if l.sources[src]--; l.sources[src] == 0 {
			delete(l.sources, src)
		}
		l.mu.Unlock()
		if err != nil {
			l.end(c, err)
			return
		}
		// In a goroutine of its own: a handshake needs a large stack, and a node's
		// connection would keep it for months.
		go func() { l.end(c, l.serve(tc, c)) }()
	}()
}

// end is the last thing that the goroutine of a connection does.
func (l *Listener) end(c net.Conn, err error) {
	defer l.wg.Done()
	l.forget(c)
	if err == nil {
		return
	}
	_ = c.Close()
	// Port scanners and health checks connect and leave: not worth a line.
	if !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) && l.warn.Allow() {
		l.log.Info("connection refused", "remote", c.RemoteAddr().String(), "error", err)
	}
}

func (l *Listener) forget(c net.Conn) {
	l.mu.Lock()
	delete(l.conns, c)
	l.mu.Unlock()
}

func (l *Listener) handshake(tc *tls.Conn) error {
	ctx, cancel := context.WithTimeout(l.ctx, l.cfg.HandshakeTimeout)
	defer cancel()
	if err := tc.HandshakeContext(ctx); err != nil {
		var record tls.RecordHeaderError
		if errors.As(err, &record) && record.Conn != nil && plainHTTP(record.RecordHeader) {
			answerPlain(record.Conn)
			return errPlainHTTP
		}
		return fmt.Errorf("TLS handshake: %w", err)
	}
	return nil
}

func (l *Listener) serve(tc *tls.Conn, raw net.Conn) error {
	h, c, err := l.route(tc, raw)
	if h == nil {
		return err
	}
	defer func() { _ = tc.Close() }()
	h(l.ctx, c)
	return nil
}

// route finds the handler of a connection; nil is none, or the http.Server's.
// It is apart from serve so that nothing of it stays on the stack.
//
//go:noinline
func (l *Listener) route(tc *tls.Conn, raw net.Conn) (Handler, *Conn, error) {
	c := &Conn{Conn: tc, TLS: tc.ConnectionState(), Raw: raw}
	h := l.cfg.Handlers[c.TLS.NegotiatedProtocol]
	if h == nil {
		select {
		case l.http.queue <- tc:
			return nil, nil, nil
		case <-l.http.closed:
			return nil, nil, net.ErrClosed
		}
	}
	var err error
	if c.Peer, err = l.cfg.Verifier.Peer(c.TLS); err != nil {
		return nil, nil, err
	}
	return h, c, nil
}

// Upgrade serves UpgradePath: a request with "Connection: Upgrade" and
// "Upgrade: <ALPN name>" on HTTP/1.1 over TLS gets 101 and then the protocol.
func (l *Listener) Upgrade() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		proto := r.Header.Get("Upgrade")
		h := l.cfg.Handlers[proto]
		switch {
		case r.ProtoMajor != 1 || r.TLS == nil:
			http.Error(w, "this path upgrades HTTP/1.1 connections over TLS", http.StatusHTTPVersionNotSupported)
			return
		case h == nil:
			http.Error(w, fmt.Sprintf("cannot upgrade to %q", proto), http.StatusUpgradeRequired)
			return
		}
		peer, err := l.cfg.Verifier.Peer(*r.TLS)
		if err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		hj, ok := w.(http.Hijacker)
		if !ok || !l.enter() {
			http.Error(w, "cannot upgrade now", http.StatusServiceUnavailable)
			return
		}
		defer l.wg.Done()
		c, rw, err := hj.Hijack()
		if err != nil {
			http.Error(w, "cannot upgrade this connection", http.StatusInternalServerError)
			return
		}
		defer func() { _ = c.Close() }()
		l.mu.Lock()
		l.conns[c] = struct{}{}
		l.mu.Unlock()
		defer l.forget(c)
		_ = c.SetDeadline(time.Now().Add(l.cfg.HandshakeTimeout))
		if _, err := fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", proto); err != nil {
			return
		}
		_ = c.SetDeadline(time.Time{})
		conn := c
		if n := rw.Reader.Buffered(); n > 0 {
			// The client did not wait for the answer: what it sent already comes
			// first.
			ahead := make([]byte, n)
			if _, err := io.ReadFull(rw.Reader, ahead); err != nil {
				return
			}
			conn = &aheadConn{Conn: c, ahead: ahead}
		}
		raw := c
		if t, ok := c.(*tls.Conn); ok {
			raw = t.NetConn()
		}
		h(l.ctx, &Conn{Conn: conn, TLS: *r.TLS, Peer: peer, Raw: raw})
	})
}

// enter counts a handler that the http.Server started.
func (l *Listener) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return false
	}
	l.wg.Add(1)
	return true
}

type aheadConn struct {
	net.Conn
	ahead []byte
}

// Read implements net.Conn.
func (a *aheadConn) Read(p []byte) (int, error) {
	if len(a.ahead) > 0 {
		n := copy(p, a.ahead)
		a.ahead = a.ahead[n:]
		return n, nil
	}
	return a.Conn.Read(p)
}

func sourceOf(c net.Conn) string {
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		return c.RemoteAddr().String()
	}
	return host
}

// httpListener feeds an http.Server.
type httpListener struct {
	addr   net.Addr
	queue  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// Accept implements net.Listener.
func (h *httpListener) Accept() (net.Conn, error) {
	select {
	case c := <-h.queue:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

func (h *httpListener) close() { h.once.Do(func() { close(h.closed) }) }

// Close implements net.Listener.
func (h *httpListener) Close() error {
	h.close()
	return nil
}

// Addr implements net.Listener.
func (h *httpListener) Addr() net.Addr { return h.addr }
