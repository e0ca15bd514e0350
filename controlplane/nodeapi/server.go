// Package nodeapi is what nodes call: joining, leases, the assignment,
// reports, certificate renewal, and the streams that the control plane asks
// a node to open.
//
// Owner and goroutines: Server.Run owns the sweep of the leases and the
// watch that keeps the assignments of connected nodes current; every
// connection is served by its handler's goroutine. Leases and sessions live
// in memory; everything else is read from and written to the registry.
//
// A connection is a hint: whatever it carries is checked against the store
// when it arrives, and nothing is lost when it breaks.
package nodeapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	goruntime "runtime"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

var (
	podGK            = schema.GroupKind{Kind: "Pod"}
	nodeGK           = schema.GroupKind{Kind: "Node"}
	secretGK         = schema.GroupKind{Kind: "Secret"}
	serviceAccountGK = schema.GroupKind{Kind: "ServiceAccount"}
	leaseGK          = schema.GroupKind{Group: "coordination.k8s.io", Kind: "Lease"}
)

// EventSink takes Events for the soft store; *events.Sink is one.
type EventSink interface{ Add(events.Entry) }

// TokenIssuer signs ServiceAccount tokens; *auth.Issuer is one.
type TokenIssuer interface {
	Issue(sa *corev1.ServiceAccount, bound runtime.Object, node *auth.Ref, audiences []string, lifetime time.Duration) (string, time.Time, error)
}

// Leadership says whether this server leads, and in which term; a
// state.Proposer is one.
type Leadership interface {
	Leadership() (term uint64, leading bool)
}

// Site is what the nodes of one site need for their gossip.
type Site struct {
	Keyring [][]byte // first is primary
	Seeds   []string // host:port
}

// Config of a Server. Store, Leadership, CA and ClusterID are required.
type Config struct {
	Store      registry.Store
	Leadership Leadership
	CA         *pki.CA
	ClusterID  string
	// Epoch is the recovery epoch of this cluster; nil is 1 for ever.
	Epoch func() uint64
	// Lost are the versions that recoveries gave up; nil is none.
	Lost func() []wire.Lost
	// HigherEpoch is called when a node has seen a higher epoch than ours: this
	// server is a leftover of before a recovery and must stop writing. node is
	// its uid, as its certificate says; it must not block.
	HigherEpoch func(node string, epoch uint64)
	Version     string
	// Leader names the addresses of the server that leads, none if none is
	// known, and a channel that is closed when that may be another one: nodes
	// that come to a server that does not lead are sent there. nil: only this
	// server can lead.
	Leader func() (addrs []string, changed <-chan struct{})
	// ToLeader opens a TCP connection to the server that leads, for nodes that
	// cannot; nil: only this server can lead.
	ToLeader func(ctx context.Context) (net.Conn, error)
	// LeaderHeard is when this server last heard from another one that leads;
	// zero: never. nil: only this server can lead.
	LeaderHeard func() time.Time
	// Fresh returns once this server has everything that was acknowledged
	// before; nil: it always has.
	Fresh func(ctx context.Context) error
	// Servers lists host:port of all servers, for nodes to keep.
	Servers func() []string
	// Tokens issues ServiceAccount tokens for projected volumes; nil is none.
	Tokens TokenIssuer
	Events EventSink // nil drops them
	// Site returns the gossip keys and seeds of a site (zone). nil keeps the
	// keys as Secrets in kube-system and takes the seeds from the nodes.
	Site func(zone string) Site
	// GossipID is this server's member id in the gossip pool of its own site;
	// nil or "" is no leases over UDP.
	GossipID func() string
	// Members are gossip addresses (host:port) of this server's own pool, and
	// its site; nil is no pool. They are the first seeds of that site.
	Members func() (site string, addrs []string)
	// Nudge also sends a hint by gossip to the node uid (kind
	// wire.GossipNudge): the node's connection may be busy or just broken. nil
	// sends none.
	Nudge func(uid string, b []byte)
	// ClockOK, when it returns an error, stops joins and renewals: this
	// server's clock cannot be trusted to issue certificates.
	ClockOK func() error
	// PodCIDRs are the ranges of pod addresses, cut into one of NodeBits each
	// (default 10.42.0.0/16 in /24; an IPv6 range in /64 or NodeBits6).
	PodCIDRs  []netip.Prefix
	NodeBits  int
	NodeBits6 int
	// ServiceCIDRs are the ranges of service addresses, which nodes route to
	// their proxy. The first holds the address of DNS.
	ServiceCIDRs []netip.Prefix
	Clock        clock.Clock
	Log          *slog.Logger
}

// Server implements the server's side of the node protocol.
type Server struct {
	cfg      Config
	log      *slog.Logger
	leases   *Leases
	assign   *assigner
	streams  *streams
	usages   *usages
	services *table

	mu       sync.Mutex
	sessions map[string]*session // by node uid
	byName   map[string]*session
	seqs     map[string]reportSeq // newest report, by node uid
	twins    map[string]twin      // copies of nodes, by node name
	relays   map[string]int       // connections that are passed on to the leader, by node uid

	ranges   podRanges
	tokens   chan struct{} // held while a join token is used up; a channel, since its holder waits for the log
	warnings *limited
	repairs  *repairs
	rings    chan struct{}  // a rotation of gossip keys began
	pulling  chan struct{}  // pulls being answered
	reports  chan struct{}  // reports being taken
	writes   chan struct{}  // news of pods being written
	turns    registry.Turns // those of them that compute
	nudges   sync.WaitGroup // started by assigner.run and serviceLoop only
}

