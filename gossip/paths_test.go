package gossip

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dunlin-project/dunlin/gossip/simnet"
)

// logs are the lines that pools wrote.
type logs struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logs) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(writerFunc(func(b []byte) (int, error) { l.mu.Lock(); defer l.mu.Unlock(); return l.b.Write(b) }), nil))
}

// with are the lines that contain all of it.
func (l *logs) with(parts ...string) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.b.String()) {
		all := true
		for _, p := range parts {
			all = all && strings.Contains(line, p)
		}
		if all {
			out = append(out, line)
		}
	}
	return out
}

// UDP is blocked from one member to another, in each direction: nobody is
// thought dead, both ends name the peer and the direction, in one line each,
// however long it lasts.
func TestOneWayUDP(t *testing.T) {
	for name, way := range map[string][2]int{"there": {0, 1}, "back": {1, 0}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := simnet.New(3)
				var ps []*Pool
				said := make([]*logs, 3)
				var over atomic.Bool
				for i := range said {
					said[i] = &logs{}
					ps = append(ps, simPool(t, n, i, key(t), 1, func(c *Config) {
						c.Log = said[i].logger()
						c.Failed = func(id string) {
							if !over.Load() {
								t.Errorf("%d thinks %s dead: %q", i, id, said[i].with(""))
							}
						}
					}))
				}
				time.Sleep(time.Minute)
				from, to := way[0], way[1]
				n.Block(simAddr(from), simAddr(to), true)
				time.Sleep(25 * time.Minute)
				for i, p := range ps {
					if got := len(p.Members()); got != 3 {
						t.Errorf("%d knows %d members", i, got)
					}
				}
				const text = "is reached by TCP only"
				if got := said[from].with(text, simAddr(to).String(), "UDP from this node to "+simAddr(to).String()+" is blocked"); len(got) != 1 {
					t.Errorf("the sender says %q", got)
				}
				if got := said[to].with(text, simAddr(from).String(), "UDP from "+simAddr(from).String()+" to this node is blocked"); len(got) != 1 {
					t.Errorf("the receiver says %q", got)
				}
				if got := said[2].with(text); len(got) != 0 {
					t.Errorf("a third, which reaches both, says %q", got)
				}
				over.Store(true)
				closeAll(t, ps)
			})
		})
	}
}

// Two clusters on one network, one of which knows an address of the other: they
// stay apart, and each names the other, once in half an hour. So it is with
// another site of the own cluster, which is no other cluster.
func TestClustersRefuseEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New(1)
		var ours, theirs, elsewhere logs
		seeds := func() []string { return []string{simAddr(0).String(), simAddr(1).String(), simAddr(2).String()} }
		member := func(i int, l *logs, cluster, site string) *Pool {
			return simPool(t, n, i, key(t), 1, func(c *Config) {
				c.Cluster, c.Site, c.Log, c.Seeds = cluster, site, l.logger(), seeds
			})
		}
		ps := []*Pool{member(0, &ours, "aaaaaabbbbcccc", "lan"), member(1, &theirs, "dddddd00001111", "lan"), member(2, &elsewhere, "aaaaaabbbbcccc", "barn")}
		time.Sleep(25 * time.Minute)
		for i, p := range ps {
			if got := p.Members(); len(got) != 1 {
				t.Errorf("%d has members %v", i, got)
			}
		}
		for _, c := range []struct {
			who  string
			l    *logs
			want []string
		}{
			{"ours", &ours, []string{"another cluster gossips on this network", "cluster=dddddd", "ours=aaaaaa", simAddr(1).Addr().String()}},
			{"theirs", &theirs, []string{"another cluster gossips on this network", "cluster=aaaaaa", "ours=dddddd"}},
			{"elsewhere", &elsewhere, []string{"another cluster gossips on this network", "cluster=dddddd", "ours=aaaaaa"}},
			{"ours, of the other site", &ours, []string{"a member of another site", "cluster=aaaaaa", simAddr(2).Addr().String()}},
			{"elsewhere, of the other site", &elsewhere, []string{"a member of another site", "cluster=aaaaaa", simAddr(0).Addr().String()}},
		} {
			if got := c.l.with(c.want...); len(got) < 1 || len(got) > 2 { // theirs hears two pools of one cluster
				t.Errorf("%s: %q, want %q", c.who, got, c.want)
			}
			if got := c.l.with("unacceptable label"); len(got) != 0 {
				t.Errorf("%s: memberlist's own words too: %q", c.who, got)
			}
		}
		time.Sleep(20 * time.Minute)
		if got := ours.with("another cluster"); len(got) != 2 {
			t.Errorf("after three quarters of an hour it was said %d times", len(got))
		}
		closeAll(t, ps)
	})
}

