package gossip

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/gossip/simnet"
)

func key(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	k, err := newTestKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func newTestKey() (*ecdsa.PrivateKey, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }

var ring = [][]byte{[]byte("0123456789abcdef")}

func simAddr(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}), Port)
}

func simPool(t *testing.T, n *simnet.Network, i int, k *ecdsa.PrivateKey, boot uint64, change func(*Config)) *Pool {
	t.Helper()
	c := Config{Cluster: "c", Epoch: 1, Site: "default", Key: k, Boot: boot, Keyring: ring, Advertise: simAddr(i),
		Transport: n.Transport(simAddr(i)), Seeds: func() []string { return []string{simAddr(0).String()} }}
	if change != nil {
		change(&c)
	}
	p, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func closeAll(t *testing.T, ps []*Pool) {
	t.Helper()
	for _, p := range ps {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	time.Sleep(5 * time.Minute) // virtual: memberlist's last dials and probes end
}

// Twenty members find each other at 10 % loss, lose one that is cut off, and
// get it back by themselves, long after memberlist would have forgotten it.
func TestSimulation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const members = 20
		n := simnet.New(7)
		n.Lose(0.1)
		var failed atomic.Int64
		ps := make([]*Pool, members)
		for i := range ps {
			ps[i] = simPool(t, n, i, key(t), 1, func(c *Config) { c.Failed = func(string) { failed.Add(1) } })
		}
		know := func(when string) {
			t.Helper()
			var i, got int
			for range 90 { // what is lost comes again when members compare what they know, every five minutes
				time.Sleep(10 * time.Second)
				i = slices.IndexFunc(ps, func(p *Pool) bool { got = len(p.Members()); return got != members })
				if i < 0 {
					return
				}
			}
			t.Errorf("member %d knows %d of %d %s", i, got, members, when)
		}
		know("at first")
		failed.Store(0)
		n.Cut(simAddr(7), true)
		time.Sleep(10 * time.Minute)
		if got := len(ps[0].Members()); got != members-1 {
			t.Fatalf("%d members after one was cut off", got)
		}
		if failed.Load() < members-1 {
			t.Fatalf("only %d failure hints", failed.Load())
		}
		n.Cut(simAddr(7), false)
		time.Sleep(4 * time.Minute) // it comes back by itself, and then everybody hears of it
		know("after the cut healed")
		closeAll(t, ps)
	})
}

func TestBroadcastAndSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const members = 8
		n := simnet.New(1)
		var mu sync.Mutex
		got := map[int][]string{}
		ps := make([]*Pool, members)
		for i := range ps {
			ps[i] = simPool(t, n, i, key(t), 1, func(c *Config) {
				c.Message = func(kind byte, b []byte) {
					mu.Lock()
					defer mu.Unlock()
					got[i] = append(got[i], fmt.Sprintf("%d:%s", kind, b))
				}
			})
		}
		defer closeAll(t, ps)
		eventually := func(what string, f func() bool) {
			t.Helper()
			for range 90 { // members compare what they know every five minutes
				if f() {
					return
				}
				time.Sleep(10 * time.Second)
			}
			t.Errorf("%s: not so after 15 minutes", what)
		}
		eventually("all know each other", func() bool {
			return !slices.ContainsFunc(ps, func(p *Pool) bool { return len(p.Members()) != members })
		})
		if err := ps[1].Send(ps[2].NodeID(), 2, []byte("you")); err != nil {
			t.Error(err)
		}
		if err := ps[1].Send("nobody", 2, nil); err == nil {
			t.Error("sent to nobody")
		}
		has := func(i int, what string) bool {
			mu.Lock()
			defer mu.Unlock()
			return slices.Contains(got[i], what)
		}
		// Each passes it on a few times, to members of its choice: in one of
		// twenty to thirty spreads there is one of eight whom nobody chose.
		eventually("a broadcast is heard", func() bool {
			if err := ps[0].Broadcast("x", 1, []byte("hello")); err != nil {
				t.Error(err)
			}
			time.Sleep(10 * time.Second)
			for i := 1; i < members; i++ {
				if !has(i, "1:hello") {
					return false
				}
			}
			return true
		})
		if !has(2, "2:you") {
			t.Error("a message to one member did not come")
		}
		mu.Lock()
		defer mu.Unlock()
		for i := range members {
			if i != 2 && slices.Contains(got[i], "2:you") {
				t.Errorf("member %d got what was for another", i)
			}
		}
	})
}

