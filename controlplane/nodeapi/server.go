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
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
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
	// Epoch is the recovery epoch of this cluster; 1 at first.
	Epoch uint64
	// HigherEpoch is called when a node has seen a higher epoch than ours: this
	// server is a leftover of before a recovery and must stop writing. node is
	// its uid, as its certificate says; it must not block.
	HigherEpoch func(node string, epoch uint64)
	Version     string
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
	Clock     clock.Clock
	Log       *slog.Logger
}

// Server implements the server's side of the node protocol.
type Server struct {
	cfg     Config
	log     *slog.Logger
	leases  *Leases
	assign  *assigner
	streams *streams

	mu       sync.Mutex
	sessions map[string]*session // by node uid
	byName   map[string]*session
	seqs     map[string]reportSeq // newest report, by node uid

	warnings *limited
	repairs  *repairs
	nudges   sync.WaitGroup // started by assigner.run only
}

// New checks the configuration.
func New(cfg Config) (*Server, error) {
	if cfg.Store == nil || cfg.Leadership == nil || cfg.CA == nil || cfg.ClusterID == "" {
		return nil, errors.New("nodeapi: a store, a leadership, a CA and a cluster id are required")
	}
	if cfg.Epoch == 0 {
		cfg.Epoch = 1
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
		sessions: map[string]*session{},
		byName:   map[string]*session{},
		seqs:     map[string]reportSeq{},
		warnings: newLimited(),
		repairs:  newRepairs(),
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
	err := s.assign.run(ctx)
	s.nudges.Wait() // their sessions end with the listener, or with the write timeout
	return err
}

// lead compares the leases with the leadership; cheap when nothing changed.
func (s *Server) lead() {
	term, leading := s.cfg.Leadership.Leadership()
	s.leases.mu.Lock()
	same := s.leases.term == term && s.leases.leading == leading
	s.leases.mu.Unlock()
	if !same {
		s.leases.lead(term, leading, s.nodeNames())
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

	reports  chan struct{} // one at a time; a channel, since its holder waits for the log
	mu       sync.Mutex
	lastNode *corev1.Node // what the node last said of itself
	mirrors  map[string]wire.PodReport
	nudged   uint64 // newest generation the node was told
	nudging  bool   // a goroutine is sending it
	gossip   string // the gossip id of this server that the node was told
}

const helloTimeout = 10 * time.Second

// ServeNode serves ALPNNode: one node's connection.
func (s *Server) ServeNode(ctx context.Context, c *listener.Conn) {
	hello, err := readHello(c)
	if err != nil {
		return // never spoke our protocol: the listener's handshake log is enough
	}
	sess := &session{node: c.Peer.Name, uid: c.Peer.UID, boot: hello.BootID, remote: c.RemoteAddr().String(),
		limited: c.Peer.Limited, up: make(chan struct{}), reports: make(chan struct{}, 1), mirrors: map[string]wire.PodReport{}}
	if tc, ok := c.Raw.(*net.TCPConn); ok {
		// Little may wait in the kernel, or a lease queues behind an assignment.
		_ = tc.SetWriteBuffer(64 << 10)
		_ = tc.SetReadBuffer(64 << 10)
	}
	term, _ := s.cfg.Leadership.Leadership()
	reply := s.hello()
	reply.Term, reply.Limited = term, c.Peer.Limited
	reply.GossipID = s.tellGossip(sess)
	reply.Refused = s.refuse(c, hello)
	if reply.Refused == "" && !sess.limited {
		reply.Refused = s.admit(ctx, sess)
	}
	if reply.Refused == "" {
		if sess.leaseKey, err = pki.LeaseKey(c.TLS); err != nil {
			reply.Refused = err.Error()
		}
	}
	accept := []wire.Type{wire.TypeRenewRequest, wire.TypeTimeRequest}
	if !sess.limited {
		accept = append(accept, wire.TypeLeaseRequest, wire.TypePullRequest, wire.TypeReport)
	}
	sess.conn = wire.NewConn(c, sessionHandler{s, sess}, wire.Options{Accept: accept, MaxConcurrent: 4})
	if reply.Refused == "" && !sess.limited {
		if !s.install(sess) {
			reply.Refused = "another connection of this node came at the same time; try again"
		} else {
			defer s.remove(sess)
		}
	}
	_ = c.SetWriteDeadline(time.Now().Add(helloTimeout))
	if err := wire.WriteMessage(c, reply); err != nil {
		return
	}
	if reply.Refused != "" {
		s.log.Info("node refused", "node", sess.node, "remote", sess.remote, "reason", reply.Refused)
		return
	}
	s.log.Info("node connected", "node", sess.node, "remote", sess.remote, "limited", sess.limited)
	close(sess.up)
	err = sess.conn.Run(ctx)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, context.Canceled) {
		s.log.Info("node connection ended", "node", sess.node, "error", err)
	}
}

func readHello(c *listener.Conn) (*wire.Hello, error) {
	_ = c.SetReadDeadline(time.Now().Add(helloTimeout))
	hello := new(wire.Hello)
	if err := wire.ReadMessage(c, hello); err != nil {
		return nil, err
	}
	_ = c.SetReadDeadline(time.Time{})
	return hello, nil
}

func (s *Server) hello() *wire.Hello {
	return &wire.Hello{
		ClusterID: s.cfg.ClusterID, Epoch: s.cfg.Epoch, Feature: wire.FeatureLevel,
		Version: s.cfg.Version, UnixMilli: s.timeHint(),
	}
}

// timeHint is this server's wall clock for nodes to go by; 0 while it cannot
// be trusted.
func (s *Server) timeHint() int64 {
	if s.clockOK() != nil {
		return 0
	}
	return s.cfg.Clock.Now().UnixMilli()
}

// refuse judges a node's Hello; "" is welcome.
func (s *Server) refuse(c *listener.Conn, h *wire.Hello) string {
	switch {
	case c.Peer.Kind != pki.NodePeer:
		return "this is for nodes: the connection has no node certificate"
	case c.TLS.Version < tls.VersionTLS13:
		return "TLS 1.3 is needed"
	case h.NodeUID != "" && h.NodeUID != c.Peer.UID:
		return fmt.Sprintf("the certificate is for node %s, not %s", c.Peer.UID, h.NodeUID)
	case h.BootID == "" || len(h.BootID) > 64:
		return "the node sent no boot id"
	}
	return s.refuseHello(c.Peer.UID, h)
}

// refuseHello is what every handshake of ours checks.
func (s *Server) refuseHello(uid string, h *wire.Hello) string {
	switch {
	case h.ClusterID != s.cfg.ClusterID:
		return fmt.Sprintf("this is cluster %s, not %s", s.cfg.ClusterID, h.ClusterID)
	case h.Epoch > s.cfg.Epoch:
		if s.cfg.HigherEpoch != nil {
			s.cfg.HigherEpoch(uid, h.Epoch)
		}
		return fmt.Sprintf("this server is from before a recovery of the cluster (epoch %d, you have seen %d)", s.cfg.Epoch, h.Epoch)
	case h.Feature < wire.OldestFeature:
		return fmt.Sprintf("the node's version %q is too old for this server (feature level %d, needs %d); upgrade it", h.Version, h.Feature, wire.OldestFeature)
	}
	return ""
}

// cloneWait is how long an older session of the same node but another boot
// has to prove that it lives: one interval and some.
const cloneWait = LeaseInterval + time.Second

// admit decides whether a new session may take the node's place: the newest
// wins, except that a living session with another boot id means that two
// machines have the same key.
func (s *Server) admit(ctx context.Context, sess *session) string {
	if reason := s.claimName(ctx, sess); reason != "" {
		return reason
	}
	old := s.sessionOf(sess.uid)
	if old == nil || old.boot == sess.boot {
		return ""
	}
	since := time.Now()
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	for {
		if at, _ := s.leases.lastRenewal(old.node); at.After(since) && s.sessionOf(sess.uid) == old {
			return s.clone(old, sess)
		}
		if time.Since(since) > cloneWait {
			return ""
		}
		select {
		case <-old.conn.Done():
			return ""
		case <-ctx.Done():
			return "the server is stopping"
		case <-t.C:
		}
	}
}

func (s *Server) clone(old, sess *session) string {
	msg := fmt.Sprintf("duplicate identity: node %s runs at %s and at %s with the same key (a copied disk?); "+
		"the second is refused until it runs: dunlin agent reset-identity", sess.node, old.remote, sess.remote)
	s.log.Error("duplicate node identity", "node", sess.node, "first", old.remote, "second", sess.remote)
	s.event(corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: sess.node}, corev1.EventTypeWarning, "DuplicateIdentity", msg)
	return msg
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

type sessionHandler struct {
	s    *Server
	sess *session
}

// Handle implements wire.Handler.
func (h sessionHandler) Handle(ctx context.Context, t wire.Type, body []byte) (wire.Message, error) {
	switch t {
	case wire.TypeLeaseRequest:
		return handle(body, func(r *wire.LeaseRequest) (wire.Message, error) { return h.s.lease(h.sess, r), nil })
	case wire.TypePullRequest:
		// Before it leads, this server may hold an old view: an assignment made
		// of it would bring back what was deleted.
		if _, leading := h.s.cfg.Leadership.Leadership(); !leading {
			return nil, &wire.Fault{Code: wire.FaultNotLeader, Message: "this server does not lead yet"}
		}
		return handle(body, func(r *wire.PullRequest) (wire.Message, error) { return h.s.assign.pull(ctx, h.sess, r) })
	case wire.TypeReport:
		return handle(body, func(r *wire.Report) (wire.Message, error) { return h.s.report(ctx, h.sess, r) })
	case wire.TypeRenewRequest:
		return handle(body, func(r *wire.RenewRequest) (wire.Message, error) { return h.s.renew(h.sess, r), nil })
	case wire.TypeTimeRequest:
		return handle(body, func(*wire.TimeRequest) (wire.Message, error) {
			return &wire.TimeReply{UnixMilli: h.s.cfg.Clock.Now().UnixMilli(), Trusted: h.s.clockOK() == nil}, nil
		})
	}
	return nil, &wire.Fault{Code: wire.FaultUnsupported, Message: t.String() + " is not served here"}
}

func handle[T any, PT interface {
	*T
	wire.Message
}](body []byte, f func(PT) (wire.Message, error)) (wire.Message, error) {
	m := PT(new(T))
	if err := wire.Unmarshal(body, m); err != nil {
		return nil, err
	}
	return f(m)
}

func (s *Server) clockOK() error {
	if s.cfg.ClockOK == nil {
		return nil
	}
	return s.cfg.ClockOK()
}

// tellGossip is this server's gossip id if the session was not told yet.
func (s *Server) tellGossip(sess *session) string {
	if s.cfg.GossipID == nil {
		return ""
	}
	id := s.cfg.GossipID()
	sess.mu.Lock()
	defer sess.mu.Unlock()
	if id == sess.gossip {
		return ""
	}
	sess.gossip = id
	return id
}

func (s *Server) lease(sess *session, r *wire.LeaseRequest) *wire.LeaseReply {
	s.lead()
	term, ok := s.leases.renew(sess.node, sess.boot, r.Counter)
	reply := &wire.LeaseReply{Counter: r.Counter, Term: term, Generation: s.assign.generation(sess.node)}
	if !ok {
		reply.Refused = "this server does not lead, or the counter is old"
	} else {
		reply.GossipID = s.tellGossip(sess)
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
	term, ok := s.leases.renew(sess.node, sess.boot, d.Counter)
	if !ok {
		return "", nil, false // the node asks over TCP and hears why
	}
	d.Ack, d.Term, d.Generation = true, term, s.assign.generation(sess.node)
	ack, err = d.Seal(sess.leaseKey)
	return uid, ack, err == nil
}
