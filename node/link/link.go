// Package link is the agent's one outbound connection to the control plane.
//
// Owner and goroutines: Link.Run connects, and connects again for ever; a
// session has its reader (wire.Conn.Run), its lease loop and at most
// maxStreams and maxShort streams. Calls from the agent use the current session or fail
// at once with ErrOffline. Nothing here is needed to run pods.
package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
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
	maxStreams   = 32 // about pods: logs, exec, attach, port-forward
	maxShort     = 8  // about the node: figures
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
	// Sessions serves exec, attach and port-forward; nil serves none.
	Sessions node.SessionServer
	// Metrics writes the node's figures as Prometheus text; nil serves none.
	Metrics func(w io.Writer) error
	// Usage writes what node and pods use (a wire.NodeUsage); nil serves none.
	Usage func(ctx context.Context, w io.Writer) error
	// Stopped is called when a server says that what the cluster gave this node
	// runs elsewhere, and why, and with "" when the node is welcome again. It
	// must not block. nil ignores it.
	Stopped func(reason string)
	// NetCheck writes whom the node reaches; nil serves none.
	NetCheck func(ctx context.Context, w io.Writer) error
	// Time receives authenticated time hints; may be nil.
	Time func(TimeHint)
	Dial DialFunc // nil is the network
	// Datagram sends a lease to a server by gossip (kind wire.GossipLease); nil
	// or an error sends it over TCP. What comes back (wire.GossipLeaseAck) is
	// for HandleDatagram.
	Datagram func(serverGossipID string, b []byte) error
	Clock    clock.Clock
	// Elapsed is the time since the machine's boot; nil is clock.Elapsed.
	Elapsed func() time.Duration
	Log     *slog.Logger
}

// Link implements node.Link.
type Link struct {
	c     Config
	log   *slog.Logger
	d     dialer
	hints chan struct{}
	table chan struct{} // the service table changed, or may have

	counter atomic.Uint64 // of leases, within the boot id
	acked   atomic.Int64  // send time of the newest acknowledged lease, since start
	contact atomic.Int64  // likewise, since the machine's boot
	start   time.Time
	term    atomic.Uint64
	unled   atomic.Bool // the last lease was refused: nobody leads there (yet)

	mu       sync.Mutex
	cur      *wire.Conn
	last     string   // address that worked last
	redirect []string // where the last server said that the leader is
	via      string   // the server that said so
	silent   silence  // addresses that were silent lately
	relayed  bool     // cur is by way of last
	twin     string   // where another machine with our key is
	refused  string   // why the last server said no
	failed   string   // why there is no connection; "" while there is one
	lastNode *wire.Report
	attempts uint64

	udp    udpLeases
	byUDP  atomic.Uint64
	byTCP  atomic.Uint64
	nudged atomic.Int64 // when a nudge came by gossip, since start

	streams sync.WaitGroup
	slots   chan struct{} // taken by streams about pods
	short   chan struct{} // by those about the node
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
	if c.Elapsed == nil {
		c.Elapsed = clock.Elapsed
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	l := &Link{c: c, log: c.Log, d: newDialer(c.Dial), hints: make(chan struct{}, 1), table: make(chan struct{}, 1),
		start: time.Now(), slots: make(chan struct{}, maxStreams), short: make(chan struct{}, maxShort), silent: silence{}}
	l.udp.acks = make(chan wire.LeaseDatagram, 1)
	l.acked.Store(-1)
	l.contact.Store(-1)
	return l, nil
}

// Hints implements node.Link.
func (l *Link) Hints() <-chan struct{} { return l.hints }

func (l *Link) hint() { wake(l.hints) }

// ServiceHints says that the service table changed or may have: nudged, or
// connected anew. Like Hints it is only a hint.
func (l *Link) ServiceHints() <-chan struct{} { return l.table }

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Connected implements node.Link.
func (l *Link) Connected() bool {
	at := l.acked.Load()
	return at >= 0 && time.Since(l.start)-time.Duration(at) < leaseTTL
}

// Contact is when the newest acknowledged lease was sent, since the machine's
// boot; ok is false if none was. Stop deadlines of pods count from it.
func (l *Link) Contact() (sent time.Duration, ok bool) {
	at := l.contact.Load()
	return time.Duration(at), at >= 0
}

// LastAcked is when the newest acknowledged lease was sent, on the monotonic
// clock; zero if none was.
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
	Relayed   bool   // Server passes everything on to the one that leads
	Refused   string // why the last server said no
	Failed    string // why there is no connection; "" while there is one
	Attempts  uint64 // connections tried since the start
	Term      uint64 // newest leader term seen
	Twin      string // where another machine with this node's key is, which is refused
}

