package nodelink

import (
	"bytes"
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// A node's way to the leader is cut, and those to the other servers are not:
// its lease is renewed through one of them, and never runs out; pulls,
// reports and streams go the same way; one that gets stuck is left for
// another; and once the leader can be reached, the node talks to it directly.
func TestNodesReachTheLeaderThroughOthers(t *testing.T) {
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
			dial := n.Dialer(memnet.Addr(a))
			s := start(t, options{listen: l, keep: keep, ns: keep == nil, change: func(nc *nodeapi.Config) {
				nc.Leadership, nc.Leader = c, c.where
				nc.ToLeader = func(ctx context.Context) (net.Conn, error) { return dial(ctx, "tcp", addrs[0]) }
				nc.Servers = func() []string { return addrs }
			}})
			keep = s.keep()
			servers = append(servers, s)
		}
		th.set(addrs[0])
		id := servers[0].enroll("n1")
		must(t, id.Update(func(g *pki.Grant) { g.Servers, g.JoinedBy = addrs, nil }))
		cut := func(on bool) {
			n.Block("n1", memnet.Addr(addrs[0]), on)
			n.Block(memnet.Addr(addrs[0]), "n1", on)
		}
		a := runLink(t, id, func(c *link.Config) {
			c.Dial = n.Dialer("n1")
			c.Servers = func() []string { return addrs }
			c.Streams = logs{}
		})
		held := func(d time.Duration) {
			t.Helper()
			for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
				if l := servers[0].api.Leases().Snapshot()["n1"]; l.Expired {
					t.Fatalf("%s: the lease ran out", time.Now())
				}
			}
		}
		time.Sleep(10 * time.Second)
		if st := a.Status(); !st.Connected || st.Server != addrs[0] || st.Relayed {
			t.Fatalf("%+v", st)
		}
		for range 5 { // the cut comes at another moment of the interval each time
			cut(true)
			held(time.Minute)
			st := a.Status()
			if !st.Connected || !st.Relayed || st.Server == addrs[0] {
				t.Fatalf("cut off from the leader: %+v", st)
			}
			cut(false)
			held(time.Minute)
			if st := a.Status(); !st.Connected || st.Relayed || st.Server != addrs[0] {
				t.Fatalf("the leader is back: %+v", st)
			}
			held(370 * time.Millisecond)
		}

		cut(true)
		held(time.Minute)
		servers[0].create(boundPod("p", "n1"))
		asg, err := a.Pull(t.Context(), wire.PullRequest{})
		must(t, err)
		if len(asg.Objects) == 0 {
			t.Error("no pod came")
		}
		p := servers[0].pod("p")
		r, err := a.Report(t.Context(), &wire.Report{BootID: "boot-1", Seq: 1, Pods: []wire.PodReport{{Namespace: "default", Name: "p", UID: string(p.UID),
			Status: encode(t, &corev1.PodStatus{Phase: corev1.PodRunning})}}})
		must(t, err)
		if len(r.Committed) != 1 || servers[0].pod("p").Status.Phase != corev1.PodRunning {
			t.Errorf("report: %+v", r)
		}
		var out bytes.Buffer
		must(t, servers[0].api.Logs(t.Context(), p, &corev1.PodLogOptions{Container: "c"}, &out))
		if out.Len() < 100_000 {
			t.Errorf("log of %d bytes", out.Len())
		}
		for i := range 8 {
			stuck := a.Status().Server
			n.Cut(memnet.Addr(stuck), true)
			held(time.Duration(5-i%2*3) * 5900 * time.Millisecond) // the next one soon after the node came to it, too
			if st := a.Status(); !st.Connected || !st.Relayed || st.Server == stuck {
				t.Fatalf("%s is stuck: %+v", stuck, st)
			}
			n.Cut(memnet.Addr(stuck), false)
			held(time.Duration(1+i%3) * 1100 * time.Millisecond)
		}
		a.stop()
		// What does not lead takes nothing by itself.
		for _, s := range servers[1:] {
			if l, ok := s.api.Leases().Snapshot()["n1"]; ok {
				t.Errorf("a server that does not lead has a lease: %+v", l)
			}
			s.stop()
		}
		servers[0].stop()
	})
}
