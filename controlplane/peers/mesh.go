// Package peers joins the servers of a cluster: Raft's transport, and what
// servers ask each other, over mTLS on the one port.
//
// Owner and goroutines: a Mesh owns at most one connection to each other
// server (dialled on demand) with its reader, and Run's loop, which greets
// every known server that it is not connected to. Close ends all of it and
// waits. Incoming connections are served by the listener's goroutines.
//
// A server is its id, which its certificate names; addresses are hints that
// are learned from whoever proves to be that server, and kept outside Raft,
// so that all servers may change address at once.
package peers

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/internal/attempt"
	"github.com/dunlin-project/dunlin/wire"
)

// DialFunc opens a TCP connection.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

// Serve answers a request of the server from.
type Serve func(ctx context.Context, from string, t wire.Type, body []byte) (wire.Message, error)

// Config of a Mesh. ID, ClusterID, Epoch, Roots, Certificate and Book are
// required.
type Config struct {
	ID        string
	ClusterID string
	Name      string // of this server, for people
	Version   string
	// Epoch is the recovery epoch that this server is of.
	Epoch func() uint64
	// Level is the cluster's feature level: a server that understands less is
	// not spoken to. nil is 0, before it is known.
	Level func() uint32
	// Addresses are this server's own, host:port, best first.
	Addresses func() []string
	// Roots are the authorities of the cluster; Certificate is this server's.
	Roots       []*x509.Certificate
	Certificate func() (*tls.Certificate, error)
	// Book keeps the addresses of all servers.
	Book *consensus.Peers
	// Seeds are further addresses at which some server may be found.
	Seeds []string
	// Hints are addresses of a server that somebody mentioned; tried after
	// those in Book, since its certificate proves who is there. May be nil.
	Hints func(id string) []string
	// Removed says whether a server was taken out of the cluster for good; nil
	// is nobody.
	Removed func(id string) bool
	// Fenced is called, not more than once, when another server proves that
	// the cluster went on without this one: it was recovered (epoch is higher)
	// or this server was removed (epoch is 0).
	Fenced func(by string, epoch uint64)
	// Behind is called instead when the cluster's feature level is one that
	// this build does not understand.
	Behind func(level uint32)
	Dial   DialFunc // nil is the network
	Log    *slog.Logger
}

// Mesh is this server's side of the servers' connections. Safe for concurrent
// use.
type Mesh struct {
	cfg   Config
	log   *slog.Logger
	serve Serve
	raft  *stream

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	fence  sync.Once
	moved  chan struct{}

	mu    sync.Mutex
	conns map[string]*peerConn // by server id
	seeds map[string]string    // seed address -> the server found there
	said  map[string]string    // last trouble with a target, logged once
	// mentioned are addresses of a server that another one told last, by both
	// ids, where they are not those in the book.
	mentioned map[mention][]string
}

// mention is what the server by says of the server about.
type mention struct{ about, by string }

// New prepares a Mesh.
func New(cfg Config) (*Mesh, error) {
	if cfg.ID == "" || cfg.ClusterID == "" || cfg.Epoch == nil || len(cfg.Roots) == 0 || cfg.Certificate == nil || cfg.Book == nil {
		return nil, errors.New("peers: id, cluster, epoch, authority, certificate and address book are required")
	}
	if cfg.Level == nil {
		cfg.Level = func() uint32 { return 0 }
	}
	if cfg.Addresses == nil {
		cfg.Addresses = func() []string { return nil }
	}
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{KeepAlive: 15 * time.Second}).DialContext
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	m := &Mesh{cfg: cfg, log: cfg.Log, moved: make(chan struct{}, 1), conns: map[string]*peerConn{}, seeds: map[string]string{}, said: map[string]string{}, mentioned: map[mention][]string{}}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	m.raft = newStream(m)
	return m, nil
}

// Handle sets what answers requests; before anything is accepted.
func (m *Mesh) Handle(s Serve) { m.serve = s }

// Handlers are for the listener, by ALPN name.
func (m *Mesh) Handlers() map[string]listener.Handler {
	return map[string]listener.Handler{wire.ALPNRaft: m.serveRaft, wire.ALPNServer: m.serveServer}
}

// Close ends all connections and waits.
func (m *Mesh) Close() error {
	m.cancel()
	_ = m.raft.Close()
	m.wg.Wait()
	return nil
}

// Timing of the greetings.
const (
	greetEvery  = 10 * time.Second
	dialTimeout = 4 * time.Second
	// dialStagger is how long one address may stay silent before the next is
	// tried beside it.
	dialStagger = 400 * time.Millisecond
)

// Run greets the servers that are known and not connected, now and then, so
// that addresses and epochs are told also when nothing is asked. It returns
// when ctx ends.
func (m *Mesh) Run(ctx context.Context) error {
	for {
		m.greet(ctx)
		t := time.NewTimer(greetEvery*3/4 + rand.N(greetEvery/2))
		select {
		case <-t.C:
		case <-m.moved:
			t.Stop()
		case <-ctx.Done():
			t.Stop()
			return nil
		}
	}
}

func (m *Mesh) greet(ctx context.Context) {
	var wg sync.WaitGroup
	for _, id := range slices.Sorted(maps.Keys(m.cfg.Book.All())) {
		if id == m.cfg.ID || m.removed(id) {
			continue
		}
		wg.Go(func() {
			_, err := m.conn(ctx, id)
			m.trouble(id, "another server cannot be reached", err)
		})
	}
	for _, addr := range m.cfg.Seeds {
		m.mu.Lock()
		c := m.conns[m.seeds[addr]]
		m.mu.Unlock()
		if c != nil {
			continue
		}
		wg.Go(func() {
			err := m.greetSeed(ctx, addr)
			m.trouble(addr, "no server found at an address (of --peers, or of the join line)", err)
		})
	}
	wg.Wait()
}