// Status describes the link.
func (l *Link) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Status{Connected: l.Connected(), Server: l.last, Relayed: l.relayed, Refused: l.refused, Failed: l.failed, Attempts: l.attempts, Term: l.term.Load(), Twin: l.twin}
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

// Services asks for what changed in the service table.
func (l *Link) Services(ctx context.Context, r wire.ServicesRequest) (*wire.ServicesReply, error) {
	out := new(wire.ServicesReply)
	if err := l.call(ctx, &r, out); err != nil {
		return nil, err
	}
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
	redirects := 0
	for try := 0; ctx.Err() == nil; try++ {
		began := time.Now()
		err := l.connectOnce(ctx)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, errRenewed) || errors.Is(err, errDirect) {
			try = -1
			continue
		}
		if errors.Is(err, errRedirect) && redirects < maxRedirects {
			redirects++
			continue
		}
		redirects = 0
		if time.Since(began) > 2*backoffMax || errors.Is(err, errSilent) {
			try = 0 // it worked for a while; and a lease does not wait long for another way
		}
		l.mu.Lock()
		l.failed = err.Error()
		l.mu.Unlock()
		wait := pause(err, try)
		if text := err.Error(); text != told || try%256 == 0 {
			level := slog.LevelInfo
			if errors.Is(err, errCertificate) {
				level = slog.LevelWarn // waiting alone will not help
			}
			l.log.Log(ctx, level, "not connected to the control plane", "error", err, "again_in", wait)
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
	now := time.Now()
	leader := targets(l.redirect)
	list := routes(leader, l.via, l.last, targets(shuffled(told), g.Servers, g.JoinedBy), func(a string) time.Time { return l.silent.since(now, a) })
	l.redirect = nil
	l.attempts++
	l.mu.Unlock()
	c, err := l.connectRoutes(ctx, list, wire.ALPNNode, l.c.Identity.Certificate())
	if err != nil {
		l.mu.Lock()
		l.last = "" // another order next time: the list decides
		l.mu.Unlock()
		return explained(err)
	}
	defer func() { _ = c.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	hello, err := l.hello(c, g)
	err = explained(err)
	l.mu.Lock()
	l.last, l.refused = c.addr, ""
	if err != nil {
		l.last, l.refused = "", err.Error()
	}
	if errors.Is(err, errRedirect) {
		l.redirect, l.via = hello.Leader, c.addr
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
	if c.relayed {
		key = nil // no datagram takes the way round
	}
	l.udp.begin(key, hello.GossipID)
	defer l.udp.begin(nil, "")
	err = l.serve(ctx, c, leader)
	if errors.Is(err, errSilent) {
		l.mu.Lock()
		l.last = ""
		l.mu.Unlock()
		l.wereSilent([]string{c.addr})
	}
	return err
}

func (l *Link) timeHint(unixMilli int64, err time.Duration) {
	if l.c.Time != nil && unixMilli > 0 {
		l.c.Time(TimeHint{Server: time.UnixMilli(unixMilli), Error: err})
	}
}

func (l *Link) certificate() *tls.Certificate { return l.c.Identity.Certificate() }
