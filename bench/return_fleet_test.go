//go:build bench

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	nodeagent "github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/node/volumes"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Agents as they are shipped, on machines that are made up: what TestReturn
// cuts off. They are a process of their own, as the fleet is.
const (
	returnAway = "DUNLIN_RETURN_AWAY" // agents that are cut off
	returnStay = "DUNLIN_RETURN_STAY" // agents that are not
	returnLine = "DUNLIN_RETURN_LINE"
)

// hollowCounts are what the process says of itself, twice a second.
type hollowCounts struct {
	Joined, Connected int    // agents; Connected of those that are cut off
	Events            int    // that wait to be reported, of those that are cut off
	Starts            int    // containers that were started, ever
	Late              int    // leases of those that stay that were not acknowledged within 900 ms
	Silent            int    // of those that stay: the most that were without a lease at once, since "cut"
	Last              string // the container that was started last
	Error             string
}

// gate is the way to the server, which can be cut.
type gate struct {
	mu   sync.Mutex
	cut  bool
	left []net.Conn // closed while it was cut: the server hears of that later
}

func (g *gate) set(cut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.cut = cut
	for _, c := range g.left {
		_ = c.Close()
	}
	g.left = nil
}

func (g *gate) isCut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.cut
}

func (g *gate) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	if g.isCut() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	d := net.Dialer{KeepAlive: -1}
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &gatedConn{Conn: c, g: g, closed: make(chan struct{})}, nil
}

// gatedConn is dead once anything was to pass while the gate was cut.
type gatedConn struct {
	net.Conn
	g      *gate
	dead   atomic.Bool
	once   sync.Once
	closed chan struct{}
}

func (c *gatedConn) passes() bool {
	if c.g.isCut() {
		c.dead.Store(true)
	}
	return !c.dead.Load()
}

func (c *gatedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if !c.passes() {
		<-c.closed
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *gatedConn) Write(p []byte) (int, error) {
	if !c.passes() {
		return len(p), nil
	}
	return c.Conn.Write(p)
}

func (c *gatedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	if c.passes() {
		return c.Conn.Close()
	}
	_ = c.Conn.SetReadDeadline(time.Now()) // who reads goes
	c.g.mu.Lock()
	defer c.g.mu.Unlock()
	if !c.g.cut {
		return c.Conn.Close()
	}
	c.g.left = append(c.g.left, c.Conn)
	return nil
}

// hollow is one agent and its machine: runtime, network and volumes.
type hollow struct {
	i      int
	dir    string
	gate   *gate
	agent  *nodeagent.Agent
	link   *link.Link
	reg    *prometheus.Registry
	joined atomic.Bool

	runMu sync.Mutex
	stop  func() // the link's

	mu     sync.Mutex
	procs  map[workload.ID]*workload.State
	exits  chan workload.ID
	pods   map[string]network.Allocation
	next   int
	starts *atomic.Int64
}

func (h *hollow) begin(ctx context.Context, line pki.JoinLine, slots chan struct{}) error {
	slots <- struct{}{} // a herd of joins would measure their time-outs
	defer func() { <-slots }()
	id, err := pki.OpenNodeIdentity(filepath.Join(h.dir, "identity"))
	if err != nil {
		return err
	}
	boot := fmt.Sprintf("boot-%d", h.i)
	if err := link.Join(ctx, link.JoinConfig{Line: line, Identity: id, Name: fmt.Sprintf("h%03d", h.i), BootID: boot, Addresses: []string{h.ip().String()}}); err != nil {
		return err
	}
	quiet := slog.New(slog.DiscardHandler)
	if h.link, err = link.New(link.Config{
		Identity: id, BootID: boot, Version: "bench", Log: quiet, Dial: h.gate.dial,
		Generation: func() uint64 { return h.agent.Generation() }, Servers: func() []string { return h.agent.Servers() },
	}); err != nil {
		return err
	}
	if h.agent, err = nodeagent.New(nodeagent.Config{
		NodeName: id.Grant().NodeName, Version: "bench", BootID: boot, MachineBoot: boot, Link: h.link, Store: store.NewMemory(),
		Runtimes: map[string]workload.Runtime{h.Name(): h}, Network: h, Volumes: noVolumes{}, Machine: h, Logger: quiet,
		StateDir: h.dir, Contact: h.link.Contact,
		Labels: map[string]string{"bench/stays": fmt.Sprint(h.gate.stays())},
	}); err != nil {
		return err
	}
	h.reg = prometheus.NewRegistry()
	h.reg.MustRegister(h.link)
	go func() { _ = h.agent.Run(ctx) }()
	h.connect(ctx)
	h.joined.Store(true)
	return nil
}

// stays says of a gate that nothing cuts it.
func (g *gate) stays() bool { return g == openGate }

var (
	openGate  = &gate{}
	lastStart atomic.Value
	wasSilent atomic.Int64
)

// connect runs the link anew: it tries at once.
func (h *hollow) connect(ctx context.Context) {
	h.runMu.Lock()
	defer h.runMu.Unlock()
	if h.stop != nil {
		h.stop()
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = h.link.Run(ctx) }()
	h.stop = func() { cancel(); <-done }
}

// endAll ends what runs, with an error.
func (h *hollow) endAll() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, st := range h.procs {
		if st.Phase == workload.Running {
			h.end(id, st, 1, "Error")
		}
	}
}

