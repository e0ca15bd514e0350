package consensus

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// simCluster is three servers in one process, in virtual time.
type simCluster struct {
	t     *testing.T
	dirs  [3]string
	nodes [3]*Node
	trans [3]*raft.InmemTransport
}

func newSim(t *testing.T, dirs [3]string) *simCluster {
	c := &simCluster{t: t, dirs: dirs}
	for i := range c.nodes {
		c.start(i)
	}
	return c
}

func (c *simCluster) id(i int) string { return fmt.Sprintf("server-%d", i) }

func (c *simCluster) start(i int) {
	c.t.Helper()
	_, c.trans[i] = raft.NewInmemTransport(raft.ServerAddress(c.id(i)))
	for j, other := range c.trans {
		if other != nil && j != i {
			c.link(i, j)
		}
	}
	n, err := Open(c.t.Context(), Config{
		Dir: c.dirs[i], ClusterID: "cluster-1", ServerID: c.id(i), Voters: []string{c.id(0), c.id(1), c.id(2)},
		Transport: c.trans[i], Log: slog.New(slog.DiscardHandler), SegmentBytes: 16 << 10, SnapshotBytes: 16 << 10,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.nodes[i] = n
}

func (c *simCluster) stop(i int) {
	c.t.Helper()
	c.cut(i)
	if err := c.nodes[i].Close(); err != nil {
		c.t.Error(err)
	}
	_ = c.trans[i].Close()
	c.trans[i] = nil
}

func (c *simCluster) link(i, j int) {
	c.trans[i].Connect(c.trans[j].LocalAddr(), c.trans[j])
	c.trans[j].Connect(c.trans[i].LocalAddr(), c.trans[i])
}

// cut isolates a server.
func (c *simCluster) cut(i int) {
	for j := range c.trans {
		if j != i && c.trans[j] != nil {
			c.trans[i].Disconnect(c.trans[j].LocalAddr())
			c.trans[j].Disconnect(c.trans[i].LocalAddr())
		}
	}
}

func (c *simCluster) heal(i int) {
	for j := range c.trans {
		if j != i && c.trans[j] != nil {
			c.link(i, j)
		}
	}
}

// leader waits for a server that leads and is not the one excluded.
func (c *simCluster) leader(but int) int {
	c.t.Helper()
	for range 600 {
		for i, n := range c.nodes {
			if _, leading := n.Leadership(); leading && i != but && c.trans[i] != nil {
				return i
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	c.t.Fatal("no leader within a minute")
	return 0
}

func (c *simCluster) propose(i int, name string) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), 20*time.Second)
	defer cancel()
	r := object("ConfigMap", "", name)
	r.Spec.Data = make([]byte, 700)
	term, _ := c.nodes[i].Leadership()
	res, err := c.nodes[i].Propose(ctx, []state.Op{{Type: state.OpCreate, Record: r, Term: term}})
	if err == nil && res[0].Reason != state.ReasonNone {
		err = fmt.Errorf("refused: %d %s", res[0].Reason, res[0].Detail)
	}
	return err
}

// TestSimulation isolates and restarts leaders while writing. What was
// acknowledged must be on every server at the end, and all states equal.
func TestSimulation(t *testing.T) {
	dirs := [3]string{t.TempDir(), t.TempDir(), t.TempDir()}
	rounds := 12
	if testing.Short() {
		rounds = 4
	}
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		c := newSim(t, dirs)
		var acked []string
		write := func(leader, round, n int) {
			for i := range n {
				name := fmt.Sprintf("r%d-%d-%d", round, leader, i)
				if err := c.propose(leader, name); err == nil {
					acked = append(acked, name)
				}
			}
		}
		for round := range rounds {
			old := c.leader(-1)
			write(old, round, 20)
			if round%3 == 2 {
				c.stop(old)
				// Long enough away that the log is cut behind it.
				next := c.leader(old)
				for part := range 3 {
					write(next, 100*round+part, 10)
					if err := c.nodes[next].Snapshot(t.Context()); err != nil {
						t.Error(err)
					}
				}
				c.start(old)
				time.Sleep(20 * time.Second)
				if c.nodes[old].Stats().SnapshotIndex == 0 {
					t.Errorf("round %d: no snapshot was sent to server %d", round, old)
				}
				continue
			}
			c.cut(old)
			next := c.leader(old)
			write(next, round, 10)
			time.Sleep(5 * time.Second)
			if _, leading := c.nodes[old].Leadership(); leading {
				t.Errorf("round %d: the isolated server still leads", round)
			}
			if err := c.propose(old, fmt.Sprintf("lost-%d", round)); err == nil {
				t.Errorf("round %d: the isolated server acknowledged a write", round)
			}
			if err := c.nodes[old].Barrier(t.Context()); err == nil {
				t.Errorf("round %d: the isolated server answered a linearizable read", round)
			}
			c.heal(old)
		}
		write(c.leader(-1), rounds, 5)
		time.Sleep(time.Minute)
		checkSim(t, c, acked)
		t.Logf("%d acknowledged, %v virtual", len(acked), time.Since(start).Round(time.Second))
		for i := range c.nodes {
			c.stop(i)
		}
	})
}

func checkSim(t *testing.T, c *simCluster, acked []string) {
	t.Helper()
	want, err := c.nodes[0].State().Hash()
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range c.nodes {
		if got, err := n.State().Hash(); err != nil || got != want {
			t.Errorf("server %d: its state differs: %v", i, err)
		}
		s := n.State().Snapshot()
		for _, name := range acked {
			if _, ok := s.Get(state.Key{Kind: "ConfigMap", Name: name}); !ok {
				t.Errorf("server %d: %s was acknowledged and is missing", i, name)
			}
		}
	}
}

// A follower hears of its leader once something of the leader's term is
// committed; a leader, and who stands alone, hear of nobody, and what was
// heard last stays the time of the last contact.
func TestLeaderHeard(t *testing.T) {
	dirs := [3]string{t.TempDir(), t.TempDir(), t.TempDir()}
	synctest.Test(t, func(t *testing.T) {
		c := newSim(t, dirs)
		defer func() {
			for i := range c.nodes {
				c.stop(i)
			}
		}()
		l := c.leader(-1)
		f := (l + 1) % 3
		time.Sleep(5 * time.Second)
		if at := c.nodes[l].LeaderHeard(); !at.IsZero() {
			t.Errorf("the leader heard of one %s ago", time.Since(at))
		}
		if at := c.nodes[f].LeaderHeard(); at.IsZero() || time.Since(at) > time.Second {
			t.Errorf("a follower heard of its leader %s ago", time.Since(at))
		}
		c.cut(l)
		cut := time.Now()
		next := c.leader(l)
		third := 3 - l - next
		time.Sleep(5 * time.Second)
		if at := c.nodes[third].LeaderHeard(); time.Since(at) > time.Second {
			t.Errorf("a follower heard of the next leader %s ago", time.Since(at))
		}
		if at := c.nodes[next].LeaderHeard(); !at.IsZero() {
			t.Errorf("the next leader heard of one %s ago", time.Since(at))
		}
		if at := c.nodes[l].LeaderHeard(); at.After(cut) {
			t.Errorf("the one that is cut off heard of a leader %s after the cut", at.Sub(cut))
		}
	})
}