// With all UDP blocked, TCP keeps the members together.
func TestWithoutUDP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New(1)
		var failed atomic.Int64
		var ps []*Pool
		for i := range 4 {
			ps = append(ps, simPool(t, n, i, key(t), 1, func(c *Config) { c.Failed = func(string) { failed.Add(1) } }))
		}
		time.Sleep(20 * time.Second)
		n.Lose(1)
		time.Sleep(10 * time.Minute)
		if got := len(ps[0].Members()); got != 4 || failed.Load() != 0 {
			t.Fatalf("%d members, %d failure hints", got, failed.Load())
		}
		closeAll(t, ps)
	})
}

// A member that is dialing seeds which do not answer ends at once: a stopping
// agent waits for its pool, and its node sends no leases meanwhile.
func TestCloseEndsDials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New(3)
		p := simPool(t, n, 1, key(t), 1, func(c *Config) {
			c.Seeds = func() []string { return []string{simAddr(2).String(), simAddr(3).String(), simAddr(4).String()} }
		})
		for range 20 {
			time.Sleep(700 * time.Millisecond)
		}
		start := time.Now()
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if d := time.Since(start); d > 0 {
			t.Errorf("closing waited for %s", d)
		}
	})
}

// Who joined through a member that was joining itself is known to all before
// memberlist compares states, though every datagram is lost.
func TestJoinedThroughOneThatJoins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for range 20 {
			n := simnet.New(5)
			n.Lose(1)
			var ps []*Pool
			for i := range 3 {
				ps = append(ps, simPool(t, n, i, key(t), 1, func(c *Config) {
					c.Seeds = func() []string { return []string{simAddr(max(i-1, 0)).String()} }
				}))
			}
			time.Sleep(100 * time.Second)
			for i, p := range ps {
				if m := p.Members(); len(m) != len(ps) {
					t.Errorf("member %d knows %d of %d", i, len(m), len(ps))
				}
			}
			closeAll(t, ps)
		}
	})
}

// A restart and an address change are a new name at once; the old one goes.
func TestNewNameTakesOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New(1)
		k := key(t)
		a, b := simPool(t, n, 0, key(t), 1, nil), simPool(t, n, 1, k, 1, nil)
		time.Sleep(10 * time.Second)
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		c := simPool(t, n, 5, k, 2, nil)
		time.Sleep(10 * time.Second)
		if m, ok := a.member(b.NodeID()); !ok || m.Boot != 2 || m.Addr != simAddr(5) {
			t.Fatalf("newest incarnation %+v %v", m, ok)
		}
		time.Sleep(2 * time.Minute)
		if got := len(a.Members()); got != 2 {
			t.Fatalf("%d members", got)
		}
		closeAll(t, []*Pool{a, c})
	})
}

// Pools with another key, cluster, site or epoch, and members with a name
// that is not theirs, stay out.
func TestStrangersStayOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := simnet.New(1)
		ps := []*Pool{simPool(t, n, 0, key(t), 1, nil), simPool(t, n, 1, key(t), 1, nil)}
		for i, change := range []func(*Config){
			func(c *Config) { c.Keyring = [][]byte{[]byte("fedcba9876543210")} },
			func(c *Config) { c.Cluster = "other" },
			func(c *Config) { c.Site = "elsewhere" },
			func(c *Config) { c.Epoch = 2 },
		} {
			ps = append(ps, simPool(t, n, i+2, key(t), 1, change))
		}
		time.Sleep(2 * time.Minute)
		if got := len(ps[0].Members()); got != 2 {
			t.Fatalf("%d members: %v", got, ps[0].Members())
		}
		closeAll(t, ps)
	})
}