func (h *hollow) end(id workload.ID, st *workload.State, code int, reason string) {
	st.Phase, st.ExitCode, st.Reason, st.FinishedAt = workload.Exited, code, reason, time.Now()
	select {
	case h.exits <- id:
	default:
	}
}

func (h *hollow) ip() netip.Addr {
	return netip.AddrFrom4([4]byte{10, 99, byte(h.i / 250), byte(h.i%250 + 1)})
}

// Facts implements nodeagent.Machine.
func (h *hollow) Facts() nodeagent.MachineFacts {
	return nodeagent.MachineFacts{Hostname: fmt.Sprintf("h%03d", h.i), CPUMilli: 4000, Memory: 4 << 30, Storage: 32 << 30, Addresses: []string{h.ip().String()}}
}

// Name implements workload.Runtime, and so do the next.
func (h *hollow) Name() string { return "wazero" }

func (h *hollow) Prepare(_ context.Context, r workload.ImageRequest, _ workload.Progress) (workload.ImageState, error) {
	return workload.ImageState{Digest: "sha256:" + r.Image}, nil
}

func (h *hollow) Start(_ context.Context, s workload.Spec) (workload.State, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if st := h.procs[s.ID]; st != nil {
		return *st, nil
	}
	h.starts.Add(1)
	lastStart.Store(fmt.Sprintf("%s/%d on %d", s.PodName, s.ID.Attempt, h.i))
	h.procs[s.ID] = &workload.State{ID: s.ID, Phase: workload.Running, PID: 1000 + len(h.procs), StartedAt: time.Now(), Digest: s.Digest, LogPath: s.LogPath}
	return *h.procs[s.ID], nil
}

func (h *hollow) State(_ context.Context, id workload.ID) (workload.State, bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if st := h.procs[id]; st != nil {
		return *st, true, nil
	}
	return workload.State{}, false, nil
}

func (h *hollow) Stop(_ context.Context, id workload.ID, _ time.Duration) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if st := h.procs[id]; st != nil && st.Phase == workload.Running {
		h.end(id, st, 0, "Completed")
	}
	return nil
}

func (h *hollow) Kill(ctx context.Context, id workload.ID) error { return h.Stop(ctx, id, 0) }

func (h *hollow) Remove(_ context.Context, id workload.ID) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.procs, id)
	return nil
}

func (h *hollow) List(context.Context) (out []workload.State, _ error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, st := range h.procs {
		out = append(out, *st)
	}
	return out, nil
}

func (h *hollow) Exits() <-chan workload.ID { return h.exits }

func (h *hollow) Close() error { return nil }

// Setup implements network.Network, and so do the next.
func (h *hollow) Setup(_ context.Context, uid string, host bool, _ *network.Allocation) (network.Allocation, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	a, ok := h.pods[uid]
	if !ok {
		h.next++
		ip := netip.AddrFrom4([4]byte{10, 128 + byte(h.i/250), byte(h.i % 250), byte(h.next)})
		a = network.Allocation{IP: ip, IPs: []netip.Addr{ip}, HostNetwork: host}
		h.pods[uid] = a
	}
	return a, nil
}

