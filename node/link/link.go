// Package link is the agent's one outbound connection to the control plane.
//
// Owner and goroutines: Link.Run connects, and connects again for ever; a
// session has its reader (wire.Conn.Run), its lease loop and at most
// maxStreams streams. Calls from the agent use the current session or fail
// at once with ErrOffline. Nothing here is needed to run pods.
package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// ErrOffline is returned by every call while there is no connection.
var ErrOffline = errors.New("link: not connected to the control plane")

// Timing of leases (design: Leases). Connected means acknowledged within the
// server's TTL, counted from when the renewal was sent.
const (
	leaseInterval = 2 * time.Second
	leaseTTL      = 6500 * time.Millisecond
	// leaseRetry is how long an acknowledgement is waited for before the
	// renewal is sent again, within the interval.
	leaseRetry = 900 * time.Millisecond
	// leaseDead is how long a connection may stay silent before another one is
	// tried: late enough for TCP to repeat itself at 20 % loss, early enough to
	// reach another server within the TTL.
	leaseDead = 4500 * time.Millisecond

	helloTimeout = 10 * time.Second // a server may take 3 s to tell a clone from a restart
	renewCheck   = 10 * time.Minute
	maxStreams   = 32
)

// TimeHint is a server's wall clock.
type TimeHint struct {
	Server time.Time     // its clock
	Error  time.Duration // half the round trip: how far off it can be
}

// Config of a Link.
type Config struct {
	Identity *pki.NodeIdentity // required, joined
	BootID   string            // differs on every start of the agent
	Version  string
	// Generation is that of the assignment held; nil is unknown.
	Generation func() uint64
	// Servers are the addresses that the last assignment named; nil is none.
	Servers func() []string
	// Streams serves logs; nil serves none.
	Streams node.StreamServer
	// Time receives authenticated time hints; may be nil.
	Time func(TimeHint)
	Dial DialFunc // nil is the network
	// Datagram sends a lease to a server by gossip (kind wire.GossipLease); nil
	// or an error sends it over TCP. What comes back (wire.GossipLeaseAck) is
	// for HandleDatagram.
	Datagram func(serverGossipID string, b []byte) error
	Clock    clock.Clock
	Log      *slog.Logger
}

// Link implements node.Link.
type Link struct {
	c     Config
	log   *slog.Logger
	d     dialer
	hints chan struct{}

	counter atomic.Uint64 // of leases, within the boot id
	acked   atomic.Int64  // send time of the newest acknowledged lease, since start
	start   time.Time
	term    atomic.Uint64

	mu       sync.Mutex
	cur      *wire.Conn
	last     string // address that worked last
	refused  string // why the last server said no
	lastNode *wire.Report
	attempts uint64

	udp    udpLeases
	byUDP  atomic.Uint64
	nudged atomic.Int64 // when a nudge came by gossip, since start

	streams sync.WaitGroup
	slots   chan struct{}
}

var _ node.Link = (*Link)(nil)

// New prepares a Link; nothing happens before Run.
func New(c Config) (*Link, error) {
	if c.Identity == nil || !c.Identity.Joined() {
		return nil, errors.New("link: the node has not joined a cluster")
	}
	if c.BootID == "" {
		return nil, errors.New("link: a boot id is required")
	}
	if c.Clock == nil {
		c.Clock = clock.System
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	l := &Link{c: c, log: c.Log, d: newDialer(c.Dial), hints: make(chan struct{}, 1),
		start: time.Now(), slots: make(chan struct{}, maxStreams)}
	l.udp.acks = make(chan wire.LeaseDatagram, 1)
	l.acked.Store(-1)
	return l, nil
}

// Hints implements node.Link.
func (l *Link) Hints() <-chan struct{} { return l.hints }

func (l *Link) hint() {
	select {
	case l.hints <- struct{}{}:
	default:
	}
}

// Connected implements node.Link.
func (l *Link) Connected() bool {
	at := l.acked.Load()
	return at >= 0 && time.Since(l.start)-time.Duration(at) < leaseTTL
}

// LastAcked is when the newest acknowledged lease was sent, on the monotonic
// clock; zero if none was. Deadlines of at-most-one pods count from it.
func (l *Link) LastAcked() time.Time {
	if at := l.acked.Load(); at >= 0 {
		return l.start.Add(time.Duration(at))
	}
	return time.Time{}
}

// Bytes counts what went over the wire, TLS included.
func (l *Link) Bytes() (in, out uint64) { return l.d.counters.Bytes() }

// ByUDP counts the leases that were acknowledged by UDP.
func (l *Link) ByUDP() uint64 { return l.byUDP.Load() }

// Status is for people: which server, or why none.
type Status struct {
	Connected bool
	Server    string // connected to, or the last one
	Refused   string // why the last server said no
	Attempts  uint64 // connections tried since the start
	Term      uint64 // newest leader term seen
}

// Status describes the link.
func (l *Link) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Status{Connected: l.Connected(), Server: l.last, Refused: l.refused, Attempts: l.attempts, Term: l.term.Load()}
}

