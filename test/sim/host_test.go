package sim

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/node"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// host is one node: a machine, its disk, and the agent as cli assembles it.
type host struct {
	w     *world
	name  string
	dir   string
	m     *machine
	disk  *store.Memory
	clock *wall
	ip    netip.Addr
	downs int // faults that keep the agent down; the plan's, as fulls
	fulls int

	mu     sync.Mutex
	agent  *node.Agent
	link   *link.Link
	gossip *gossip.Keeper
	ceased time.Time // when the agent ended; zero: it runs
	cancel context.CancelFunc
	ended  sync.WaitGroup
}

func (w *world) newHost(i int) *host {
	name := fmt.Sprintf("n%d", i+1)
	ip := w.gossipAddr(netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), memnet.Addr(name))
	return &host{w: w, name: name, dir: filepath.Join(w.dir, name), m: newMachine(w, name, ip), disk: store.NewMemory(), clock: w.newWall(), ip: ip}
}

// join gives the node its identity, by the real join over the network.
func (h *host) join(ctx context.Context, line pki.JoinLine) error {
	id, err := pki.OpenNodeIdentity(filepath.Join(h.dir, "identity"))
	if err != nil {
		return err
	}
	return link.Join(ctx, link.JoinConfig{Line: line, Identity: id, Name: h.name, BootID: "join", Addresses: []string{h.ip.String()},
		Dial: h.w.dialer(memnet.Addr(h.name)), Log: h.w.logger(h.name)})
}

// start runs the agent on what is on the disk.
func (h *host) start() error {
	log := h.w.logger(h.name)
	id, err := pki.OpenNodeIdentity(filepath.Join(h.dir, "identity"))
	if err != nil {
		return err
	}
	floor, err := clock.OpenFloor(h.clock, filepath.Join(h.dir, "time-floor"))
	if err != nil {
		return err
	}
	boot := node.BootID(h.m.bootID(), h.disk)
	var agent *node.Agent
	k := h.w.keeper(h.name, h.dir, h.ip)
	l, err := link.New(link.Config{
		Identity: id, BootID: boot, Version: "sim", Log: log, Clock: floor, Dial: h.w.dialer(memnet.Addr(h.name)),
		Elapsed:    h.w.elapsed,
		Time:       func(t link.TimeHint) { _ = floor.Observe(t.Server, t.Error) },
		Generation: func() uint64 { return agent.Generation() },
		Servers:    func() []string { return agent.Servers() },
		Datagram:   func(server string, b []byte) error { return k.Send(server, wire.GossipLease, b) },
	})
	if err != nil {
		return err
	}
	agent, err = node.New(node.Config{
		NodeName: id.Grant().NodeName, Version: "sim", BootID: boot, MachineBoot: h.m.bootID(), Link: l, Store: h.disk,
		Runtimes: map[string]workload.Runtime{h.m.Name(): h.m}, Network: h.m, Volumes: diskVolumes{h.m}, Machine: h.m,
		Clock: floor, Logger: log, StateDir: h.dir, Contact: l.Contact, Elapsed: h.w.elapsed,
		Annotations: func() map[string]string {
			if a, ok := k.Addr(); ok {
				return map[string]string{wire.AnnotationGossip: a.String()}
			}
			return nil
		},
	})
	if err != nil {
		return err
	}
	h.gossips(k, l, agent.Refresh)
	ctx, cancel := context.WithCancel(context.Background())
	h.mu.Lock()
	h.agent, h.link, h.gossip, h.cancel, h.ceased = agent, l, k, cancel, time.Time{}
	h.mu.Unlock()
	h.ended.Go(func() {
		if err := agent.Run(ctx); err != nil && ctx.Err() == nil {
			h.w.violated("%s: the agent ended: %v", h.name, err)
		}
	})
	h.ended.Go(func() { _ = l.Run(ctx) })
	h.ended.Go(func() {
		_ = k.Run(ctx, gossip.Self{Cluster: id.Grant().ClusterID, Key: id.Key(), Boot: h.disk.Boots(), Wanted: func() (w gossip.Wanted) {
			w.Keyring, w.Site, w.Seeds = agent.Gossip()
			w.Epoch = agent.Epoch()
			return w
		}})
	})
	return nil
}

var errCrashed = errors.New("sim: the process was killed")

// crash ends the agent as kill -9 does: nothing it still wants to write
// reaches the disk.
func (h *host) crash() {
	h.mu.Lock()
	cancel := h.cancel
	h.agent, h.link, h.gossip, h.cancel = nil, nil, nil, nil
	h.mu.Unlock()
	if cancel == nil {
		return
	}
	h.disk.FailWrites(errCrashed)
	cancel()
	h.ended.Wait()
	h.mu.Lock()
	h.ceased = time.Now()
	h.mu.Unlock()
	h.setDisk()
	h.disk.Reopen()
}

func (h *host) connected() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.link != nil && h.link.Connected()
}

// elapsed is the time since the boot of every machine.
func (w *world) elapsed() time.Duration { return time.Since(w.began) }

// wall is a wall clock that faults move.
type wall struct {
	mu  sync.Mutex
	off time.Duration
}

// simEpoch is what the clocks of a simulation show at its start; a bubble's
// own time begins in the year 2000.
var simEpoch = time.Date(2027, 3, 1, 0, 0, 0, 0, time.UTC)

func (w *world) newWall() *wall { return &wall{off: simEpoch.Sub(w.began)} }

// Now implements clock.Clock. As the kernel's, it has no monotonic reading
// once it was moved.
func (c *wall) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Round(0).Add(c.off)
}

func (c *wall) jump(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.off += d
}

func (c *wall) String() string { return fmt.Sprint(c.Now().UTC().Format(time.RFC3339)) }
