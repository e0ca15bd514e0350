// Package controlplane assembles one server: the replicated state, the API,
// what nodes call, and what runs on the leader. It owns no logic of its own.
package controlplane

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

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
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/internal/atomicfile"
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
	// Fallback is an address of this machine that stands for the server where
	// loopback addresses may not (the endpoints of default/kubernetes).
	Fallback string
	// Names are further DNS names and addresses of the serving certificate.
	Names []string
	// AdminKubeconfig is written for the operator; "" is none.
	AdminKubeconfig string
	// TokenFile has static bearer tokens, hashed; "" is none.
	TokenFile string

	ServiceCIDRs []netip.Prefix
	PodCIDRs     []netip.Prefix
	// UnreachableSeconds is the toleration that admission writes for
	// unreachable nodes.
	UnreachableSeconds int64
	Zone               string
	Pprof              bool

	// Gossip is this process's part in the pool of its site; nil is none. Who
	// runs it gives it its identity: the node's, where one shares the process.
	Gossip *gossip.Keeper

	Version string
	Clock   clock.Clock
	Log     *slog.Logger
	Metrics *prometheus.Registry
}

// Server is one running server.
type Server struct {
	cfg   Config
	log   *slog.Logger
	ca    *pki.CA
	raft  *consensus.Node
	soft  *state.Soft
	store *registry.Registry
	sink  *events.Sink
	nodes *nodeapi.Server
	api   *api.Server
	port  *listener.Listener
	http  *http.Server
	comps []leader.Component
	floor *clock.Floor
	guard *clock.Guard
	// adminAt is when the administrator's kubeconfig was issued; New, then
	// watchClock own it.
	adminAt time.Time
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
	cfg.Clock = floor
	s := &Server{cfg: cfg, log: cfg.Log, floor: floor, guard: clock.NewGuard(floor, nil)}
	id, err := loadIdentity(cfg.StateDir)
	if err != nil {
		return nil, err
	}
	if s.ca, err = pki.LoadOrCreateCA(pkiDir, id.cluster, cfg.Clock); err != nil {
		return nil, err
	}
	s.raft, err = consensus.Open(ctx, consensus.Config{
		Dir: filepath.Join(cfg.StateDir, "raft"), ClusterID: s.ca.ClusterID(), ExpectClusterID: s.ca.ClusterID(), ServerID: id.server, Log: cfg.Log.With("part", "consensus"),
	})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.raft.Close())
		}
	}()
	sealer, err := loadSealer(filepath.Join(pkiDir, "seal.key"))
	if err != nil {
		return nil, err
	}
	s.soft = state.NewSoft(0, state.SoftOptions{})
	s.store, err = registry.New(registry.Config{
		Durable: s.raft.State(), Proposer: s.raft, Soft: s.soft, SoftProposer: registry.LocalSoft(s.soft, s.raft),
		Admission: plugins.Default(plugins.Config{UnreachableSeconds: &cfg.UnreachableSeconds}),
		Clock:     cfg.Clock, Log: cfg.Log.With("part", "registry"), ServiceCIDRs: cfg.ServiceCIDRs,
		Sealer: sealer,
	})
	if err != nil {
		return nil, err
	}
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
	if cfg.Metrics != nil {
		if err := cfg.Metrics.Register(newPlaneMetrics(s.raft, s.nodes.Leases())); err != nil {
			return nil, fmt.Errorf("metrics: %w", err)
		}
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
	now := s.cfg.Clock.Now().Round(0) // wall time alone: it may jump
	due := s.adminAt.IsZero() || now.Before(s.adminAt) || now.After(s.adminAt.Add(pki.AdminLife*2/3))
	if s.cfg.AdminKubeconfig == "" || len(s.cfg.Advertise) == 0 || !due {
		return nil
	}
	if err := s.ca.WriteAdminKubeconfig(s.cfg.AdminKubeconfig, "https://"+s.cfg.Advertise[0]); err != nil {
		return err
	}
	s.adminAt = now
	return nil
}

