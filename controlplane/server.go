// Package controlplane assembles one server: the replicated state, the API,
// what nodes call, and what runs on the leader. It owns no logic of its own.
package controlplane

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/admission/plugins"
	"github.com/dunlin-project/dunlin/controlplane/api"
	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/api/auth/reviews"
	"github.com/dunlin-project/dunlin/controlplane/api/discovery"
	"github.com/dunlin-project/dunlin/controlplane/api/openapi"
	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/controllers"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/leader"
	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/controlplane/peers"
	"github.com/dunlin-project/dunlin/controlplane/podproxy"
	"github.com/dunlin-project/dunlin/controlplane/podstream"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/pki"
)

// Config of a server.
type Config struct {
	// StateDir holds Raft's log and snapshots, the authority and the keys.
	StateDir string
	// Listener is the TCP socket of the one port.
	Listener net.Listener
	// Advertise lists the addresses ("host:port") at which nodes and clients
	// reach this server, best first.
	Advertise []string
	// Peers are addresses at which other servers may be found, where those
	// that are remembered do not hold any more.
	Peers []string
	// Join, for a new state folder, is the line that lets this server join an
	// existing cluster; nil makes a new one. Once joined it is not looked at.
	Join *pki.JoinLine
	// Name is what this server is called; "" is its id.
	Name string
	// Fallback is an address of this machine that stands for the server where
	// loopback addresses may not (the endpoints of default/kubernetes).
	Fallback string
	// Names are further DNS names and addresses of the serving certificate.
	Names []string
	// AdminKubeconfig is written for the operator; "" is none.
	AdminKubeconfig string
	// StreamIdle ends exec, attach and port-forward over which nothing went for
	// so long; 0 is 4 hours.
	StreamIdle time.Duration
	// TokenFile has static bearer tokens, hashed; "" is none.
	TokenFile string

	ServiceCIDRs []netip.Prefix
	PodCIDRs     []netip.Prefix
	// NewSealKey makes a key for sealing Secrets although the state has some
	// that another one sealed, which is lost.
	NewSealKey bool
	// UnreachableSeconds is the toleration that admission writes for
	// unreachable nodes.
	UnreachableSeconds int64
	Zone               string
	Pprof              bool
	// Memory is what the machine has, in bytes; 0 is plenty.
	Memory uint64
	// Profiles of the scheduler; none is the default one.
	Profiles []*scheduler.Profile

	// Gossip is this process's part in the pool of its site; nil is none. Who
	// runs it gives it its identity: the node's, where one shares the process.
	Gossip *gossip.Keeper

	Version string
	Clock   clock.Clock
	// Elapsed runs evenly since the machine's boot, for the guard of Clock;
	// nil is clock.Elapsed.
	Elapsed func() time.Duration
	// Rand returns numbers in [0,1) for jitter; nil is a random source.
	Rand func() float64
	// Dial opens connections to the other servers; nil is the network.
	Dial peers.DialFunc
	// Consensus has the last word on how Raft is opened: simulations have
	// another disk and smaller segments. May be nil.
	Consensus func(*consensus.Config)
	Log       *slog.Logger
	Metrics   *prometheus.Registry
}

// Server is one running server.
type Server struct {
	cfg  Config
	log  *slog.Logger
	ca   *pki.CA
	cert *pki.Serving
	book *consensus.Peers
	mesh *peers.Mesh
	raft *consensus.Node
	// commits is how long Raft's entries take.
	commits prometheus.Histogram
	// writes proposes from wherever this server stands: it asks the leader.
	writes    *peers.Proposer
	forward   *forwarder
	proxy     *podproxy.Server
	verifier  *pki.Verifier
	voterWake chan struct{}
	stored    atomic.Bool // store is set
	soft      *state.Soft
	store     *registry.Registry
	sink      *events.Sink
	nodes     *nodeapi.Server
	api       *api.Server
	port      *listener.Listener
	http      *http.Server
	comps     []leader.Component
	floor     *clock.Floor
	guard     *clock.Guard
	clocks    clockState
	// adminAt is when the administrator's kubeconfig was issued.
	adminMu sync.Mutex
	adminAt time.Time
	place   *place
	fence   fence
}

// identity is what names this server for ever.
type identity struct{ server, cluster string }