// New checks the configuration.
func New(cfg Config) (*Server, error) {
	if cfg.Store == nil || cfg.Leadership == nil || cfg.CA == nil || cfg.ClusterID == "" {
		return nil, errors.New("nodeapi: a store, a leadership, a CA and a cluster id are required")
	}
	if cfg.Epoch == nil {
		cfg.Epoch = func() uint64 { return 1 }
	}
	if cfg.Lost == nil {
		cfg.Lost = func() []wire.Lost { return nil }
	}
	if cfg.Servers == nil {
		cfg.Servers = func() []string { return nil }
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.System
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if len(cfg.PodCIDRs) == 0 {
		cfg.PodCIDRs = []netip.Prefix{netip.MustParsePrefix("10.42.0.0/16")}
	}
	if cfg.NodeBits == 0 {
		cfg.NodeBits = 24
	}
	if cfg.NodeBits6 == 0 {
		cfg.NodeBits6 = 64
	}
	for _, p := range cfg.PodCIDRs {
		bits := cfg.NodeBits
		if p.Addr().Is6() {
			bits = cfg.NodeBits6
		}
		if p != p.Masked() || bits < p.Bits() || bits > p.Addr().BitLen()-2 {
			return nil, fmt.Errorf("nodeapi: the pod range %s cannot be cut into a /%d for each node", p, bits)
		}
	}
	s := &Server{
		cfg: cfg, log: cfg.Log,
		leases:   newLeases(),
		streams:  newStreams(),
		usages:   newUsages(),
		services: newTable(),
		sessions: map[string]*session{},
		byName:   map[string]*session{},
		seqs:     map[string]reportSeq{},
		relays:   map[string]int{},
		twins:    map[string]twin{},
		ranges:   podRanges{next: map[netip.Prefix]netip.Addr{}, held: map[netip.Prefix]bool{}},
		tokens:   make(chan struct{}, 1),
		warnings: newLimited(),
		repairs:  newRepairs(),
		rings:    make(chan struct{}, 1),
		pulling:  make(chan struct{}, maxPulls),
		reports:  make(chan struct{}, maxReports),
		writes:   make(chan struct{}, maxWrites),
		turns:    make(registry.Turns, goruntime.GOMAXPROCS(0)),
	}
	s.assign = newAssigner(s)
	return s, nil
}

// Leases are the node leases.
func (s *Server) Leases() *Leases { return s.leases }

// Handlers are for the listener, by ALPN name.
func (s *Server) Handlers() map[string]listener.Handler {
	return map[string]listener.Handler{
		wire.ALPNNode:   s.ServeNode,
		wire.ALPNJoin:   s.ServeJoin,
		wire.ALPNStream: s.ServeStream,
		wire.ALPNRelay:  s.ServeRelay,
	}
}

// Run sweeps leases and keeps assignments current until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() { s.sweepLoop(ctx) })
	wg.Go(func() { s.leaseObjects(ctx) })
	wg.Go(func() { s.repairLoop(ctx) })
	wg.Go(func() { s.housekeeping(ctx) })
	wg.Go(func() { s.rotations(ctx) })
	wg.Go(func() { s.watchTwins(ctx) })
	wg.Go(func() { s.serviceLoop(ctx) })
	err := s.assign.run(ctx)
	cancel()
	wg.Wait()
	s.nudges.Wait() // their sessions end with the listener, or with the write timeout
	return err
}

// lead compares the leases with the leadership; cheap when nothing changed.
func (s *Server) lead() {
	term, leading := s.cfg.Leadership.Leadership()
	s.leases.mu.Lock()
	same := s.leases.term == term && s.leases.leading == leading
	s.leases.mu.Unlock()
	if same {
		if !leading && s.cfg.LeaderHeard != nil {
			if at := s.cfg.LeaderHeard(); !at.IsZero() {
				s.leases.taken(at)
			}
		}
		return
	}
	s.leases.lead(term, leading, s.nodeNames())
	if !leading {
		s.dismiss()
	}
}