func (l *Link) session() *wire.Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cur
}

// Pull implements node.Link.
func (l *Link) Pull(ctx context.Context, r wire.PullRequest) (*wire.Assignment, error) {
	out := new(wire.Assignment)
	if err := l.call(ctx, &r, out); err != nil {
		return nil, err
	}
	l.timeHint(out.UnixMilli, time.Minute) // the reply may have taken long
	return out, nil
}

// Report implements node.Link.
func (l *Link) Report(ctx context.Context, r *wire.Report) (*wire.ReportReply, error) {
	out := new(wire.ReportReply)
	if err := l.call(ctx, r, out); err != nil {
		return nil, err
	}
	l.mu.Lock()
	if len(r.Node) > 0 {
		l.lastNode = &wire.Report{BootID: r.BootID, Node: r.Node}
	}
	if l.lastNode != nil && l.lastNode.BootID == r.BootID {
		l.lastNode.Seq = max(l.lastNode.Seq, r.Seq)
	}
	l.mu.Unlock()
	return out, nil
}

func (l *Link) call(ctx context.Context, req, reply wire.Message) error {
	c := l.session()
	if c == nil {
		return ErrOffline
	}
	err := c.Call(ctx, req, reply)
	if errors.Is(err, wire.ErrClosed) {
		return fmt.Errorf("%w: %w", ErrOffline, err)
	}
	return err
}

// Run keeps a connection until ctx ends, and waits for everything it
// started.
func (l *Link) Run(ctx context.Context) error {
	defer l.streams.Wait()
	var told string
	for try := 0; ctx.Err() == nil; try++ {
		began := time.Now()
		err := l.connectOnce(ctx)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, errRenewed) {
			try = -1
			continue
		}
		if time.Since(began) > 2*backoffMax {
			try = 0 // it worked for a while
		}
		wait := backoff(try)
		if errors.Is(err, ErrRefused) {
			wait = max(wait, backoffMax/4)
		}
		if text := err.Error(); text != told || try%32 == 0 {
			l.log.Info("not connected to the control plane", "error", err, "again_in", wait)
			told = text
		}
		if !sleep(ctx, wait) {
			break
		}
	}
	return nil
}

// errRenewed ends a limited session after its certificate was renewed.
var errRenewed = errors.New("link: certificate renewed")