// New opens the state and builds everything; nothing is served before Run.
func New(ctx context.Context, cfg Config) (_ *Server, err error) {
	pkiDir := filepath.Join(cfg.StateDir, "pki")
	if err := os.MkdirAll(pkiDir, 0o700); err != nil {
		return nil, fmt.Errorf("make state folder: %w", err)
	}
	floor, err := clock.OpenFloor(cfg.Clock, filepath.Join(cfg.StateDir, "time-floor"))
	if err != nil {
		return nil, err
	}
	known := floor.Known()
	floor.Follow() // the guard watches it
	wall := cfg.Clock
	cfg.Clock = floor
	if err := joinIfNew(ctx, cfg); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, log: cfg.Log, floor: floor, guard: clock.NewGuard(floor, cfg.Elapsed), voterWake: make(chan struct{}, 1), place: newPlace(cfg.Advertise, cfg.Fallback)}
	s.guard.Doubt(known)
	id, err := loadIdentity(cfg.StateDir)
	if err != nil {
		return nil, err
	}
	var sealer *registry.Sealer
	if s.ca, sealer, err = loadKeys(cfg, id, s.guard); err != nil {
		return nil, err
	}
	if cfg.AdminKubeconfig != "" { // before there is a log and a state
		if err := s.ca.CheckAdminKubeconfig(cfg.AdminKubeconfig); err != nil {
			return nil, err
		}
	}
	s.commits = newCommitLatency()
	if err := s.openConsensus(ctx, id); err != nil {
		return nil, err
	}
	s.cert.Follow(wall)
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	s.soft = state.NewSoft(0, eventRoom(cfg.Memory))
	_, objects := rooms(cfg.Memory)
	s.store, err = registry.New(registry.Config{
		CacheBytes: objects,
		Durable:    s.raft.State(), Proposer: s.writes, Soft: s.soft, SoftProposer: registry.LocalSoft(s.soft, s.raft),
		Admission: plugins.Default(plugins.Config{UnreachableSeconds: &cfg.UnreachableSeconds}),
		Clock:     cfg.Clock, Log: cfg.Log.With("part", "registry"), ServiceCIDRs: cfg.ServiceCIDRs,
		Sealer: sealer,
	})
	if err != nil {
		return nil, err
	}
	s.stored.Store(true)
	s.sink = events.New(s.store, events.Config{Clock: cfg.Clock, Log: cfg.Log.With("part", "events")})
	issuer, err := s.issuer(pkiDir)
	if err != nil {
		return nil, err
	}
	if err := s.buildNodes(issuer); err != nil {
		return nil, err
	}
	if err := s.buildAPI(issuer); err != nil {
		return nil, err
	}
	s.comps = s.components()
	if err := s.registerMetrics(); err != nil {
		return nil, err
	}
	if err := s.writeAdmin(); err != nil {
		return nil, err
	}
	return s, nil
}

// writeAdmin keeps the administrator's kubeconfig usable: a new one at every
// start, and when the certificate is due, which a board whose clock jumps
// from 1970 to the present comes to within minutes.
func (s *Server) writeAdmin() error {
	s.adminMu.Lock()
	defer s.adminMu.Unlock()
	advertise := s.advertise()
	now := s.cfg.Clock.Now().Round(0) // wall time alone: it may jump
	due := s.adminAt.IsZero() || now.Before(s.adminAt) || now.After(s.adminAt.Add(pki.AdminLife*2/3))
	if s.cfg.AdminKubeconfig == "" || len(advertise) == 0 || !due {
		return nil
	}
	if err := s.ca.WriteAdminKubeconfig(s.cfg.AdminKubeconfig, "https://"+advertise[0]); err != nil {
		return err
	}
	s.adminAt = now
	return nil
}

func (s *Server) buildNodes(issuer *auth.Issuer) (err error) {
	nc := nodeapi.Config{
		Store: s.store, Leadership: s.raft, CA: s.ca, ClusterID: s.ca.ClusterID(), Epoch: s.raft.Epoch, Lost: s.lostVersions, Version: s.cfg.Version,
		Servers: s.serverAddresses, Leader: s.leaderAddresses, ToLeader: s.toLeader, LeaderHeard: s.raft.LeaderHeard, Fresh: s.writes.Barrier, Tokens: issuer, Events: s.sink,
		PodCIDRs: s.cfg.PodCIDRs, ServiceCIDRs: s.cfg.ServiceCIDRs, Clock: s.cfg.Clock, Log: s.log.With("part", "nodeapi"),
		ClockOK: s.clockTrusted, HigherEpoch: s.higherEpoch,
	}
	s.gossips(&nc)
	s.nodes, err = nodeapi.New(nc)
	if err != nil {
		return err
	}
	s.verifier = &pki.Verifier{Roots: []*x509.Certificate{s.ca.Cert}, Clock: s.guard, Revoked: s.nodes.Revoked}
	handlers := s.nodes.Handlers()
	maps.Copy(handlers, s.mesh.Handlers())
	s.port, err = listener.New(listener.Config{
		Listener: s.cfg.Listener, GetCertificate: s.cert.GetCertificate, Handlers: handlers, Log: s.log.With("part", "listener"),
		Verifier: s.verifier,
	})
	return err
}