// greetSeed finds out who is at an address. What was learned from it is used
// by the next greeting.
func (m *Mesh) greetSeed(ctx context.Context, addr string) error {
	c, id, err := m.open(ctx, addr, wire.ALPNServer, "")
	if errors.Is(err, errSelf) {
		return nil
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	m.seeds[addr] = id
	m.mu.Unlock()
	m.adopt(id, c)
	return nil
}

// Find connects to whichever other server answers at one of the addresses.
func (m *Mesh) Find(ctx context.Context, addrs []string) (id string, err error) {
	type found struct {
		c  net.Conn
		id string
	}
	f, err := attempt.First(ctx, dialStagger, addrs, func(ctx context.Context, addr string) (found, error) {
		c, id, err := m.open(ctx, addr, wire.ALPNServer, "")
		return found{c, id}, err
	}, func(f found) { _ = f.c.Close() })
	if err != nil {
		return "", unreachable("any", err)
	}
	m.adopt(f.id, f.c)
	return f.id, nil
}

// Moved says that this server has other addresses: every connection from an
// old one is given up, and the others are greeted from the new one.
func (m *Mesh) Moved() {
	m.mu.Lock()
	ids := slices.Collect(maps.Keys(m.conns))
	m.mu.Unlock()
	for _, id := range ids {
		m.forget(id)
	}
	m.raft.closeAll("")
	select {
	case m.moved <- struct{}{}:
	default:
	}
}

// forget gives up the connections to a server, to be made anew.
func (m *Mesh) forget(id string) {
	m.raft.closeAll(id)
	m.mu.Lock()
	p := m.conns[id]
	m.mu.Unlock()
	if p == nil {
		return
	}
	select {
	case <-p.ready:
		m.drop(id, p)
		if p.conn != nil {
			p.conn.Close(errMoved)
		}
	default: // being made
	}
}

var errMoved = errors.New("a server has another address")

// trouble logs what is wrong with a server once, and that it is over.
func (m *Mesh) trouble(about, what string, err error) {
	if m.ctx.Err() != nil {
		return
	}
	text := ""
	if err != nil {
		text = err.Error()
	}
	m.mu.Lock()
	if len(m.said) > 4*maxBook {
		clear(m.said) // at worst something is said twice
	}
	old := m.said[about]
	m.said[about] = text
	m.mu.Unlock()
	switch {
	case text == old:
	case text == "":
		m.log.Info("another server is reached again", "server", about)
	case old == "":
		m.log.Warn(what, "server", about, "err", err)
	}
}

func (m *Mesh) removed(id string) bool { return m.cfg.Removed != nil && m.cfg.Removed(id) }

func (m *Mesh) fenced(by string, epoch uint64) {
	m.fence.Do(func() {
		if m.cfg.Fenced != nil {
			m.cfg.Fenced(by, epoch)
		}
	})
}

// learn keeps what another server says of the servers' addresses: of itself
// whatever it says, of others what is not known at all. What it says of others
// otherwise is tried when they are not found where they were.
func (m *Mesh) learn(id string, h *wire.Hello) {
	if old := m.cfg.Book.Resolve(id); len(h.Addresses) > 0 && len(old) > 0 && !slices.Equal(old, clean(h.Addresses)) {
		defer m.forget(id) // what goes to the old address may wait for a long time
	}
	set := func(id string, addrs []string) {
		if err := m.cfg.Book.Set(id, clean(addrs)); err != nil {
			m.log.Warn("address of a server not kept", "server", id, "err", err)
		}
	}
	if len(h.Addresses) > 0 {
		set(id, h.Addresses)
	}
	m.mu.Lock()
	maps.DeleteFunc(m.mentioned, func(k mention, _ []string) bool { return k.by == id })
	m.mu.Unlock()
	for other, addrs := range h.Peers {
		if other == m.cfg.ID || other == id || m.removed(other) || len(other) > 64 || len(addrs) == 0 {
			continue
		}
		switch known := m.cfg.Book.Resolve(other); {
		case len(known) == 0 && len(m.cfg.Book.All()) < maxBook:
			set(other, addrs)
		case len(known) > 0 && !slices.Equal(known, clean(addrs)):
			m.mu.Lock()
			m.mentioned[mention{other, id}] = clean(addrs)
			m.mu.Unlock()
		}
	}
}

// addresses are where a server may be, best first: where it was, then what
// the other servers say, then what is said elsewhere. Only the server itself
// can prove that it is there, so a wrong one costs a try.
func (m *Mesh) addresses(id string) []string {
	list := slices.Clone(m.cfg.Book.Resolve(id))
	m.mu.Lock()
	for _, by := range slices.Sorted(maps.Keys(m.cfg.Book.All())) {
		list = append(list, m.mentioned[mention{id, by}]...)
	}
	m.mu.Unlock()
	if m.cfg.Hints != nil {
		list = append(list, clean(m.cfg.Hints(id))...)
	}
	seen := map[string]bool{}
	return slices.DeleteFunc(list, func(a string) bool {
		was := seen[a]
		seen[a] = true
		return was
	})
}

const (
	maxAddresses = 8
	maxBook      = 32
)

// clean bounds what a book keeps.
func clean(addrs []string) []string {
	var out []string
	for _, a := range addrs {
		if _, _, err := net.SplitHostPort(a); err == nil && len(a) <= 300 && !slices.Contains(out, a) && len(out) < maxAddresses {
			out = append(out, a)
		}
	}
	return out
}

// ErrUnreachable says that a server does not answer.
var ErrUnreachable = errors.New("server cannot be reached")

func unreachable(id string, err error) error {
	return fmt.Errorf("%w: %s: %w", ErrUnreachable, id, err)
}