// A pool is in two halves for longer than the dead are remembered, and the
// halves were told of each other only at the very beginning.
func TestPartitionLongerThanMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const members = 4
		n := simnet.New(5)
		began := time.Now()
		var ps []*Pool
		for i := range members {
			ps = append(ps, simPool(t, n, i, key(t), 1, func(c *Config) {
				c.SaveSeeds = func([]string) {}
				c.Seeds = func() []string {
					if time.Since(began) > time.Hour {
						return nil
					}
					return []string{simAddr(0).String()}
				}
			}))
		}
		know := func(want int, within time.Duration, what string) {
			t.Helper()
			var got []int
			for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(10 * time.Second) {
				got = nil
				whole := true
				for _, p := range ps {
					got = append(got, len(p.Members()))
					whole = whole && len(p.Members()) == want
				}
				if whole {
					return
				}
			}
			t.Fatalf("%s: members known %v, want %d", what, got, want)
		}
		know(members, 10*time.Minute, "at first")
		time.Sleep(2 * time.Hour)
		part := func(on bool) {
			for _, a := range []int{0, 1} {
				for _, b := range []int{2, 3} {
					n.Part(simAddr(a), simAddr(b), on)
				}
			}
		}
		part(true)
		know(2, 10*time.Minute, "in halves")
		time.Sleep(gossipToTheDead + 10*time.Minute)
		know(2, time.Minute, "in halves for long")
		part(false)
		know(members, 15*time.Minute, "healed")
		closeAll(t, ps)
	})
}

// A new address is heard of while the old name is still thought alive: nobody
// waits for its death.
func TestNewAddressWaitsForNoDeath(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New(1)
		k := key(t)
		a, b := simPool(t, n, 0, key(t), 1, nil), simPool(t, n, 1, k, 1, nil)
		time.Sleep(time.Minute)
		n.Cut(simAddr(1), true) // as a cable that is pulled: no goodbye
		c := simPool(t, n, 5, k, 2, nil)
		time.Sleep(3 * time.Second)
		both := a.Members()
		if m, ok := a.member(b.NodeID()); !ok || m.Addr != simAddr(5) || len(both) != 3 {
			t.Fatalf("after 3 s %+v, %v of %v", m, ok, both)
		}
		if err := a.Send(b.NodeID(), 1, nil); err != nil {
			t.Error(err)
		}
		closeAll(t, []*Pool{a, b, c})
	})
}

// zone answers for one name, which moves; a real DNS server.
type zone struct {
	mu sync.Mutex
	at string
	n  int
}

func (z *zone) move(a string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.at = a
}

// ServeDNS implements dns.Handler.
func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	z.mu.Lock()
	defer z.mu.Unlock()
	m := new(dns.Msg).SetReply(q)
	if q.Question[0].Qtype == dns.TypeA {
		z.n++
		m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}, A: net.ParseIP(z.at)})
	}
	_ = w.WriteMsg(m)
}

// A seed is a name. The member behind it moves, and all that was known of it
// is gone: the name is looked up again, and there it is.
func TestSeedNameMoves(t *testing.T) {
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	z := &zone{at: "127.0.0.2"}
	srv := &dns.Server{PacketConn: pc, Handler: z}
	go func() { _ = srv.ActivateAndServe() }()
	defer func() { _ = srv.Shutdown() }()
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "udp", pc.LocalAddr().String())
	}}
	free, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	port := free.Addr().(*net.TCPAddr).AddrPort().Port()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	at := func(last byte, boot uint64, k *Config) *Pool {
		a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, last}), port)
		c := Config{Cluster: "c", Epoch: 1, Site: "s", Key: k.Key, Boot: boot, Keyring: ring, Bind: a, Advertise: a, Seeds: k.Seeds,
			Resolve: func(ctx context.Context, host string) ([]netip.Addr, error) {
				return resolver.LookupNetIP(ctx, "ip4", host)
			}}
		p, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		return p
	}
	server := &Config{Key: key(t)}
	first := at(2, 1, server)
	node := at(9, 1, &Config{Key: key(t), Seeds: func() []string {
		return []string{net.JoinHostPort("seed.dunlin.test", first.Addr().String()[len("127.0.0.2:"):])}
	}})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	meets := func(where string) {
		t.Helper()
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			if m, ok := node.member(first.NodeID()); ok && m.Addr.Addr().String() == where {
				return
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				t.Fatalf("not met at %s: %v; the name was looked up %d times", where, node.Members(), z.n)
			}
		}
	}
	meets("127.0.0.2")
	if err := first.Leave(5 * time.Second); err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	z.move("127.0.0.3")
	at(3, 2, server)
	meets("127.0.0.3")
}