// features are the optional parts of the API that are served.
var features = discovery.Features{Usage: true, Streams: true}

func (s *Server) buildAPI(issuer *auth.Issuer) error {
	tokens := []auth.Tokens{auth.ServiceAccountTokens(issuer, s.store)}
	if s.cfg.TokenFile != "" {
		b, err := os.ReadFile(s.cfg.TokenFile)
		if err != nil {
			return fmt.Errorf("read token file: %w", err)
		}
		list, err := auth.ParseTokenFile(b)
		if err != nil {
			return fmt.Errorf("%s: %w", s.cfg.TokenFile, err)
		}
		tokens = append(tokens, auth.StaticTokens(list))
	}
	authz := auth.NewAuthorizer(s.store)
	streams, err := podstream.New(podstream.Config{Nodes: sessions{s}, Idle: s.cfg.StreamIdle, Metrics: s.cfg.Metrics, Log: s.log.With("part", "podstream")})
	if err != nil {
		return err
	}
	s.proxy, err = podproxy.New(podproxy.Config{Nodes: sessions{s}, Idle: s.cfg.StreamIdle, Log: s.log.With("part", "podproxy")})
	if err != nil {
		return err
	}
	disco, err := discovery.New(discovery.Config{Features: features, Version: s.cfg.Version, Address: first(s.cfg.Advertise)})
	if err != nil {
		return err
	}
	open, err := openapi.New(discovery.Resources(discovery.Features{Streams: features.Streams}), s.cfg.Clock)
	if err != nil {
		return err
	}
	s.forward = newForwarder(s)
	rev := reviews.All(reviews.Config{Authorizer: authz, Tokens: auth.UnionTokens(tokens...), Issuer: issuer, Objects: s.store, Clock: s.cfg.Clock})
	s.api, err = api.New(api.Config{
		Registry: s.store, Proposer: s.writes,
		Authenticator: auth.Union(s.forwarded(), s.certificates(), auth.BearerTokens(tokens...), auth.Anonymous()),
		Authorizer:    authz, Discovery: disco, OpenAPI: open, Types: openapi.TypeConverter, Reviews: rev, Logs: s.nodes, Nodes: s.nodes, Usage: s.nodes, Streams: streams, Proxy: s.proxy,
		Placements: func(p *corev1.Pod, sees func(string) bool) (any, error) {
			return scheduler.Explain(s.store, s.cfg.Profiles, p, sees)
		},
		Checks: s.checks(), Extra: s.extra(issuer), Elsewhere: s.forward, LeaderPaths: leaderPaths, EarlyPaths: []string{ServersPath}, Metrics: s.cfg.Metrics, Clock: s.cfg.Clock, Log: s.log.With("part", "api"),
	})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle(listener.UpgradePath, s.port.Upgrade())
	mux.HandleFunc(sessionPath, s.serveSession)
	mux.Handle("/", s.api)
	s.http = &http.Server{
		Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 3 * time.Minute, MaxHeaderBytes: 64 << 10,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	return nil
}

// certificates authenticates by client certificate. Revocation counts for
// connections that are open already, too.
func (s *Server) certificates() auth.Authenticator {
	inner := auth.ClientCertificates(s.guard)
	return auth.AuthenticatorFunc(func(r *http.Request) (*auth.User, bool, error) {
		if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
			c := r.TLS.PeerCertificates[0]
			if s.nodes.Revoked(pki.UIDOf(c), c.SerialNumber.String()) {
				return nil, false, fmt.Errorf("%w: %s", pki.ErrRevoked, c.Subject.CommonName)
			}
			if _, dead := s.nodes.Dead(pki.UIDOf(c)); dead {
				return nil, false, fmt.Errorf("%w: %s was declared dead", pki.ErrRevoked, c.Subject.CommonName)
			}
		}
		return inner.Authenticate(r)
	})
}