func (s *Server) sweepLoop(ctx context.Context) {
	t := time.NewTicker(SweepInterval)
	defer t.Stop()
	for {
		s.lead()
		s.leases.sweepNow()
		for _, n := range s.leases.returned() {
			s.repairs.node(n)
		}
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// session is one node's connection.
type session struct {
	node, uid, boot string
	remote          string
	conn            *wire.Conn
	limited         bool
	leaseKey        []byte
	up              chan struct{} // closed once it is served
	streams         atomic.Int64  // about its pods, open now

	reports  chan struct{} // one at a time; a channel, since its holder waits for the log
	mu       sync.Mutex
	mirrors  map[string]wire.PodReport
	nudged   wire.Nudge // newest generations the node was told
	nudging  bool       // a goroutine is sending them
	gossip   string     // the gossip id of this server that the node was told
	sentGen  uint64     // the assignment that it was sent last ...
	sentRing ringID     // ... and the gossip keys in it
	ring     ringID     // those that it said it holds

	saying   chan struct{} // guards lastNode, and that it is what is written; a channel as reports is
	lastNode []byte        // what the node last said of itself, as it sent it: decoded it is thrice as large
}

const helloTimeout = 10 * time.Second

// ServeNode serves ALPNNode: one node's connection. There is a stack for each,
// which the collector shrinks only where little is on it while it waits for
// the next message: what comes first is in a function of its own.
func (s *Server) ServeNode(ctx context.Context, c *listener.Conn) {
	sess := s.welcome(ctx, c)
	if sess == nil {
		return
	}
	if !sess.limited {
		defer s.remove(sess)
	}
	close(sess.up)
	err := sess.conn.Run(ctx)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, context.Canceled) {
		s.log.Info("node connection ended", "node", sess.node, "error", err)
	}
}

// current says whether what this server knows may be acted on.
func (s *Server) current() error {
	if _, leading := s.cfg.Leadership.Leadership(); !leading {
		return &wire.Fault{Code: wire.FaultNotLeader, Message: "this server does not lead yet"}
	}
	return nil
}

func (s *Server) event(about corev1.ObjectReference, typ, reason, message string) {
	if s.cfg.Events == nil {
		return
	}
	s.cfg.Events.Add(events.Entry{About: about, Type: typ, Reason: reason, Message: message,
		Component: "dunlin-nodeapi", Time: s.cfg.Clock.Now(), Count: 1})
}

func (s *Server) sessionOf(uid string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessions[uid]
}

func (s *Server) sessionOfNode(name string) *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byName[name]
}

// Connected says whether the node has a connection to this server.
func (s *Server) Connected(node string) bool { return s.sessionOfNode(node) != nil }

// Sessions counts the nodes that are connected to this server.
func (s *Server) Sessions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.sessions)
}

var errReplaced = errors.New("replaced by a newer connection of the same node")

// install makes sess the node's session and closes the one before.
func (s *Server) install(sess *session) bool {
	s.mu.Lock()
	old := s.sessions[sess.uid]
	if other := s.byName[sess.node]; other != nil && other != old {
		s.mu.Unlock()
		return false
	}
	s.sessions[sess.uid], s.byName[sess.node] = sess, sess
	s.assign.connect(sess.node)
	s.mu.Unlock()
	if old != nil {
		old.conn.Close(errReplaced)
	}
	return true
}

func (s *Server) remove(sess *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sessions[sess.uid] != sess {
		return
	}
	delete(s.sessions, sess.uid)
	delete(s.byName, sess.node)
	s.assign.disconnect(sess.node)
}

// Disconnect ends a node's connection, as revocation does.
func (s *Server) Disconnect(node string, cause error) {
	if sess := s.sessionOfNode(node); sess != nil {
		sess.conn.Close(cause)
	}
}

// Suspect takes a hint that a node may be gone: leases are looked at now.
// They alone decide.
func (s *Server) Suspect(uid string) {
	s.lead()
	s.leases.sweepNow()
	if sess := s.sessionOf(uid); sess != nil {
		if _, expired := s.leases.lastRenewal(sess.node); !expired {
			return // it renews: gossip is wrong, or early
		}
	}
	s.leases.hint()
}

func (s *Server) lease(sess *session, r *wire.LeaseRequest) *wire.LeaseReply {
	s.lead()
	sess.holds(r.Generation)
	term, ok := s.leases.renew(sess.node, sess.boot, r.Counter)
	reply := &wire.LeaseReply{Counter: r.Counter, Term: term, Generation: s.assign.generation(sess.node)}
	if !ok {
		reply.Refused = "this server does not lead, or the counter is old"
	} else {
		reply.GossipID, reply.Twin = s.tellGossip(sess), s.twinOf(sess.node)
	}
	return reply
}

// HandleDatagram takes a renewal that came by gossip and returns the
// acknowledgement to send back to the node uid. It is for the Message
// callback of the servers' pool, kind wire.GossipLease. ok is false for
// whatever does not prove itself: no answer then.
func (s *Server) HandleDatagram(b []byte) (uid string, ack []byte, ok bool) {
	uid, isAck, ok := wire.LeaseDatagramUID(b)
	if !ok || isAck {
		return "", nil, false
	}
	sess := s.sessionOf(uid)
	if sess == nil {
		return "", nil, false
	}
	d, err := wire.OpenLeaseDatagram(sess.leaseKey, b, sess.boot)
	if err != nil {
		return "", nil, false
	}
	s.lead()
	sess.holds(d.Generation)
	term, ok := s.leases.renew(sess.node, sess.boot, d.Counter)
	if !ok {
		return "", nil, false // the node asks over TCP and hears why
	}
	d.Ack, d.Term, d.Generation = true, term, s.assign.generation(sess.node)
	ack, err = d.Seal(sess.leaseKey)
	return uid, ack, err == nil
}