func (h *hollow) Listen(context.Context, *network.Allocation, int32, int32, string) ([]*os.File, error) {
	return nil, nil
}

func (h *hollow) Dial(context.Context, network.Allocation, string, int32) (net.Conn, error) {
	return nil, errors.New("nothing listens")
}

func (h *hollow) Forward(ctx context.Context, a network.Allocation, port int32) (net.Conn, error) {
	return h.Dial(ctx, a, "tcp", port)
}

func (h *hollow) Teardown(_ context.Context, uid string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.pods, uid)
	return nil
}

func (h *hollow) SetCIDRs([]string) error { return nil }

func (h *hollow) NodeIPs() []netip.Addr { return []netip.Addr{h.ip()} }

type noVolumes struct{}

func (noVolumes) Prepare(context.Context, *corev1.Pod, volumes.Source, volumes.Facts) (map[string]string, error) {
	return map[string]string{}, nil
}
func (noVolumes) Teardown(context.Context, string) error { return nil }
func (noVolumes) List() ([]string, error)                { return nil, nil }

// figure is the sum of an agent's series of these names.
func (h *hollow) figure(names ...string) (sum int) {
	list, err := h.reg.Gather()
	if err != nil {
		return -1
	}
	for _, f := range list {
		if !slices.Contains(names, f.GetName()) {
			continue
		}
		for _, m := range f.GetMetric() {
			sum += int(m.GetGauge().GetValue() + m.GetCounter().GetValue())
		}
	}
	return sum
}

// late is how many renewals were not the first of their lease.
func (h *hollow) late() int {
	acked := h.figure("dunlin_agent_leases_acknowledged_total")
	return max(h.figure("dunlin_agent_leases_sent_total")-acked-1, 0) // one is on its way, perhaps
}

// runHollow plays the agents until standard input ends; its lines are "cut",
// "end" (what runs there ends with an error) and "return".
func runHollow(away, stay int, text string) error {
	line, err := pki.ParseJoinLine(text)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "dnlhollow")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var starts atomic.Int64
	var failed atomic.Value
	failed.Store("")
	cutting, slots := &gate{}, make(chan struct{}, 16)
	list := make([]*hollow, away+stay)
	for i := range list {
		g := cutting
		if i >= away {
			g = openGate
		}
		h := &hollow{i: i, dir: filepath.Join(dir, fmt.Sprint(i)), gate: g, procs: map[workload.ID]*workload.State{}, exits: make(chan workload.ID, 256), pods: map[string]network.Allocation{}, starts: &starts}
		list[i] = h
		go func() {
			if err := h.begin(ctx, line, slots); err != nil {
				failed.Store(err.Error())
			}
		}()
	}
	go func() {
		defer cancel()
		for sc := bufio.NewScanner(os.Stdin); sc.Scan(); {
			if sc.Text() != "end" {
				cutting.set(sc.Text() == "cut")
				wasSilent.Store(0)
			}
			for _, h := range list[:away] {
				switch sc.Text() {
				case "end":
					h.endAll()
				case "return":
					time.AfterFunc(rand.N(time.Second), func() { h.connect(ctx) })
				}
			}
		}
	}()
	return tellHollow(ctx, os.Stdout, list, away, &starts, &failed)
}

func tellHollow(ctx context.Context, out io.Writer, list []*hollow, away int, starts *atomic.Int64, failed *atomic.Value) error {
	enc := json.NewEncoder(out)
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		c, now := hollowCounts{Starts: int(starts.Load()), Error: failed.Load().(string)}, 0
		for i, h := range list {
			if !h.joined.Load() {
				continue
			}
			c.Joined++
			switch up := h.link.Connected(); {
			case i < away && up:
				c.Connected++
			case i >= away && !up:
				now++
			}
			if i >= away {
				c.Late += h.late()
			} else {
				c.Events += len(h.agent.WaitingEvents())
			}
		}
		wasSilent.Store(max(wasSilent.Load(), int64(now)))
		c.Silent = int(wasSilent.Load())
		c.Last, _ = lastStart.Load().(string)
		if err := enc.Encode(c); err != nil {
			return err
		}
	}
}
