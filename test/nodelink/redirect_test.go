package nodelink

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// throne says which of some servers leads; each server's share of it is a
// nodeapi.Leadership.
type throne struct {
	mu      sync.Mutex
	leader  string // address
	term    uint64
	changed chan struct{}
}

func (th *throne) set(leader string) {
	th.mu.Lock()
	defer th.mu.Unlock()
	th.leader, th.term = leader, th.term+1
	close(th.changed)
	th.changed = make(chan struct{})
}

type claimant struct {
	*throne
	addr string
}

// Leadership implements nodeapi.Leadership.
func (c claimant) Leadership() (uint64, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.term, c.leader == c.addr
}

func (c claimant) where() ([]string, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader == "" || c.leader == c.addr {
		return nil, c.changed
	}
	return []string{c.leader}, c.changed
}

// Nodes that come to a server that does not lead are sent to the one that
// does; when another one leads, all move there before their leases run out;
// while nobody leads they wait.
func TestNodesFollowTheLeader(t *testing.T) {
	const nodes = 12
	synctest.Test(t, func(t *testing.T) {
		n := memnet.New()
		th := &throne{changed: make(chan struct{})}
		addrs := []string{"s0:6443", "s1:6443", "s2:6443"}
		var servers []*server
		var keep *stored
		for _, a := range addrs {
			l, err := n.Listen(memnet.Addr(a))
			must(t, err)
			c := claimant{th, a}
			s := start(t, options{listen: l, keep: keep, ns: keep == nil, change: func(nc *nodeapi.Config) {
				nc.Leadership, nc.Leader = c, c.where
				nc.Servers = func() []string { return addrs }
			}})
			keep = s.keep()
			servers = append(servers, s)
		}
		th.set(addrs[0])
		var agents []*agent
		for range nodes {
			id := servers[0].enroll(randomName(len(agents)))
			// Each knows only the servers that do not lead at first.
			must(t, id.Update(func(g *pki.Grant) { g.Servers, g.JoinedBy = addrs[1:], nil }))
			agents = append(agents, runLink(t, id, func(c *link.Config) {
				c.Dial = n.Dialer(memnet.Addr(id.Grant().NodeName))
				c.Servers = func() []string { return addrs }
			}))
		}
		at := func(i int) {
			t.Helper()
			for _, a := range agents {
				if st := a.Status(); !st.Connected || st.Server != addrs[i] {
					t.Errorf("%s: %+v, the leader is %s", a.id.Grant().NodeName, st, addrs[i])
				}
			}
			for name, l := range servers[i].api.Leases().Snapshot() {
				if l.Expired {
					t.Errorf("%s lost its lease", name)
				}
			}
		}
		time.Sleep(10 * time.Second)
		at(0)
		for round := range 6 {
			next := (round + 1) % 3
			th.set("") // an election
			time.Sleep(time.Duration(round) * time.Second)
			th.set(addrs[next])
			// Every lease that could run out would have done so now and then.
			for range 40 {
				time.Sleep(250 * time.Millisecond)
				for name, l := range servers[next].api.Leases().Snapshot() {
					if l.Expired {
						t.Errorf("round %d: %s lost its lease", round, name)
					}
				}
			}
			at(next)
		}
		// A minute without a leader costs connections, not many, and no memory.
		var before uint64
		for _, a := range agents {
			before += a.Status().Attempts
		}
		th.set("")
		time.Sleep(time.Minute)
		var after uint64
		for _, a := range agents {
			after += a.Status().Attempts
		}
		if per := float64(after-before) / nodes; per > 15 {
			t.Errorf("%.1f attempts a node in a minute without a leader", per)
		}
		th.set(addrs[2])
		time.Sleep(nodeapi.LeaseTTL)
		at(2)
		for _, a := range agents {
			a.stop()
		}
		for _, s := range servers {
			s.stop()
		}
	})
}

func randomName(i int) string { return "node-" + string(rune('a'+i)) }
