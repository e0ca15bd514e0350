package sim

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// server is one server process, assembled by controlplane.New as the real
// one is: its socket, clock and disk are the simulation's.
type server struct {
	w     *world
	i     int
	addr  memnet.Addr
	ip    netip.Addr // of gossip
	dir   string
	clock *wall
	join  *pki.JoinLine // of a server that joins; nil makes the cluster
	downs int           // faults that keep it down; the plan's, as fulls
	fulls int

	mu     sync.Mutex
	fault  error // of every write to the state folder
	cur    *controlplane.Server
	gossip *gossip.Keeper
	stopF  context.CancelFunc
	ended  chan struct{}
}

func (w *world) newServer(i int) *server {
	ip := w.gossipAddr(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), serverAddr(i))
	return &server{w: w, i: i, addr: serverAddr(i), ip: ip, dir: filepath.Join(w.dir, fmt.Sprintf("server-%d", i)), clock: w.newWall()}
}

func serverAddr(i int) memnet.Addr { return memnet.Addr(fmt.Sprintf("10.0.0.%d:6443", i+1)) }

func (s *server) name() string { return fmt.Sprintf("s%d", s.i) }

// observe is the disk: faults hang here. It cannot be slow in virtual time:
// who waits for a write holds a mutex, and a bubble's time stands still while
// somebody waits for one.
func (s *server) observe(e consensus.DiskEvent) error {
	if e.Done {
		return nil
	}
	s.mu.Lock()
	err := s.fault
	s.mu.Unlock()
	if e.Op == consensus.DiskDelete && err != errCrashed { //nolint:errorlint // our own value
		return nil // a full disk still deletes
	}
	return err
}

func (s *server) setFault(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = err
}

// start runs the server on what is on its disk.
func (s *server) start() error {
	l, err := s.w.net.Listen(s.addr)
	if err != nil {
		return err
	}
	s.setFault(nil)
	began, k := s.w.began, s.w.keeper(s.name(), filepath.Join(s.dir, "gossip"), s.ip)
	srv, err := controlplane.New(context.Background(), controlplane.Config{
		StateDir: s.dir, Name: s.name(), Join: s.join, Listener: l, Advertise: []string{string(s.addr)}, Fallback: strings.TrimSuffix(string(s.addr), ":6443"),
		Version: "sim", Dial: s.w.dialer(s.addr), Clock: s.clock, Elapsed: func() time.Duration { return time.Since(began) },
		Log: s.w.logger(s.name()), Gossip: k, Metrics: prometheus.NewRegistry(),
		Consensus: func(c *consensus.Config) {
			c.Disk = &consensus.Disk{Observe: s.observe}
			c.SegmentBytes, c.SnapshotBytes, c.ReserveBytes = 64<<10, 128<<10, -1
		},
	})
	if err != nil {
		_ = l.Close()
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	s.mu.Lock()
	s.cur, s.gossip, s.stopF, s.ended = srv, k, cancel, ended
	s.mu.Unlock()
	go func() {
		var wg sync.WaitGroup
		wg.Go(func() { _ = srv.RunGossip(ctx) })
		defer close(ended)
		defer wg.Wait()
		if err := srv.Run(ctx); err != nil && ctx.Err() == nil {
			s.w.violated("%s: the server ended: %v", s.name(), err)
		}
	}()
	s.w.check.follow(s, srv)
	return nil
}

// crash ends the server as kill -9 does: from now on nothing reaches its disk
// or the network.
func (s *server) crash() {
	s.mu.Lock()
	stop, ended := s.stopF, s.ended
	s.cur, s.gossip, s.stopF = nil, nil, nil
	s.fault = errCrashed
	s.mu.Unlock()
	if stop == nil {
		return
	}
	s.w.net.Cut(s.addr, true)
	s.w.check.unfollow(s)
	stop()
	<-ended
	s.w.net.Cut(s.addr, false)
}

func (s *server) now() *controlplane.Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cur
}

// leading is the server that leads now, or nil.
func (w *world) leading() *controlplane.Server {
	for _, s := range w.servers {
		if srv := s.now(); srv != nil {
			if _, ok := srv.Consensus().Leadership(); ok {
				return srv
			}
		}
	}
	return nil
}

// voters counts the servers that have a vote, as the leader knows.
func (w *world) voters() int {
	srv := w.leading()
	if srv == nil {
		return 0
	}
	members, _, err := srv.Consensus().Members()
	if err != nil {
		return 0
	}
	n := 0
	for _, m := range members {
		if m.Voter {
			n++
		}
	}
	return n
}

// errNoSpace is a full disk's.
var errNoSpace = fmt.Errorf("sim: %w", syscall.ENOSPC)

// scratch is a folder for one world: in memory where there is room for it,
// since hundreds of worlds write their logs.
func scratch() (string, error) {
	base := ""
	if st, err := os.Stat("/dev/shm"); err == nil && st.IsDir() {
		base = "/dev/shm"
	}
	dir, err := os.MkdirTemp(base, "dunlin-sim-")
	if err != nil {
		return os.MkdirTemp("", "dunlin-sim-")
	}
	return dir, nil
}