func (s *Server) components() []leader.Component {
	// What is soft is this leader's own: it begins empty in every term, and
	// nothing that writes to it starts before that.
	list := []leader.Component{{
		Name: "soft",
		Run:  func(ctx context.Context, _ uint64) error { <-ctx.Done(); return nil },
		Ready: func(context.Context) error {
			term, _ := s.raft.Leadership()
			s.soft.Reset(term)
			return nil
		},
	}}
	list = append(list, s.votersComponent())
	service := s.serviceRanges()[0]
	dns := nodeapi.DNSAddress(service)
	return append(list, controllers.All(controllers.Config{
		Store: s.store, Profiles: s.cfg.Profiles, Leases: s.nodes.Leases(), LeaderZone: s.cfg.Zone, ServiceCIDR: service, DNS: dns, Servers: s.addresses,
		CAPEM: s.ca.PEM(), Events: s.sink, Clock: s.guard, Trust: s.clockTrusted, Log: s.log, Metrics: s.cfg.Metrics, Rand: s.cfg.Rand,
	})...)
}

// Run serves until ctx ends, then stops everything and closes the state.
func (s *Server) Run(ctx context.Context) error {
	ctx, cancel := s.afterHandOver(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.port.Run(ctx) })
	s.tellSite()
	g.Go(func() error { return s.mesh.Run(ctx) })
	g.Go(func() error { return s.announce(ctx) })
	g.Go(func() error {
		if s.WaitReady(ctx) == nil {
			s.api.CaughtUp()
			s.nodes.TellRanges()
		}
		return nil
	})
	g.Go(func() error { return s.nodes.Run(ctx) })
	g.Go(func() error { return s.watchClock(ctx) })
	g.Go(func() error { return leader.Run(ctx, s.raft, s.log.With("part", "leader"), s.comps...) })
	g.Go(func() error {
		if err := s.http.Serve(s.port.HTTP()); !errors.Is(err, http.ErrServerClosed) && ctx.Err() == nil {
			return fmt.Errorf("serve API: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		select {
		case <-ctx.Done():
			return nil
		case <-s.raft.Halted():
			return s.raft.Err()
		}
	})
	g.Go(func() error {
		<-ctx.Done()
		s.api.Close() // ends watches, so that the shutdown need not wait for them
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if err := s.http.Shutdown(end); err != nil {
			_ = s.http.Close()
		}
		return nil
	})
	err := g.Wait()
	if errors.Is(err, context.Canceled) {
		err = nil
	}
	s.forward.close()
	_ = s.proxy.Close()
	return errors.Join(err, s.port.Close(), s.close())
}

// JoinLine makes a join line for a node (the one in this process, for
// example), or for a server.
func (s *Server) JoinLine(ctx context.Context, o nodeapi.TokenOptions) (pki.JoinLine, error) {
	return s.nodes.CreateToken(ctx, o, nil)
}

// WaitReady returns once the cluster has a leader, and this server what the
// leader had then.
func (s *Server) WaitReady(ctx context.Context) error {
	for {
		_, changed := s.raft.Leader()
		if err := s.writes.Barrier(ctx); err == nil || s.raft.Err() != nil {
			return errors.Join(s.raft.Err(), ctx.Err())
		}
		t := time.NewTimer(time.Second)
		select {
		case <-changed:
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
		t.Stop()
	}
}

// Consensus is this server's share of the replicated state, to be looked at.
func (s *Server) Consensus() *consensus.Node { return s.raft }

// Store is the typed store over it.
func (s *Server) Store() *registry.Registry { return s.store }

// ClusterID of the cluster.
func (s *Server) ClusterID() string { return s.ca.ClusterID() }

// addresses are the endpoints of default/kubernetes, which may not be
// loopback addresses: one of each server.
func (s *Server) addresses() []netip.AddrPort {
	var out []netip.AddrPort
	add := func(addrs []string) {
		for _, a := range addrs {
			if ap, err := netip.ParseAddrPort(a); err == nil && !ap.Addr().IsLoopback() {
				if !slices.Contains(out, ap) {
					out = append(out, ap)
				}
				return
			}
		}
	}
	advertise, fallback, _ := s.place.get()
	add(append(advertise, net.JoinHostPort(fallback, s.ownPort())))
	l := s.servers()
	for _, id := range sortedKeys(l.entries) {
		if id != s.raft.ServerID() {
			add(l.entries[id].Addresses)
		}
	}
	slices.SortFunc(out, netip.AddrPort.Compare)
	return out
}

func hosts(addresses []string) []string {
	var out []string
	for _, a := range addresses {
		if h, _, err := net.SplitHostPort(a); err == nil {
			out = append(out, h)
		}
	}
	return out
}

func first(s []string) string {
	if len(s) == 0 {
		return ""
	}
	return s[0]
}

func (s *Server) ownPort() string {
	if a, ok := s.cfg.Listener.Addr().(*net.TCPAddr); ok {
		return strconv.Itoa(a.Port)
	}
	return ""
}