func (s *Server) buildNodes(issuer *auth.Issuer) (err error) {
	nc := nodeapi.Config{
		Store: s.store, Leadership: s.raft, CA: s.ca, ClusterID: s.ca.ClusterID(), Epoch: epoch, Version: s.cfg.Version,
		Servers: func() []string { return s.cfg.Advertise }, Tokens: issuer, Events: s.sink,
		PodCIDRs: s.cfg.PodCIDRs, Clock: s.cfg.Clock, Log: s.log.With("part", "nodeapi"),
		ClockOK: s.guard.Check, HigherEpoch: s.higherEpoch,
	}
	s.gossips(&nc)
	s.nodes, err = nodeapi.New(nc)
	if err != nil {
		return err
	}
	serving, err := pki.NewServing(s.ca, s.raft.ServerID(), append(hosts(s.cfg.Advertise), s.cfg.Names...))
	if err != nil {
		return err
	}
	s.port, err = listener.New(listener.Config{
		Listener: s.cfg.Listener, GetCertificate: serving.GetCertificate, Handlers: s.nodes.Handlers(), Log: s.log.With("part", "listener"),
		Verifier: &pki.Verifier{Roots: []*x509.Certificate{s.ca.Cert}, Clock: s.cfg.Clock, Revoked: s.nodes.Revoked},
	})
	return err
}

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
	disco, err := discovery.New(discovery.Config{Version: s.cfg.Version, Address: first(s.cfg.Advertise)})
	if err != nil {
		return err
	}
	open, err := openapi.New(discovery.Resources(discovery.Features{}), s.cfg.Clock)
	if err != nil {
		return err
	}
	rev := reviews.All(reviews.Config{Authorizer: authz, Tokens: auth.UnionTokens(tokens...), Issuer: issuer, Objects: s.store, Clock: s.cfg.Clock})
	s.api, err = api.New(api.Config{
		Registry: s.store, Proposer: s.raft,
		Authenticator: auth.Union(s.certificates(), auth.BearerTokens(tokens...), auth.Anonymous()),
		Authorizer:    authz, Discovery: disco, OpenAPI: open, Schemas: openapi.Schemas, Reviews: rev, Logs: s.nodes,
		Ready: s.ready, Extra: s.extra(), Metrics: s.cfg.Metrics, Clock: s.cfg.Clock, Log: s.log.With("part", "api"),
	})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle(listener.UpgradePath, s.port.Upgrade())
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
	inner := auth.ClientCertificates(s.cfg.Clock)
	return auth.AuthenticatorFunc(func(r *http.Request) (*auth.User, bool, error) {
		if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
			c := r.TLS.PeerCertificates[0]
			if s.nodes.Revoked(pki.UIDOf(c), c.SerialNumber.String()) {
				return nil, false, fmt.Errorf("%w: %s", pki.ErrRevoked, c.Subject.CommonName)
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
	service := netip.MustParsePrefix("10.43.0.0/16")
	if len(s.cfg.ServiceCIDRs) > 0 {
		service = s.cfg.ServiceCIDRs[0]
	}
	return append(list, controllers.All(controllers.Config{
		Store: s.store, Leases: s.nodes.Leases(), LeaderZone: s.cfg.Zone, ServiceCIDR: service, Servers: s.addresses,
		CAPEM: s.ca.PEM(), Events: s.sink, Clock: s.cfg.Clock, Log: s.log, Metrics: s.cfg.Metrics,
	})...)
}

// Run serves until ctx ends, then stops everything and closes the state.
func (s *Server) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.port.Run(ctx) })
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
	return errors.Join(err, s.port.Close(), s.raft.Close())
}

// JoinLine makes a single-use join line for a node (the one in this process,
// for example).
func (s *Server) JoinLine(ctx context.Context, o nodeapi.TokenOptions) (pki.JoinLine, error) {
	return s.nodes.CreateToken(ctx, o, s.cfg.Advertise)
}

