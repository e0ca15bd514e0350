package nodelink

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/gossip"
	"github.com/dunlin-project/dunlin/gossip/simnet"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

const simServer = "server:6443"

// enroll gives a node an identity without a join.
func (s *server) enroll(name string) *pki.NodeIdentity {
	s.t.Helper()
	id, err := pki.OpenNodeIdentity(s.t.TempDir())
	must(s.t, err)
	csr, err := id.CSR()
	must(s.t, err)
	reply, err := s.api.Enroll(context.Background(), name, csr, nil)
	must(s.t, err)
	must(s.t, link.Adopt(id, reply, nil, nil))
	return id
}

func startSim(t *testing.T, n *memnet.Network, keep *stored) *server {
	t.Helper()
	l, err := n.Listen(simServer)
	must(t, err)
	return start(t, options{listen: l, ns: keep == nil, keep: keep})
}

// The whole life of a lease in virtual time, TLS and all: a cut is noticed
// within the TTL, a heal within seconds, and silence changes nothing else.
func TestVirtualCutAndHeal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New()
		s := startSim(t, n, nil)
		a := runLink(t, s.enroll("n1"), func(c *link.Config) { c.Dial = n.Dialer("n1") })
		time.Sleep(time.Minute)
		if !a.Connected() || a.Status().Attempts != 1 {
			t.Fatalf("%+v", a.Status())
		}
		n.Cut("n1", true)
		cut := time.Now()
		for !s.api.Leases().Snapshot()["n1"].Expired {
			time.Sleep(50 * time.Millisecond)
		}
		if d := time.Since(cut); d < 4*time.Second || d > 7*time.Second {
			t.Errorf("noticed after %v", d)
		}
		if a.Connected() {
			t.Error("the node thinks that it is connected")
		}
		if _, err := a.Pull(t.Context(), wire.PullRequest{}); err == nil {
			t.Error("a pull while cut off")
		}
		time.Sleep(24 * time.Hour)
		if got := a.Status().Attempts; got > 24*3600/5 {
			t.Errorf("%d attempts in a day", got)
		}
		n.Cut("n1", false)
		heal := time.Now()
		for !a.Connected() || s.api.Leases().Snapshot()["n1"].Expired {
			time.Sleep(50 * time.Millisecond)
		}
		if d := time.Since(heal); d > 35*time.Second {
			t.Errorf("back after %v", d)
		}
		a.stop()
		s.stop()
	})
}

// A hundred nodes lose their server and come back: spread out, all of them,
// within seconds, with a bounded number of attempts.
func TestVirtualReconnectStorm(t *testing.T) {
	nodes := 100
	if testing.Short() {
		nodes = 20
	}
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New()
		s := startSim(t, n, nil)
		var agents []*agent
		for i := range nodes {
			name := fmt.Sprintf("n%d", i)
			agents = append(agents, runLink(t, s.enroll(name), func(c *link.Config) { c.Dial = n.Dialer(memnet.Addr(name)) }))
		}
		time.Sleep(30 * time.Second)
		all := func() int {
			up := 0
			for _, a := range agents {
				if a.Connected() {
					up++
				}
			}
			return up
		}
		if all() != nodes {
			t.Fatalf("%d of %d connected", all(), nodes)
		}
		keep := s.keep()
		s.stop()
		time.Sleep(time.Minute)
		var before uint64
		for _, a := range agents {
			before += a.Status().Attempts
		}
		if per := float64(before) / float64(nodes); per > 30 {
			t.Errorf("%.1f attempts a node in a minute without a server", per)
		}
		s = startSim(t, n, keep)
		// A new leader gives every node one TTL: all must be there by then.
		time.Sleep(nodeapi.LeaseTTL - 100*time.Millisecond)
		if all() != nodes {
			t.Errorf("%d of %d came back", all(), nodes)
		}
		time.Sleep(20 * time.Second)
		for name, l := range s.api.Leases().Snapshot() {
			if l.Expired {
				time.Sleep(3 * time.Second)
				if s.api.Leases().Snapshot()[name].Expired {
					t.Errorf("%s has no lease", name)
				}
			}
		}
		for _, a := range agents {
			a.stop()
		}
		s.stop()
	})
}