func TestForgedMetadata(t *testing.T) {
	k, other := key(t), key(t)
	id, err := NodeID(&k.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	name, addr := id+".1", simAddr(1)
	own, err := newIdentity(k, "l", name, addr.Addr().AsSlice(), addr.Port())
	if err != nil {
		t.Fatal(err)
	}
	stolen, err := newIdentity(other, "l", name, addr.Addr().AsSlice(), addr.Port())
	if err != nil {
		t.Fatal(err)
	}
	var c checked
	for range 2 {
		if err := c.verify("l", name, addr.String(), own.encoded); err != nil {
			t.Fatal(err)
		}
	}
	for what, err := range map[string]error{
		"another key":     c.verify("l", name, addr.String(), stolen.encoded),
		"another address": c.verify("l", name, simAddr(2).String(), own.encoded),
		"another boot":    c.verify("l", id+".2", addr.String(), own.encoded),
		"another pool":    verifyMeta("m", name, addr.String(), own.encoded),
		"no metadata":     c.verify("l", name, addr.String(), nil),
		"no name":         c.verify("l", "x", addr.String(), own.encoded),
		"garbage":         c.verify("l", name, addr.String(), bytes.Repeat([]byte{0xff}, 40)),
	} {
		if err == nil {
			t.Errorf("%s was accepted", what)
		}
	}
}

// Keys are replaced in three steps, one member after the other: after each
// change of each member all healthy ones hear each other, whatever the order.
// The fourth was revoked and gets no new key: at the end it is no member, and
// reads nothing.
func TestKeyRotation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const healthy = 3
		n := simnet.New(1)
		var mu sync.Mutex
		heard := map[string]int{} // "from to"
		var ps []*Pool
		for i := range healthy + 1 {
			ps = append(ps, simPool(t, n, i, key(t), 1, func(c *Config) {
				c.Message = func(_ byte, b []byte) {
					mu.Lock()
					defer mu.Unlock()
					heard[fmt.Sprintf("%s %d", b, i)]++
				}
				if i < healthy {
					c.Failed = func(id string) {
						if id != ps[healthy].NodeID() {
							t.Errorf("%d has lost a healthy member", i)
						}
					}
				}
			}))
		}
		time.Sleep(time.Minute)
		talk := func(what string) map[string]int {
			t.Helper()
			mu.Lock()
			clear(heard)
			mu.Unlock()
			for i, p := range ps {
				for j, to := range ps {
					if err := p.Send(to.NodeID(), 1, fmt.Append(nil, i)); err != nil && i < healthy && j < healthy {
						t.Fatalf("%s: %d to %d: %v", what, i, j, err)
					}
				}
			}
			time.Sleep(100 * time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			for i := range healthy {
				for j := range healthy {
					if i != j && heard[fmt.Sprintf("%d %d", i, j)] != 1 {
						t.Errorf("%s: %d does not hear %d", what, j, i)
					}
				}
			}
			return maps.Clone(heard)
		}
		if all := talk("before"); all["0 3"] != 1 || all["3 0"] != 1 {
			t.Fatal("the fourth is no member at first")
		}
		old, next := ring[0], []byte("an0ther-key-16by")
		for step, keys := range [][][]byte{{old, next}, {next, old}, {next}} {
			for i := range healthy {
				who := (step + i) % healthy
				if err := ps[who].SetKeyring(keys); err != nil {
					t.Fatal(err)
				}
				talk(fmt.Sprintf("step %d of member %d", step+1, who))
			}
		}
		for range 8 { // while it is still thought to be a member
			if got := talk("after"); got["0 3"]+got["1 3"]+got["2 3"]+got["3 0"]+got["3 1"]+got["3 2"] != 0 {
				t.Fatalf("the revoked one reads or is heard: %v", got)
			}
			time.Sleep(30 * time.Second)
		}
		for i, p := range ps[:healthy] {
			if got := len(p.Members()); got != healthy {
				t.Errorf("member %d knows %d members after the keys were replaced", i, got)
			}
		}
		if got := ps[healthy].Members(); len(got) != 1 {
			t.Errorf("the revoked one still has members: %v", got)
		}
		closeAll(t, ps)
	})
}

// Three members on loopback addresses, over real sockets.
func TestLoopback(t *testing.T) {
	var ps []*Pool
	var mu sync.Mutex
	var seeds, saved []string
	for i := range 3 {
		ip := netip.AddrFrom4([4]byte{127, 0, 0, byte(i + 1)})
		p, err := New(Config{Cluster: "c", Epoch: 1, Site: "s", Key: key(t), Boot: 1, Keyring: ring,
			Bind: netip.AddrPortFrom(ip, 0), Advertise: netip.AddrPortFrom(ip, 0),
			Seeds:        func() []string { mu.Lock(); defer mu.Unlock(); return seeds },
			SaveInterval: time.Millisecond,
			SaveSeeds:    func(s []string) { mu.Lock(); defer mu.Unlock(); saved = s },
		})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}()
		mu.Lock()
		seeds = append(seeds, p.Addr().String())
		mu.Unlock()
		ps = append(ps, p)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		mu.Lock()
		kept := len(saved)
		mu.Unlock()
		if len(ps[0].Members()) == 3 && len(ps[1].Members()) == 3 && len(ps[2].Members()) == 3 && kept == 2 {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("members %v, kept %v", ps[0].Members(), saved)
		}
	}
}