// WaitReady returns once this cluster has a leader that is ready.
func (s *Server) WaitReady(ctx context.Context) error {
	_, err := s.raft.WaitLeading(ctx)
	return err
}

// ClusterID of the cluster.
func (s *Server) ClusterID() string { return s.ca.ClusterID() }

func (s *Server) ready(context.Context) error {
	if _, leading := s.raft.Leadership(); !leading {
		return errors.New("no leader yet")
	}
	return nil
}

// addresses are the endpoints of default/kubernetes, which may not be
// loopback addresses.
func (s *Server) addresses() []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range append(slices.Clone(s.cfg.Advertise), net.JoinHostPort(s.cfg.Fallback, s.ownPort())) {
		if ap, err := netip.ParseAddrPort(a); err == nil && !ap.Addr().IsLoopback() {
			return append(out, ap)
		}
	}
	return out
}

// issuer loads or makes the key that signs ServiceAccount tokens.
func (s *Server) issuer(dir string) (*auth.Issuer, error) {
	key, err := loadOrCreateKey(filepath.Join(dir, "service-account.key"))
	if err != nil {
		return nil, err
	}
	return auth.NewIssuer(auth.IssuerConfig{Key: key, Clock: s.cfg.Clock})
}

func loadOrCreateKey(path string) (*ecdsa.PrivateKey, error) {
	b, err := os.ReadFile(path)
	if err == nil {
		if block, _ := pem.Decode(b); block != nil {
			if k, err := x509.ParseECPrivateKey(block.Bytes); err == nil {
				return k, nil
			}
		}
		// Damaged: tokens are re-issued on their own, so a new key mends it.
		if _, err := atomicfile.Quarantine(path); err != nil {
			return nil, err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read key: %w", err)
	}
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	der, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	return k, atomicfile.WriteRaw(path, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), 0o600)
}

// loadSealer reads or makes the key that seals Secrets. It lies beside the
// state and never passes through Raft, so that log, snapshots and backups
// hold no Secret in clear. It is kept twice: without it the Secrets are lost.
func loadSealer(path string) (*registry.Sealer, error) {
	var key []byte
	good := 0
	copies := []string{path, path + ".copy"}
	for _, p := range copies {
		b, err := atomicfile.Read(p)
		switch {
		case err == nil && len(b) == registry.SealKeySize:
			key = b
			good++
		case err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, atomicfile.ErrCorrupt):
			return nil, fmt.Errorf("seal key: %w", err)
		}
	}
	if key == nil {
		key = make([]byte, registry.SealKeySize)
		if _, err := rand.Read(key); err != nil {
			return nil, fmt.Errorf("random: %w", err)
		}
	}
	for i := 0; good < len(copies) && i < len(copies); i++ {
		if err := atomicfile.Write(copies[i], key, 0o600); err != nil {
			return nil, fmt.Errorf("seal key: %w", err)
		}
	}
	return registry.NewSealer(key)
}

// loadIdentity reads or makes the ids of this server and of a new cluster.
// They are kept twice, since nothing else can replace them.
func loadIdentity(dir string) (identity, error) {
	copies := []string{filepath.Join(dir, "server-id"), filepath.Join(dir, "server-id.copy")}
	var found []byte
	good := 0
	for _, p := range copies {
		b, err := atomicfile.Read(p)
		switch {
		case err == nil && len(b) == 64:
			found = b
			good++
		case err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, atomicfile.ErrCorrupt):
			return identity{}, fmt.Errorf("server id: %w", err)
		}
	}
	if found == nil {
		var r [32]byte
		if _, err := rand.Read(r[:]); err != nil {
			return identity{}, fmt.Errorf("random: %w", err)
		}
		found = []byte(hex.EncodeToString(r[:]))
	}
	for i := 0; good < len(copies) && i < len(copies); i++ {
		if err := atomicfile.Write(copies[i], found, 0o600); err != nil {
			return identity{}, fmt.Errorf("server id: %w", err)
		}
	}
	return identity{server: string(found[:32]), cluster: string(found[32:])}, nil
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
