//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestNodeReachesOnlyFollowers: three servers and two nodes; the path of one
// node to the leader is cut. It stays Ready all the time, its pods are not
// moved, new ones reach it and their logs come back; also when the server by
// way of which all of this goes stops answering. Healed, it talks to the
// leader directly again. A node that never could reach the leader joins too.
func TestNodeReachesOnlyFollowers(t *testing.T) {
	site := cluster.NewSite(t)
	c := cluster.NewServersOn(t, 3, site.Host())
	m := site.NewMachine()
	n1, n2 := cluster.NewAgent(t, "n1", m), cluster.NewAgent(t, "n2", site.NewMachine())
	line := strings.TrimSpace(c.Run(0, "token", "create", "--uses", "3"))
	for _, a := range []*cluster.Agent{n1, n2} {
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		a.Start("--join", line)
		c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(0, a.Name) })
	}
	if _, err := c.TryIn(0, deployment("app", "sleep.wasm", 4, ""), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	uids := func() map[string]bool {
		list, err := podsOf(c, 0, "app=app")
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]bool{}
		for _, p := range list {
			if cluster.Ready(&p) {
				out[string(p.UID)] = true
			}
		}
		return out
	}
	c.Eventually(time.Minute, "4 pods are Ready", func() error {
		if n := len(uids()); n != 4 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	before, since, guests := uids(), readySince(t, c, "n1"), n1.HostPIDs()
	same := func(what string) {
		t.Helper()
		if now := readySince(t, c, "n1"); now != since {
			t.Errorf("%s: the node was not Ready in between: since %s, was %s", what, now, since)
		}
		if now := uids(); !maps.Equal(now, before) {
			t.Errorf("%s: pods %v, were %v; %s", what, now, before, c.Run(0, "get", "pods", "-o", "json"))
		}
		for id, pid := range guests {
			if now := n1.HostPIDs()[id]; now != pid {
				t.Errorf("%s: guest %s is process %d, was %d", what, id, now, pid)
			}
		}
	}
	status := func(want string, good func(s cluster.AgentStatus) bool) cluster.AgentStatus {
		t.Helper()
		var last cluster.AgentStatus
		c.Eventually(time.Minute, want, func() error {
			s, err := n1.Status()
			if last = s; err != nil || !good(s) {
				return fmt.Errorf("%+v, %v", s, err)
			}
			return nil
		})
		return last
	}
	leader := c.List[c.Leader()]
	m.CutFrom(leader.Address)
	via := status("the node goes by way of another server", func(s cluster.AgentStatus) bool { return s.Connected && s.Relayed }).Server
	if via == leader.Address {
		t.Errorf("by way of the leader itself: %s", via)
	}
	if _, err := c.TryIn(0, podOn("late", "sleep.wasm", "n1"), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	c.Eventually(30*time.Second, "a new pod runs there", func() error { return podRuns(c, "late") })
	if _, err := c.Try(0, "logs", "late"); err != nil {
		t.Errorf("logs: %v", err)
	}
	same("cut off from the leader")

	for _, s := range c.List {
		if s.Address == via {
			if err := s.Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Cmd.Process.Signal(syscall.SIGCONT) }()
		}
	}
	status("the node goes by way of the third server", func(s cluster.AgentStatus) bool { return s.Connected && s.Relayed && s.Server != via })
	same("the server in between is stuck")
	for _, s := range c.List {
		_ = s.Cmd.Process.Signal(syscall.SIGCONT)
	}

	// One that comes new reaches only followers, too.
	m3 := site.NewMachine()
	m3.CutFrom(leader.Address)
	n3 := cluster.NewAgent(t, "n3", m3)
	n3.Start("--join", line)
	c.Eventually(time.Minute, "n3 is Ready", func() error { return c.NodeReady(0, "n3") })

	m.HealFrom()
	status("the node talks to the leader directly again", func(s cluster.AgentStatus) bool { return s.Connected && !s.Relayed && s.Server == leader.Address })
	same("healed")
}

// readySince is when the node's condition Ready became True.
func readySince(t *testing.T, c *cluster.Servers, node string) string {
	t.Helper()
	var n corev1.Node
	if err := c.Get(0, "/api/v1/nodes/"+node, &n); err != nil {
		t.Fatal(err)
	}
	for _, cond := range n.Status.Conditions {
		if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
			return cond.LastTransitionTime.String()
		}
	}
	t.Errorf("node %s: %v", node, n.Status.Conditions)
	return ""
}

func podOn(name, module, node string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  runtimeClassName: wasm
  nodeSelector: {kubernetes.io/hostname: %s}
  containers: [{name: c, image: %s}]
`, name, node, module)
}

func podRuns(c *cluster.Servers, name string) error {
	out, err := c.Try(0, "get", "pod/"+name, "-o", "json")
	if err != nil {
		return err
	}
	var p corev1.Pod
	if err := json.Unmarshal([]byte(out), &p); err != nil {
		return err
	}
	if p.Status.Phase != corev1.PodRunning {
		return fmt.Errorf("%+v", p.Status)
	}
	return nil
}