// connectOnce connects, serves one session and returns why it ended.
func (l *Link) connectOnce(ctx context.Context) error {
	g := l.c.Identity.Grant()
	var told []string
	if l.c.Servers != nil {
		told = l.c.Servers()
	}
	l.mu.Lock()
	last := l.last
	l.attempts++
	l.mu.Unlock()
	addrs := targets(last, told, g.Servers, g.JoinedBy)
	c, err := l.d.connectAny(ctx, addrs, wire.ALPNNode, l.c.Identity.Certificate(), pki.VerifyServer(l.c.Identity.Roots()))
	if err != nil {
		l.mu.Lock()
		l.last = "" // another order next time: the list decides
		l.mu.Unlock()
		return err
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	hello, err := l.hello(c, g)
	l.mu.Lock()
	l.last, l.refused = c.addr, ""
	if err != nil {
		l.last, l.refused = "", err.Error()
	}
	l.mu.Unlock()
	if err != nil {
		return err
	}
	if hello.Limited {
		return l.limited(ctx, c)
	}
	key, err := pki.LeaseKey(c.tls.ConnectionState())
	if err != nil {
		return err
	}
	l.udp.begin(key, hello.GossipID)
	defer l.udp.begin(nil, "")
	return l.serve(ctx, c)
}

// hello exchanges the first messages and judges the server's.
func (l *Link) hello(c *conn, g pki.Grant) (*wire.Hello, error) {
	_ = c.SetDeadline(time.Now().Add(helloTimeout))
	defer func() { _ = c.SetDeadline(time.Time{}) }()
	sent := time.Now()
	err := wire.WriteMessage(c, &wire.Hello{
		ClusterID: g.ClusterID, Epoch: g.Epoch, Feature: wire.FeatureLevel, Version: l.c.Version,
		NodeName: g.NodeName, NodeUID: g.NodeUID, BootID: l.c.BootID, UnixMilli: l.c.Clock.Now().UnixMilli(),
	})
	if err != nil {
		return nil, fmt.Errorf("link: hello: %w", err)
	}
	h := new(wire.Hello)
	if err := wire.ReadMessage(c, h); err != nil {
		return nil, fmt.Errorf("link: hello: %w", err)
	}
	if h.Refused != "" {
		return nil, fmt.Errorf("%w: %s", ErrRefused, h.Refused)
	}
	if reason := refuseServer(h, g); reason != "" {
		return nil, fmt.Errorf("link: server %s not accepted: %s", c.addr, reason)
	}
	if h.Epoch > g.Epoch {
		if err := l.c.Identity.Update(func(g *pki.Grant) { g.Epoch = h.Epoch }); err != nil {
			return nil, err // an epoch that is not kept could be forgotten
		}
	}
	l.timeHint(h.UnixMilli, time.Since(sent)/2)
	return h, nil
}

// refuseServer is the node's side of the negotiation; "" accepts.
func refuseServer(h *wire.Hello, g pki.Grant) string {
	switch {
	case h.ClusterID != g.ClusterID:
		return fmt.Sprintf("it is of cluster %s, this node of %s", h.ClusterID, g.ClusterID)
	case h.Epoch < g.Epoch:
		return fmt.Sprintf("it is from before a recovery of the cluster (epoch %d, seen %d)", h.Epoch, g.Epoch)
	case h.Feature < wire.OldestFeature:
		return fmt.Sprintf("its version %q is too old (feature level %d, this node needs %d); upgrade the servers first", h.Version, h.Feature, wire.OldestFeature)
	}
	return ""
}

func (l *Link) timeHint(unixMilli int64, err time.Duration) {
	if l.c.Time != nil && unixMilli > 0 {
		l.c.Time(TimeHint{Server: time.UnixMilli(unixMilli), Error: err})
	}
}

// limited serves a connection on which the server allows only Time and
// Renew, since our certificate is outside its dates.
func (l *Link) limited(ctx context.Context, c *conn) error {
	l.log.Info("certificate is outside its dates: renewing", "server", c.addr)
	wc := wire.NewConn(c, nil, wire.Options{Initiator: true})
	done := make(chan error, 1)
	go func() { done <- wc.Run(ctx) }()
	defer func() {
		wc.Close(nil)
		<-done //nolint:errcheck // it was closed here
	}()
	call, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	sent := time.Now()
	tr := new(wire.TimeReply)
	if err := wc.Call(call, &wire.TimeRequest{UnixMilli: l.c.Clock.Now().UnixMilli()}, tr); err != nil {
		return err
	}
	if tr.Trusted {
		l.timeHint(tr.UnixMilli, time.Since(sent)/2)
	}
	if err := l.renew(call, wc); err != nil {
		return err
	}
	return errRenewed
}

func (l *Link) renew(ctx context.Context, wc *wire.Conn) error {
	csr, err := l.c.Identity.CSR()
	if err != nil {
		return err
	}
	reply := new(wire.RenewReply)
	if err := wc.Call(ctx, &wire.RenewRequest{CSR: csr}, reply); err != nil {
		return fmt.Errorf("link: renew certificate: %w", err)
	}
	if reply.Refused != "" {
		return fmt.Errorf("link: renew certificate: %w: %s", ErrRefused, reply.Refused)
	}
	if err := l.c.Identity.Update(func(g *pki.Grant) { g.Cert = reply.Cert }); err != nil {
		return err
	}
	l.log.Info("certificate renewed", "until", l.c.Identity.Certificate().Leaf.NotAfter)
	return nil
}

// serve runs a full session.
func (l *Link) serve(ctx context.Context, c *conn) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wc := wire.NewConn(c, l.handler(ctx, c.addr), wire.Options{
		Initiator: true, Accept: []wire.Type{wire.TypeNudge, wire.TypeStreamRequest}, IdleTimeout: 30 * time.Second,
	})
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { l.leaseLoop(ctx, wc) })
	wg.Go(func() { l.renewLoop(ctx, wc) })
	wg.Go(func() { l.sayAgain(ctx, wc) })
	l.log.Info("connected to the control plane", "server", c.addr)
	l.mu.Lock()
	l.cur = wc
	l.mu.Unlock()
	l.hint()
	err := wc.Run(ctx)
	l.mu.Lock()
	l.cur = nil
	l.mu.Unlock()
	cancel()
	return err
}

