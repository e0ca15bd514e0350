package sim

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// ground lays gossip over the world's network: its streams are the network's,
// its packets are lost where that network repeats them, and may be blocked
// apart from everything else, as UDP is by some switches.
type ground struct{ w *world }

func memAddr(a netip.AddrPort) memnet.Addr { return memnet.Addr(a.String()) }

// Packet implements simnet.Ground.
func (g ground) Packet(from, to netip.AddrPort) (time.Duration, bool) {
	w := g.w
	if !w.net.Reaches(memAddr(from), memAddr(to)) {
		return 0, false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.deafUDP[to.Addr()] > 0 || w.apart[[2]netip.Addr{from.Addr(), to.Addr()}] > 0 || (w.loss > 0 && w.noise.Float64() < w.loss) {
		return 0, false
	}
	d := time.Millisecond
	if w.latency > 0 {
		d += time.Duration(w.noise.Int64N(int64(w.latency)))
	}
	return d, true
}

// Dial implements simnet.Ground.
func (g ground) Dial(ctx context.Context, from, to netip.AddrPort) (net.Conn, error) {
	g.w.mu.Lock()
	apart := g.w.apart[[2]netip.Addr{from.Addr(), to.Addr()}] > 0 || g.w.apart[[2]netip.Addr{to.Addr(), from.Addr()}] > 0
	g.w.mu.Unlock()
	if apart {
		<-ctx.Done()
		return nil, fmt.Errorf("sim: dial %s: %w", to, ctx.Err())
	}
	return g.w.net.Dialer(memAddr(from))(ctx, "tcp", to.String())
}

// Listen implements simnet.Ground.
func (g ground) Listen(at netip.AddrPort) (net.Listener, error) { return g.w.net.Listen(memAddr(at)) }

// blockUDP keeps datagrams from an address, or ends that; it nests.
func (w *world) blockUDP(to netip.Addr, by int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deafUDP[to] += by
}

// part keeps gossip of two addresses from each other, in one direction; their
// connections to servers are not touched.
func (w *world) part(from, to netip.Addr, by int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.apart[[2]netip.Addr{from, to}] += by
}

// gossipAddr is where a host or a server gossips; what is done to its other
// name is done to this one too.
func (w *world) gossipAddr(ip netip.Addr, of memnet.Addr) netip.Addr {
	w.net.Belongs(memAddr(netip.AddrPortFrom(ip, gossip.Port)), of)
	return ip
}

func (w *world) keeper(who, dir string, ip netip.Addr) *gossip.Keeper {
	return gossip.NewKeeper(gossip.KeeperConfig{
		Advertise: ip, Port: gossip.Port, SeedFile: filepath.Join(dir, "gossip-seeds"), Log: w.logger(who),
		Transport: func() memberlist.Transport { return w.pool.Transport(netip.AddrPortFrom(ip, gossip.Port)) },
	})
}

// gossips connects the agent with the pool of its site, as cli does.
func (h *host) gossips(k *gossip.Keeper, l *link.Link, refresh func()) {
	k.Handle(wire.GossipLeaseAck, l.HandleDatagram)
	k.Handle(wire.GossipNudge, l.HandleNudge)
	k.OnStart(refresh)
}

// strangers says who does not know whom by gossip; "" is a whole pool.
func (w *world) strangers() string {
	var why []string
	pools := map[string]*gossip.Keeper{}
	for _, h := range w.hosts {
		h.mu.Lock()
		pools[h.name] = h.gossip
		h.mu.Unlock()
	}
	for _, s := range w.servers {
		s.mu.Lock()
		pools[s.name()] = s.gossip
		s.mu.Unlock()
	}
	for name, k := range pools {
		if k == nil {
			why = append(why, name+" is down")
			continue
		}
		known := map[string]bool{}
		for _, m := range k.Members() {
			known[m.NodeID] = true
		}
		for other, o := range pools {
			if o != nil && !known[o.NodeID()] {
				why = append(why, name+" does not know "+other)
			}
		}
	}
	slices.Sort(why)
	return strings.Join(why, "; ")
}

// wholePool is how long a pool may take to become whole: who was thought dead
// where nobody told it hears so when states are exchanged, every five minutes
// with one other member.
const wholePool = 15 * time.Minute

// acquainted waits until everybody knows everybody.
func (w *world) acquainted(within time.Duration) {
	for end := time.Now().Add(within); w.strangers() != ""; {
		if time.Now().After(end) {
			w.violated("the pool is not whole after %s: %s", within, w.strangers())
			return
		}
		sleep(time.Second)
	}
}

// pairs calls f for every ordered pair of members of two halves of the pool.
func (w *world) pairs(f func(a, b netip.Addr)) {
	var all []netip.Addr
	for _, h := range w.hosts {
		all = append(all, h.ip)
	}
	for _, s := range w.servers {
		all = append(all, s.ip)
	}
	for _, a := range all[:len(all)/2] {
		for _, b := range all[len(all)/2:] {
			f(a, b)
			f(b, a)
		}
	}
}

// Gossip fails in every way while leases arrive: nobody is thought dead, and
// nothing is started, however often gossip says that members died. Then the
// pool is whole again, by itself.
func TestGossipAloneMovesNothing(t *testing.T) {
	for name, tc := range map[string]func(w *world, by int){
		"no datagrams": func(w *world, by int) {
			for _, h := range w.hosts {
				w.blockUDP(h.ip, by)
			}
			w.blockUDP(w.servers[0].ip, by)
		},
		"one hears no datagrams": func(w *world, by int) { w.blockUDP(w.hosts[1].ip, by) },
		"halves":                 func(w *world, by int) { w.pairs(func(a, b netip.Addr) { w.part(a, b, by) }) },
		"one way": func(w *world, by int) {
			for _, h := range w.hosts[1:] {
				w.part(h.ip, w.hosts[0].ip, by)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			tell(t, size{1, 5}, func(s *story) {
				s.acquainted(3 * time.Minute)
				s.after(time.Minute)
				for _, h := range s.hosts {
					if h.link.ByUDP() == 0 {
						s.violated("leases of %s do not go by datagram in the servers' site", h.name)
					}
				}
				before := s.started()
				for range 3 {
					tc(s.world, 1)
					s.after(10 * time.Minute)
					s.same(before, name)
					if s.strangers() == "" && name == "halves" {
						s.violated("the halves know each other while they are apart")
					}
					tc(s.world, -1)
					s.after(20 * time.Second)
				}
				s.acquainted(wholePool)
				s.same(before, name+", healed")
				if n := s.check.losses(); n > 0 {
					s.violated("%d pods were thought lost while every lease arrived", n)
				}
			})
		})
	}
}

// A pool that was in two halves for longer than memberlist tells dead members
// of themselves becomes one again.
func TestGossipPartedForLong(t *testing.T) {
	tellOf(t, size{1, 2}, 60, []appPlan{{"web", 1, 1, 3}}, func(s *story) {
		s.acquainted(3 * time.Minute)
		before := s.started()
		both := func(by int) { s.pairs(func(a, b netip.Addr) { s.part(a, b, by) }) }
		both(1)
		d := 3 * time.Hour
		if *cutFor > 20*time.Hour { // "make sim": then nobody tells them that they are dead
			d = 25 * time.Hour
		}
		s.after(d)
		if s.strangers() == "" {
			s.violated("the halves know each other while they are apart")
		}
		s.same(before, "gossip parted")
		both(-1)
		s.acquainted(wholePool)
	})
}

// A dead machine's pods are thought lost within the bound with gossip and
// without it; a word of gossip makes it no later.
func TestGossipMakesItSooner(t *testing.T) {
	took := func(blocked bool) (d time.Duration) {
		tell(t, size{1, 5}, func(s *story) {
			s.acquainted(3 * time.Minute)
			if blocked {
				for _, h := range s.hosts {
					s.blockUDP(h.ip, 1)
				}
				s.blockUDP(s.servers[0].ip, 1)
				s.after(5 * time.Minute)
			}
			h := s.hosts[2]
			s.storm(1)
			h.down()
			h.m.powerCut()
			start, before := time.Now(), s.check.losses()
			for s.check.losses() == before && time.Since(start) < time.Minute {
				sleep(50 * time.Millisecond)
			}
			d = time.Since(start)
			h.up()
			s.storm(-1)
		})
		return d
	}
	with, without := took(false), took(true)
	t.Logf("lost after %s with gossip, %s without", with, without)
	if with > 10*time.Second || without > 10*time.Second {
		t.Errorf("a dead machine's pods are lost after %s with gossip, %s without; 10 s is the bound", with, without)
	}
}
