// Package sim runs whole clusters in one process, in virtual time: real
// servers (controlplane.New over Raft on a disk that fails on demand), real
// agents on machines whose processes are made up, real TLS over a network in
// memory. A seed says which faults happen and what clients do; checkers watch
// every change and the end.
package sim

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/gossip/simnet"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// world is one cluster.
type world struct {
	seed    uint64
	began   time.Time
	dir     string
	net     *memnet.Network
	servers []*server
	hosts   []*host
	check   *checker
	pulse   *pulse
	pool    *simnet.Network // of gossip
	only    only
	disks   disks
	sets    map[string]int // pods of what is no Deployment, at the end

	ctx    context.Context // for what ends by itself
	storms int             // faults that may make pods look dead; the plan's
	rests  int             // faults of servers; the plan's

	mu         sync.Mutex
	lines      []string
	violations []string
	loss       float64
	deafUDP    map[netip.Addr]int    // blocks of datagrams to it
	apart      map[[2]netip.Addr]int // blocks of gossip from, to
	latency    time.Duration
	noise      *rand.Rand // of the network, guarded by mu
}

// size of a world.
type size struct{ servers, nodes int }

// newWorld starts servers and nodes and waits until all are connected. It
// must be called in a bubble.
func newWorld(sz size, seed uint64, p *pulse) (*world, error) {
	dir, err := scratch()
	if err != nil {
		return nil, err
	}
	w := &world{seed: seed, pulse: p, ctx: context.Background(), began: time.Now(), dir: dir, net: memnet.New(), noise: rand.New(rand.NewPCG(seed, 7)),
		deafUDP: map[netip.Addr]int{}, apart: map[[2]netip.Addr]int{}}
	w.only.runs, w.disks.at = map[string]string{}, map[string]string{}
	w.pool = simnet.Over(ground{w})
	p.of(w)
	w.check = newChecker(w)
	w.net.Delay(w.onWay)
	for i := range sz.servers {
		w.servers = append(w.servers, w.newServer(i))
	}
	if err := w.found(); err != nil {
		return w, err
	}
	for i := range sz.nodes {
		w.hosts = append(w.hosts, w.newHost(i))
	}
	return w, w.join()
}

// found starts the first server, lets the others join it, and waits until all
// vote.
func (w *world) found() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	first := w.servers[0]
	if err := first.start(); err != nil {
		return err
	}
	if err := first.now().WaitReady(ctx); err != nil {
		return err
	}
	for _, s := range w.servers[1:] {
		for {
			line, err := first.now().JoinLine(ctx, nodeapi.TokenOptions{Server: true})
			if err == nil {
				s.join = &line
				break
			}
			if pause(ctx, 100*time.Millisecond) != nil {
				return err // kube-system is not there yet
			}
		}
		if err := s.start(); err != nil {
			return fmt.Errorf("%s joins: %w", s.name(), err)
		}
	}
	for w.voters() < len(w.servers) {
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d servers vote: %w", w.voters(), len(w.servers), err)
		}
	}
	return nil
}

func (w *world) join() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	srv := w.servers[0].now()
	if err := srv.WaitReady(ctx); err != nil {
		return err
	}
	for _, h := range w.hosts {
		var line = func() error {
			for {
				l, err := srv.JoinLine(ctx, nodeapi.TokenOptions{})
				if err == nil {
					return h.join(ctx, l)
				}
				if pause(ctx, 100*time.Millisecond) != nil {
					return err // kube-system is not there yet
				}
			}
		}
		if err := line(); err != nil {
			return fmt.Errorf("%s joins: %w", h.name, err)
		}
		if err := h.start(); err != nil {
			return err
		}
	}
	return nil
}

// close ends everything; the bubble can end then.
func (w *world) close() {
	for _, h := range w.hosts {
		h.crash()
	}
	for _, s := range w.servers {
		s.crash()
	}
	sleep(5 * time.Minute) // timers of stops that went on, and of probes by gossip
	_ = os.RemoveAll(w.dir)
}

// onWay is how long a write is on its way: TCP repeats what is lost.
func (w *world) onWay(memnet.Addr, memnet.Addr) time.Duration {
	w.pulse.beat()
	w.mu.Lock()
	defer w.mu.Unlock()
	d := time.Millisecond
	if w.latency > 0 {
		d += time.Duration(w.noise.Int64N(int64(w.latency)))
	}
	for again := 200 * time.Millisecond; w.loss > 0 && w.noise.Float64() < w.loss && again < 10*time.Second; again *= 2 {
		d += again
	}
	return d
}

func (w *world) weather(latency time.Duration, loss float64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.latency, w.loss = latency, loss
}

func (w *world) dialer(from memnet.Addr) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return w.net.Dialer(from)
}

// say adds a line to the trace.
func (w *world) say(format string, a ...any) {
	line := fmt.Sprintf("%10.3f  ", time.Since(w.began).Seconds()) + fmt.Sprintf(format, a...)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines = append(w.lines, line)
	if live {
		fmt.Fprintln(os.Stderr, line)
	}
}

// live prints the trace while it grows.
var live = os.Getenv("DUNLIN_SIM_TRACE") != ""

// violated notes that something happened that must not.
func (w *world) violated(format string, a ...any) {
	text := fmt.Sprintf(format, a...)
	w.say("VIOLATION %s", text)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.violations = append(w.violations, text)
}

func (w *world) verdict() (violations, trace []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.violations, w.lines
}

// wanted says that as far as anybody knows the pod shall go on running.
func (w *world) wanted(uid string) bool { return w.check.wanted(uid) }

// logger writes a part's log into the trace.
func (w *world) logger(who string) *slog.Logger {
	return slog.New(traceHandler{w: w, who: who})
}

type traceHandler struct {
	w     *world
	who   string
	attrs string
}

// Enabled implements slog.Handler.
func (h traceHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

// Handle implements slog.Handler.
func (h traceHandler) Handle(_ context.Context, r slog.Record) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s %s%s", h.who, r.Level, r.Message, h.attrs)
	r.Attrs(func(a slog.Attr) bool {
		fmt.Fprintf(&b, " %s=%v", a.Key, a.Value)
		return true
	})
	h.w.say("%s", b.String())
	return nil
}

// WithAttrs implements slog.Handler.
func (h traceHandler) WithAttrs(as []slog.Attr) slog.Handler {
	for _, a := range as {
		if a.Key != "node" && a.Key != "part" {
			h.attrs += fmt.Sprintf(" %s=%v", a.Key, a.Value)
		}
	}
	return h
}

// WithGroup implements slog.Handler.
func (h traceHandler) WithGroup(string) slog.Handler { return h }

// must ends a test whose world could not be made.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
