//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestDeadNodeUnderNewLeaders: a machine is dead and its pods run elsewhere;
// then leaders die, and the next one stands still for a moment, as on a busy
// machine. Nobody takes the dead machine for alive, and what stands in for its
// pods goes on.
func TestDeadNodeUnderNewLeaders(t *testing.T) {
	rounds := 3
	if testing.Short() {
		rounds = 1
	}
	c := newCrew(t, 6)
	dead, _ := c.busy(0)
	dead.Kill()
	c.moved(dead, 0)
	elsewhere := func() map[string]int { return c.guestsBut(dead) }
	guests := elsewhere()
	for range rounds {
		leader := c.Leader()
		c.List[leader].Stop(syscall.SIGKILL)
		next := c.Leader()
		_ = c.List[next].Cmd.Process.Signal(syscall.SIGSTOP)
		pause(t, time.Second)
		_ = c.List[next].Cmd.Process.Signal(syscall.SIGCONT)
		for end := time.Now().Add(15 * time.Second); time.Now().Before(end); pause(t, 200*time.Millisecond) {
			if err := c.NodeReady(next, dead.Name); err == nil {
				t.Fatalf("%s is dead, and the new leader calls it Ready", dead.Name)
			}
		}
		if now := elsewhere(); !maps.Equal(now, guests) {
			t.Fatalf("a new leader: guests %v, were %v", now, guests)
		}
		if out, err := c.Try(next, "events"); err != nil || strings.Contains(out, "Node "+dead.Name+" is back") {
			t.Fatalf("%s, %v", out, err)
		}
		c.List[leader].Start()
		c.Roles(3, 3)
	}
}

// TestLeadersMachineKilled: the machine that dies led and was a node, too.
// Another server, which has never led, knows that the nodes renewed with the
// one before, and gives them no more time than the election took.
func TestLeadersMachineKilled(t *testing.T) {
	c := newCrew(t, 6)
	dead, _ := c.busy(0)
	leader := c.Leader()
	pause(t, 30*time.Second) // whoever came late has tried again: see wire.ReconnectMost
	start := time.Now()
	dead.Kill()
	c.List[leader].Stop(syscall.SIGKILL)
	next := c.Leader()
	c.moved(dead, next)
	t.Logf("a server that led and a node killed → its pods Ready elsewhere: %.1f s", time.Since(start).Seconds())
	for _, a := range c.agents {
		if err := c.NodeReady(next, a.Name); (err == nil) == (a == dead) {
			t.Errorf("%s: %v", a.Name, err)
		}
	}
}

// moved waits until every pod runs elsewhere, as that server says.
func (c *crew) moved(dead *cluster.Agent, server int) {
	c.t.Helper()
	c.Eventually(time.Minute, "its pods run elsewhere", func() error {
		list, err := podsOf(c.Servers, server, "app=app")
		good := 0
		for i := range list {
			if list[i].Spec.NodeName != dead.Name && cluster.Ready(&list[i]) {
				good++
			}
		}
		if n := len(c.guestsBut(dead)); err != nil || good != c.pods || n != c.pods {
			return fmt.Errorf("%d are Ready elsewhere, %d guests, %w", good, n, err)
		}
		return nil
	})
}

func (c *crew) guestsBut(dead *cluster.Agent) map[string]int {
	guests := map[string]int{}
	for _, a := range c.agents {
		if a != dead {
			maps.Copy(guests, a.HostPIDs())
		}
	}
	return guests
}
