package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netns"

	"github.com/dunlin-project/dunlin/node/balance"
	"github.com/dunlin-project/dunlin/node/companion"
	"github.com/dunlin-project/dunlin/node/dns"
	"github.com/dunlin-project/dunlin/wire"
)

// Settings are what the agent tells the proxy of its node.
type Settings struct {
	Node string `cbor:"1,keyasint"`
	Zone string `cbor:"2,keyasint,omitempty"`
	// NetNS is the name of the network namespace that holds the service range;
	// "" is none: without root Services are reached on the loopback interface.
	NetNS   string       `cbor:"3,keyasint,omitempty"`
	NodeIPs []netip.Addr `cbor:"4,keyasint,omitempty"`
	// Resolv is the file that names the servers which know all other names.
	Resolv string `cbor:"5,keyasint,omitempty"`
	// Reserved are TCP and UDP ports of the machine that no Service gets: this
	// process outlives a server, which could not start again.
	Reserved []uint16 `cbor:"6,keyasint,omitempty"`
}

func (s *Settings) equal(o *Settings) bool {
	return s.Node == o.Node && s.Zone == o.Zone && s.NetNS == o.NetNS && s.Resolv == o.Resolv && slices.Equal(s.NodeIPs, o.NodeIPs) &&
		slices.Equal(s.Reserved, o.Reserved)
}

// counters are what there is to tell of the process.
type counters struct {
	conns   atomic.Int64 // open
	udp     atomic.Int64 // open flows
	refused atomic.Int64 // no endpoint could be reached
	failed  atomic.Int64 // endpoints that could not be reached
	drained atomic.Int64 // idle connections closed
	silent  atomic.Int64 // connections closed, since a side was not there any more
}

// engine is the running proxy. mu guards what is decoded and the listeners;
// connections work without it.
type engine struct {
	log      *slog.Logger
	pipes    pipePool
	dns      *dns.Handler
	counters counters
	conns    *shares // of TCP connections
	flows    *shares // of UDP

	mu        sync.Mutex
	cfg       Settings
	inside    *thread
	pool      *balance.Pool
	listeners map[place]*listener
	failures  map[place]failure
	parked    map[string]*os.File // a predecessor's listeners, by place
	fed       bool                // a whole table was taken
	handed    bool                // listeners are a successor's now
	changed   map[string]bool     // Services to be looked at
	names     map[netip.Addr][]string
	loops     []balance.Loop // endpoints that are not used
	clashes   []Unserved     // places that two Services want
	lost      []lost         // by whom, while they are looked for
}

func newEngine(log *slog.Logger) *engine {
	e := &engine{log: log, pool: balance.NewPool(),
		listeners: map[place]*listener{}, failures: map[place]failure{}, parked: map[string]*os.File{},
		changed: map[string]bool{}, conns: newShares("connections", connsMost(), log), flows: newShares("UDP flows", udpMost, log)}
	e.dns = &dns.Handler{Records: (*records)(e), Domain: e.domain, Forward: dns.NewForwarder("/etc/resolv.conf", e.ownDNS)}
	return e
}

// Configure implements companion.Worker.
func (e *engine) Configure(s *Settings) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s.equal(&e.cfg) && (e.inside != nil || s.NetNS == "") {
		return nil
	}
	if s.NetNS != e.cfg.NetNS || (e.inside == nil && s.NetNS != "") {
		if e.inside != nil {
			return errors.New("the network namespace of a running proxy cannot change")
		}
		if s.NetNS != "" {
			th, err := newThread("/run/netns/" + s.NetNS)
			if err != nil {
				return err
			}
			e.inside = th
		}
	}
	if err := companion.DropPrivileges(); err != nil {
		e.log.Warn("the proxy keeps privileges that it does not need", "error", err)
	}
	e.cfg = *s
	if s.Resolv != "" {
		e.dns.Forward.Resolv = s.Resolv
	}
	for name := range e.pool.Tables.Services {
		e.changed[name] = true
	}
	return nil
}

// thread runs functions on a thread of its own inside a network namespace.
type thread struct{ calls chan func() }

func newThread(path string) (*thread, error) {
	t := &thread{calls: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: it is never given back
		ns, err := netns.GetFromPath(path)
		if err == nil {
			err = netns.Set(ns)
			_ = ns.Close()
		}
		if err != nil {
			ready <- fmt.Errorf("enter network namespace %s: %w", path, err)
			return
		}
		ready <- nil
		for f := range t.calls {
			f()
		}
	}()
	return t, <-ready
}

func (t *thread) do(f func() error) error {
	done := make(chan error)
	t.calls <- func() { done <- f() }
	return <-done
}

// Apply implements companion.Worker.
func (e *engine) Apply(items []wire.ServiceItem, gone []string, last bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, it := range items {
		name, err := e.pool.Tables.Put(it.Key, it.Data)
		if err != nil {
			e.log.Warn("item of the service table cannot be read", "key", it.Key, "error", err)
			continue
		}
		e.changed[name] = true
	}
	for _, k := range gone {
		e.changed[e.pool.Tables.Remove(k)] = true
	}
	if !last || e.handed {
		return
	}
	e.fed = true
	for _, name := range e.pool.Tables.Turned() {
		e.changed[name] = true
	}
	for name := range e.changed {
		e.pool.Rebuild(name, e.cfg.Node, e.cfg.Zone)
	}
	clear(e.changed)
	e.names = nil
	loops := e.pool.FindLoops()
	if len(loops) > 0 && !slices.Equal(loops, e.loops) {
		e.log.Warn("endpoints lead back to their own Services and are not used", "endpoints", loops)
	}
	e.loops = loops
	e.pool.Sweep()
	e.listen()
}

// Retain implements companion.Worker.
func (e *engine) Retain(keys map[string]bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, name := range e.pool.Retain(keys) {
		e.changed[name] = true
	}
}

// tick does what depends on time alone.
func (e *engine) tick(now time.Time) {
	e.drain(now)
	e.pipes.trim()
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.failures) > 0 && !e.handed {
		e.listen()
	}
}

// Run implements companion.Worker.
func (e *engine) Run(ctx context.Context) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	looked := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			e.tick(now)
			if now.Sub(looked) >= silenceLook {
				e.cutSilent(silentGone, silentMost)
				looked = now
			}
		}
	}
}

// dnsAddr is the address of DNS. e.mu is held.
func (e *engine) dnsAddr() netip.Addr {
	if len(e.pool.Tables.Network.DNS) == 0 {
		return netip.Addr{}
	}
	a, err := netip.ParseAddr(e.pool.Tables.Network.DNS[0])
	if err != nil {
		return netip.Addr{}
	}
	return a
}

func (e *engine) ownDNS(a netip.Addr) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return a == e.dnsAddr()
}

func (e *engine) domain() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if d := e.pool.Tables.Network.Domain; d != "" {
		return d
	}
	return "cluster.local"
}

// Park implements companion.Worker.
func (e *engine) Park(parked map[string]*os.File) { e.parked = parked }

// Connections implements companion.Worker.
func (e *engine) Connections() int64 { return e.counters.conns.Load() }

// Listeners implements companion.Worker.
func (e *engine) Listeners() (map[string]*os.File, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make(map[string]*os.File, len(e.listeners))
	for p, l := range e.listeners {
		f, err := l.detach()
		if err != nil {
			return out, err
		}
		out[p.String()] = f
	}
	return out, nil
}

// LetGo implements companion.Worker.
func (e *engine) LetGo() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.handed = true
	for p, l := range e.listeners {
		l.close()
		delete(e.listeners, p)
	}
}
