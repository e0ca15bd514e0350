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

// TestServersChangeTheirAddresses: machines of running servers get other
// addresses, one after the other, then all at the same moment, then one of the
// nodes too. Nothing is restarted; the servers find each other, nodes follow,
// guests run on.
func TestServersChangeTheirAddresses(t *testing.T) {
	site := cluster.NewSite(t)
	var machines []*cluster.Machine
	for i := range 3 {
		m := site.NewMachine()
		m.Lone = i == 1 // one without a route to elsewhere
		m.Address(11 + i)
		machines = append(machines, m)
	}
	c := cluster.NewServersApart(t, machines...)
	var agents []*cluster.Agent
	var nodes []*cluster.Machine
	for i := range 2 {
		m := site.NewMachine()
		m.Address(21 + i)
		nodes = append(nodes, m)
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), m)
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
		c.Eventually(time.Minute, "everybody is in the pool", func() error {
			if s, err := a.Status(); err != nil || len(s.Gossip.Members) != 5 {
				return fmt.Errorf("%+v, %v", s, err)
			}
			return nil
		})
	}
	n := 0
	well := func(what string) {
		t.Helper()
		start := time.Now()
		c.Eventually(2*time.Minute, what+": the servers are well", func() error {
			list, err := c.States(0)
			if err != nil {
				return err
			}
			for _, s := range list {
				if !s.Ready || s.Role == "non-voter" || len(list) != 3 {
					return fmt.Errorf("%+v", list)
				}
			}
			out, err := c.Try(0, "server", "list")
			for _, m := range machines {
				if !strings.Contains(out, m.IP+":6443") {
					return fmt.Errorf("%s is not in %s, %v", m.IP, out, err)
				}
			}
			return err
		})
		for i, a := range agents {
			c.Eventually(time.Minute, what+": "+a.Name+" is connected and Ready", func() error {
				s, err := a.Status()
				if err != nil || !s.Connected {
					return fmt.Errorf("%+v, %v", s, err)
				}
				for _, m := range machines {
					if !strings.Contains(strings.Join(s.Servers, " "), m.IP+":6443") {
						return fmt.Errorf("it does not know %s: %v", m.IP, s.Servers)
					}
				}
				return c.NodeReady(0, a.Name)
			})
			if now := a.HostPIDs(); !maps.Equal(now, guests[i]) {
				t.Fatalf("%s: guests of %s are %v, were %v", what, a.Name, now, guests[i])
			}
		}
		for i := range c.List {
			n++
			c.Eventually(time.Minute, what+": a write goes through", func() error {
				_, err := c.TryIn(i, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: w%d}\n", n), "apply", "-f", "-")
				return err
			})
		}
		for _, s := range c.List {
			if !s.Running() {
				t.Fatalf("%s was ended", s.Name)
			}
		}
		t.Logf("%s: well after %.0f s", what, time.Since(start).Seconds())
	}
	well("at first")
	next := 31
	for range cycles(t) {
		for i, m := range machines {
			m.Address(next)
			next++
			well(fmt.Sprintf("server %d moved", i+1))
		}
		for _, m := range machines {
			m.Address(next)
			next++
		}
		well("all servers moved")
		// The power is back before the switch is.
		c.List[1].Stop(syscall.SIGKILL)
		machines[1].Cut()
		c.List[1].Start()
		c.Eventually(time.Minute, "it starts without an address", func() error {
			if l := c.List[1].Log(); !strings.Contains(l[strings.LastIndex(l, "server is starting")+1:], "127.0.0.1") {
				return fmt.Errorf("log %s", l)
			}
			return nil
		})
		machines[1].Heal()
		well("a server started without a link")
		nodes[0].Address(next)
		next++
		well("a node moved")
		c.Eventually(time.Minute, "the node's new address is known", func() error {
			out, err := c.Try(0, "get", "node/n1", "-o", "json")
			if err != nil || !strings.Contains(out, `"`+nodes[0].IP+`"`) {
				return fmt.Errorf("%s, %v", out, err)
			}
			return nil
		})
		if next > 240 {
			next = 31
		}
	}
}
