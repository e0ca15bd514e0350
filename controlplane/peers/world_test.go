package peers

import (
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// world is some servers of one cluster on a network in memory, for virtual
// time.
type world struct {
	t   *testing.T
	net *memnet.Network
	ca  *pki.CA
	// removed are servers that all others know to be removed.
	mu      sync.Mutex
	removed map[string]bool
	// slow is how many nanoseconds a server's disk takes, by its id; only tests in
	// a synctest bubble set it.
	slow map[string]*atomic.Int64
	// broken takes no writes while it is set, by the server's id; as slow.
	broken map[string]*atomic.Bool
	// free is how many bytes a server's disk has left, of which it keeps reserve.
	free map[string]*atomic.Int64
}

const reserve = 1 << 20

func newWorld(t *testing.T) *world {
	ca, err := pki.NewCA("cluster-1", clock.System)
	must(t, err)
	return &world{t: t, net: memnet.New(), ca: ca, removed: map[string]bool{}}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func testLog(who string) *slog.Logger {
	if os.Getenv("DUNLIN_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil)).With("on", who)
}

// server is one of them, running.
type server struct {
	id, addr string
	dir      string
	mesh     *Mesh
	book     *consensus.Peers
	node     *consensus.Node // nil where a test needs none
	writes   *Proposer
	stopped  bool
	stop     func()
	fenced   chan string
}

type options struct {
	dir   string // holds the state; "" is no consensus
	join  bool
	seeds []string
	epoch uint64 // without consensus
	level uint32 // the cluster's feature level, as this one knows it
	know  []*server
	addr  string // "" is the id
	// ca, if set, is of another cluster.
	ca *pki.CA
}

func (w *world) start(id string, o options) *server {
	w.t.Helper()
	if o.addr == "" {
		o.addr = id
	}
	ca := w.ca
	if o.ca != nil {
		ca = o.ca
	}
	s := &server{id: id, addr: o.addr + ":6443", dir: o.dir, fenced: make(chan string, 1)}
	cert, err := pki.NewServing(ca, id, nil)
	must(w.t, err)
	bookDir := o.dir
	if bookDir == "" {
		bookDir = w.t.TempDir()
	}
	s.book, err = consensus.OpenPeers(bookDir, &consensus.Disk{})
	must(w.t, err)
	for _, k := range o.know {
		must(w.t, s.book.Set(k.id, []string{k.addr}))
	}
	opened := make(chan struct{})
	s.mesh, err = New(Config{
		ID: id, ClusterID: ca.ClusterID(), Name: id, Book: s.book, Seeds: o.seeds,
		Epoch: func() uint64 {
			<-opened
			if s.node == nil {
				return max(o.epoch, 1)
			}
			return s.node.Epoch()
		},
		Addresses: func() []string { return []string{s.addr} },
		Roots:     []*x509.Certificate{ca.Cert}, Certificate: func() (*tls.Certificate, error) { return cert.GetClientCertificate(nil) },
		Removed: func(id string) bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.removed[id]
		},
		Fenced: func(by string, epoch uint64) { s.fenced <- fmt.Sprintf("%s/%d", by, epoch) },
		Level:  func() uint32 { return o.level },
		Behind: func(level uint32) { s.fenced <- fmt.Sprintf("level %d", level) },
		Dial:   w.net.Dialer(memnet.Addr(s.addr)), Log: testLog(id),
	})
	must(w.t, err)
	s.mesh.Handle(func(ctx context.Context, from string, t wire.Type, body []byte) (wire.Message, error) {
		if t == wire.TypeServerStatusRequest {
			r := &wire.ServerStatusReply{Build: id, Leader: from}
			if s.node != nil && s.node.Fault() != nil {
				r.Fault = s.node.Fault().Error()
			}
			return r, nil
		}
		if s.node == nil {
			return nil, &wire.Fault{Code: wire.FaultUnsupported}
		}
		reply, _, err := ServeForwarded(ctx, s.node, t, body)
		return reply, err
	})
	if o.dir != "" {
		disk := &consensus.Disk{}
		if d := w.slow[id]; d != nil {
			disk.Slow = func() { time.Sleep(time.Duration(d.Load())) }
		}
		if f := w.broken[id]; f != nil {
			disk.Observe = func(consensus.DiskEvent) error {
				if f.Load() {
					return syscall.EROFS
				}
				return nil
			}
		}
		conf := consensus.Config{
			Dir: o.dir, ClusterID: "cluster-1", ServerID: id, Join: o.join, Transport: s.mesh.RaftTransport(), Log: testLog(id),
			SegmentBytes: 16 << 10, ReserveBytes: -1, Disk: disk,
		}
		if f := w.free[id]; f != nil {
			disk.Free, conf.ReserveBytes, conf.Roomy = f.Load, reserve, s.roomy
		}
		s.node, err = consensus.Open(w.t.Context(), conf)
		must(w.t, err)
		s.writes = NewProposer(s.node, s.mesh)
	}
	close(opened)
	l, err := w.net.Listen(memnet.Addr(s.addr))
	must(w.t, err)
	port, err := listener.New(listener.Config{
		Listener: l, GetCertificate: cert.GetCertificate, Handlers: s.mesh.Handlers(), Log: testLog(id),
		Verifier: &pki.Verifier{Roots: []*x509.Certificate{ca.Cert}, Clock: clock.System},
	})
	must(w.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = port.Run(ctx) })
	wg.Go(func() { _ = s.mesh.Run(ctx) })
	s.stop = func() {
		if s.stopped {
			return
		}
		s.stopped = true
		cancel()
		wg.Wait()
		if s.node != nil {
			s.writes.Close()
			s.mesh.StopRaft()
			if err := s.node.Close(); err != nil {
				w.t.Error(err)
			}
		}
		_ = s.mesh.Close()
		_ = s.book.Close()
	}
	w.t.Cleanup(s.stop)
	return s
}

// roomy asks the others, as a server does.
func (s *server) roomy(ctx context.Context) (ids []string) {
	members, _, err := s.node.Members()
	for _, m := range members {
		r := new(wire.ServerStatusReply)
		if m.Voter && m.ID != s.id && s.mesh.Call(ctx, m.ID, &wire.ServerStatusRequest{}, r) == nil && r.Fault == "" {
			ids = append(ids, m.ID)
		}
	}
	if err != nil {
		return nil
	}
	return ids
}

// three makes a cluster of three voters, as it grows: one server first.
func (w *world) three(dirs []string) []*server {
	w.t.Helper()
	list := []*server{w.start("s0", options{dir: dirs[0]})}
	lead := list[0]
	_, err := lead.node.WaitLeading(w.t.Context())
	must(w.t, err)
	for i := 1; i < 3; i++ {
		s := w.start(fmt.Sprintf("s%d", i), options{dir: dirs[i], join: true, know: list})
		must(w.t, lead.book.Set(s.id, []string{s.addr}))
		must(w.t, lead.node.AddNonvoter(s.id, 0))
		list = append(list, s)
	}
	for _, s := range list[1:] {
		must(w.t, s.writes.Barrier(w.t.Context()))
		must(w.t, lead.node.Promote(s.id, 0))
	}
	return list
}

func create(ctx context.Context, s *server, name string) error {
	r := &state.Record{
		Header: state.Header{Key: state.Key{Kind: "ConfigMap", Name: name}, APIVersion: "v1", UID: "uid-" + name},
		Spec:   &state.Body{Codec: state.CodecKubeCBOR, Data: []byte("spec of " + name)},
	}
	res, err := s.writes.Propose(ctx, []state.Op{{Type: state.OpCreate, Record: r}})
	if err == nil && res[0].Reason != state.ReasonNone {
		err = fmt.Errorf("refused: %d %s", res[0].Reason, res[0].Detail)
	}
	return err
}

func has(s *server, name string) bool {
	_, ok := s.node.State().Snapshot().Get(state.Key{Kind: "ConfigMap", Name: name})
	return ok
}

// rawHello speaks a server's protocol with any certificate.
func rawHello(t *testing.T, w *world, addr, proto string, cert *x509.Certificate, key *ecdsa.PrivateKey) (*wire.Hello, error) {
	t.Helper()
	raw, err := w.net.Dialer("stranger")(t.Context(), "tcp", addr)
	must(t, err)
	defer func() { _ = raw.Close() }()
	cfg := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{proto}, MinVersion: tls.VersionTLS13}
	if cert != nil {
		cfg.Certificates = []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}}
	}
	c := tls.Client(raw, cfg)
	if err := wire.WriteMessage(c, &wire.Hello{ClusterID: "cluster-1", Epoch: 1, Feature: feature.Level}); err != nil {
		return nil, err
	}
	h := new(wire.Hello)
	return h, wire.ReadMessage(c, h)
}
