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

// withPods is three servers, and two nodes with one guest each.
func withPods(t *testing.T) (c *cluster.Servers, agents []*cluster.Agent, same func(what string)) {
	t.Helper()
	c = cluster.NewServers(t, 3)
	for i := range 2 {
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), nil)
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
		agents = append(agents, a)
		c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(0, a.Name) })
		d := strings.Replace(deployment("app-"+a.Name, "sleep.wasm", 1, ""), "    spec:\n", "    spec:\n      nodeName: "+a.Name+"\n", 1)
		if _, err := c.TryIn(0, d, "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
	}
	guests := make([]map[string]int, len(agents))
	for i, a := range agents {
		c.Eventually(time.Minute, a.Name+" has a guest", func() error {
			if guests[i] = a.HostPIDs(); len(guests[i]) != 1 {
				return fmt.Errorf("%d", len(guests[i]))
			}
			return nil
		})
	}
	return c, agents, func(what string) {
		t.Helper()
		for i, a := range agents {
			if now := a.HostPIDs(); !maps.Equal(now, guests[i]) {
				t.Fatalf("%s: guests of %s are %v, were %v", what, a.Name, now, guests[i])
			}
		}
	}
}

// TestStory01AllServersDie: with every server killed guests run on, for longer
// than any lease, and an agent that is started meanwhile adopts its own; when
// the servers are back nothing is started again and nodes are Ready.
func TestStory01AllServersDie(t *testing.T) {
	c, agents, same := withPods(t)
	for range cycles(t) {
		for _, s := range c.List {
			s.Stop(syscall.SIGKILL)
		}
		agents[1].Stop(syscall.SIGKILL)
		agents[1].Start()
		pause(t, 10*time.Second)
		same("without servers")
		for _, a := range agents {
			c.Eventually(30*time.Second, a.Name+" says that it is cut off", func() error {
				if s, err := a.Status(); err != nil || s.Connected {
					return fmt.Errorf("%+v, %v", s, err)
				}
				return nil
			})
		}
		for _, s := range c.List {
			s.Start()
		}
		c.Roles(3, 3)
		for _, a := range agents {
			c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(0, a.Name) })
		}
		c.Eventually(time.Minute, "the pods are Ready and were never restarted", func() error {
			for _, a := range agents {
				list, err := podsOf(c, 0, "app=app-"+a.Name)
				if err != nil || len(list) != 1 || !cluster.Ready(&list[0]) || list[0].Status.ContainerStatuses[0].RestartCount != 0 {
					return fmt.Errorf("%s: %d pods, %v", a.Name, len(list), err)
				}
			}
			return nil
		})
		same("with servers again")
	}
}