// Leases go by UDP inside the site; without UDP they go by TCP, and nobody
// loses a lease over it.
func TestVirtualLeasesByUDP(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n, g := memnet.New(), simnet.New(3)
		var s *server
		ring := [][]byte{[]byte("0123456789abcdef")}
		at := func(i byte) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), gossip.Port)
		}
		pool := func(i byte, id *pki.NodeIdentity, message func(byte, []byte)) *gossip.Pool {
			p, err := gossip.New(gossip.Config{Cluster: "c-test", Epoch: 1, Site: "default", Key: id.Key(), Boot: 1, Keyring: ring,
				Advertise: at(i), Transport: g.Transport(at(i)), Seeds: func() []string { return []string{at(1).String()} }, Message: message})
			must(t, err)
			return p
		}
		serverID, err := pki.OpenNodeIdentity(t.TempDir())
		must(t, err)
		var sp *gossip.Pool
		var mu sync.Mutex
		byUDP := 0
		first := pool(1, serverID, func(kind byte, b []byte) {
			if kind != wire.GossipLease {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if s == nil || sp == nil {
				return // still being set up
			}
			if uid, ack, ok := s.api.HandleDatagram(b); ok {
				byUDP++
				_ = sp.Send(uid, wire.GossipLeaseAck, ack)
			}
		})
		l, err := n.Listen(simServer)
		must(t, err)
		started := start(t, options{listen: l, ns: true, gossipID: first.NodeID()})
		mu.Lock()
		s, sp = started, first
		mu.Unlock()
		id := s.enroll("n1")
		var a *agent
		np := pool(2, id, func(kind byte, b []byte) {
			mu.Lock()
			to := a
			mu.Unlock()
			if kind == wire.GossipLeaseAck && to != nil {
				to.HandleDatagram(b)
			}
		})
		n1 := runLink(t, id, func(c *link.Config) {
			c.Dial = n.Dialer("n1")
			c.Datagram = func(server string, b []byte) error { return np.Send(server, wire.GossipLease, b) }
		})
		mu.Lock()
		a = n1
		mu.Unlock()
		time.Sleep(2 * time.Minute)
		mu.Lock()
		got := byUDP
		mu.Unlock()
		if got < 40 {
			t.Errorf("%d leases by UDP in two minutes", got)
		}
		for _, share := range []float64{0.2, 1} {
			g.Lose(share)
			for range 600 {
				time.Sleep(500 * time.Millisecond)
				if s.api.Leases().Snapshot()["n1"].Expired || !a.Connected() {
					t.Fatalf("lease lost with %v of UDP packets lost", share)
				}
			}
		}
		if at := a.Status().Attempts; at != 1 {
			t.Errorf("%d connections", at)
		}
		a.stop()
		s.stop()
		must(t, np.Close())
		must(t, sp.Close())
		time.Sleep(5 * time.Minute) // memberlist's last timers
	})
}

// A join token that expired is kept for a day, in which a late node hears why,
// and then removed; the others stay.
func TestVirtualExpiredTokensGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := startSim(t, memnet.New(), nil)
		for _, ttl := range []time.Duration{time.Hour, time.Hour, 48 * time.Hour} {
			_, err := s.api.CreateToken(t.Context(), nodeapi.TokenOptions{TTL: ttl}, nil)
			must(t, err)
		}
		for after, want := range []int{3, 1, 1, 0} { // days
			list, err := s.store.List(schema.GroupKind{Kind: "Secret"}, "kube-system", labels.Everything(), nil)
			must(t, err)
			if len(list) != want {
				t.Errorf("after %d days: %d tokens, want %d", after, len(list), want)
			}
			if time.Sleep(24 * time.Hour); after == 0 {
				time.Sleep(90 * time.Minute)
			}
		}
		s.stop()
	})
}