// sayAgain repeats what the node last said of itself on every new
// connection: the server that heard it may be gone, or may have written
// "unknown" over it meanwhile. Only what is not known yet is written there.
func (l *Link) sayAgain(ctx context.Context, wc *wire.Conn) {
	l.mu.Lock()
	r := l.lastNode
	if r != nil {
		c := *r
		r = &c
	}
	l.mu.Unlock()
	if r == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := wc.Call(ctx, r, new(wire.ReportReply)); err != nil {
		l.log.Debug("node status not repeated", "error", err)
	}
}

func (l *Link) handler(ctx context.Context, addr string) wire.Handler {
	return wire.HandlerFunc(func(_ context.Context, t wire.Type, body []byte) (wire.Message, error) {
		switch t {
		case wire.TypeNudge:
			l.hint()
		case wire.TypeStreamRequest:
			r := new(wire.StreamRequest)
			if err := wire.Unmarshal(body, r); err != nil {
				return nil, err
			}
			l.openStream(ctx, addr, r)
		}
		return nil, nil
	})
}

// leaseLoop renews the lease until the session ends, and ends the session
// when nothing is acknowledged.
func (l *Link) leaseLoop(ctx context.Context, wc *wire.Conn) {
	lastAck := time.Now()
	for {
		next := time.Now().Add(leaseInterval)
		var wait time.Duration
		sent := time.Now()
		ok, err := l.leaseByUDP(ctx), error(nil)
		if !ok {
			sent = time.Now()
			ok, err = l.lease(ctx, wc)
		}
		switch {
		case ctx.Err() != nil:
			return
		case ok:
			lastAck = time.Now()
			l.acked.Store(int64(sent.Sub(l.start)))
			wait = time.Until(next)
		case time.Since(lastAck) > leaseDead:
			wc.Close(fmt.Errorf("link: no lease acknowledged for %s: %w", leaseDead, err))
			return
		default:
			wait = max(leaseRetry-time.Since(sent), 0)
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-wc.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

func (l *Link) lease(ctx context.Context, wc *wire.Conn) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, leaseRetry)
	defer cancel()
	reply := new(wire.LeaseReply)
	err := wc.Call(ctx, &wire.LeaseRequest{Counter: l.counter.Add(1)}, reply)
	if err != nil {
		return false, err
	}
	if reply.Refused != "" {
		return false, fmt.Errorf("%w: %s", ErrRefused, reply.Refused)
	}
	if reply.GossipID != "" {
		l.udp.at(reply.GossipID)
	}
	l.acknowledged(reply.Term, reply.Generation)
	return true, nil
}

func (l *Link) acknowledged(term, generation uint64) {
	l.term.Store(max(l.term.Load(), term))
	if l.c.Generation != nil && generation != 0 && generation != l.c.Generation() {
		l.hint()
	}
}

// renewLoop renews the certificate in good time. It looks at the wall clock
// rather than sleeping until a date, since the clock may jump.
func (l *Link) renewLoop(ctx context.Context, wc *wire.Conn) {
	t := time.NewTicker(renewCheck)
	defer t.Stop()
	for {
		cert := l.c.Identity.Certificate()
		if pki.NeedsRenewal(cert.Leaf, l.c.Clock.Now()) {
			rctx, cancel := context.WithTimeout(ctx, 30*time.Second)
			if err := l.renew(rctx, wc); err != nil && ctx.Err() == nil {
				l.log.Warn("certificate not renewed", "until", cert.Leaf.NotAfter, "error", err)
			}
			cancel()
		}
		select {
		case <-ctx.Done():
			return
		case <-wc.Done():
			return
		case <-t.C:
		}
	}
}

func (l *Link) certificate() *tls.Certificate { return l.c.Identity.Certificate() }
