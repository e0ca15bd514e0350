//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

func stateful(name, module string) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: StatefulSet
metadata: {name: %[1]s}
spec:
  serviceName: %[1]s
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      runtimeClassName: wasm
      terminationGracePeriodSeconds: 2
      containers: [{name: main, image: %[2]s}]
`, name, module)
}

// onePod is the only pod of an app, which must run.
func onePod(c *cluster.Servers, app string) (corev1.Pod, error) {
	list, err := podsOf(c, 0, "app="+app)
	if err != nil || len(list) != 1 || !cluster.Ready(&list[0]) {
		return corev1.Pod{}, fmt.Errorf("%d pods, %v", len(list), err)
	}
	return list[0], nil
}

func guestsOf(a *cluster.Agent, want int) func() error {
	return func() error {
		if n := len(a.HostPIDs()); n != want {
			return fmt.Errorf("%d guests", n)
		}
		return nil
	}
}

// TestDeclareDead: a node with a StatefulSet's pod is cut off. The pod waits
// for it until a user declares the node dead; then it starts elsewhere. The
// node, back, stops it and says what to do; with a new identity it is a node
// again.
func TestDeclareDead(t *testing.T) {
	site := cluster.NewSite(t)
	c := cluster.NewServersOn(t, 1, site.Host())
	m := map[string]*cluster.Machine{"n1": site.NewMachine(), "n2": site.NewMachine()}
	agents := map[string]*cluster.Agent{}
	for _, name := range []string{"n1", "n2"} {
		a := cluster.NewAgent(t, name, m[name])
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
		c.Eventually(time.Minute, name+" is Ready", func() error { return c.NodeReady(0, name) })
		agents[name] = a
	}
	if _, err := c.TryIn(0, stateful("db", "sleep.wasm"), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	var pod corev1.Pod
	c.Eventually(time.Minute, "the pod runs", func() (err error) { pod, err = onePod(c, "db"); return err })
	node := pod.Spec.NodeName
	a := agents[node]
	if _, err := c.Try(0, "node", "declare-dead", node); err == nil || !strings.Contains(err.Error(), "--yes") {
		t.Errorf("nobody was asked: %v", err)
	}
	if _, err := c.Try(0, "node", "declare-dead", node, "--yes"); err == nil || !strings.Contains(err.Error(), "it lives") {
		t.Errorf("a node that lives: %v", err)
	}
	m[node].Cut()
	c.Eventually(time.Minute, "the node is not Ready", func() error {
		if c.NodeReady(0, node) == nil {
			return errors.New("it still is")
		}
		return nil
	})
	pause(t, 3*time.Second)
	if list, err := podsOf(c, 0, "app=db"); err != nil || len(list) != 1 || list[0].UID != pod.UID {
		t.Errorf("a pod that is allowed once only was replaced: %v, %v", list, err)
	}
	if out := c.Run(0, "describe", "pod", "db-0"); !strings.Contains(out, "out of reach") || !strings.Contains(out, "dunlin node declare-dead "+node) {
		t.Errorf("the pod does not say what it waits for: %s", out)
	}
	out := c.Run(0, "node", "declare-dead", node, "--yes")
	if !strings.Contains(out, "default/db-0") {
		t.Errorf("declare-dead does not say what it released: %q", out)
	}
	c.Eventually(time.Minute, "the pod runs on the other node", func() error {
		p, err := onePod(c, "db")
		if err == nil && (p.UID == pod.UID || p.Spec.NodeName == node) {
			err = errors.New("still the old one")
		}
		return err
	})
	if out := c.Run(0, "get", "nodes"); !strings.Contains(out, "DeclaredDead") {
		t.Errorf("get nodes: %s", out)
	}
	if len(a.HostPIDs()) != 1 {
		t.Errorf("the cut-off node stopped its pod by itself: %v", a.HostPIDs())
	}
	m[node].Heal()
	c.Eventually(time.Minute, "the node stops the pod", guestsOf(a, 0))
	c.Eventually(10*time.Second, "the node says why", func() error {
		s, err := a.Status()
		if err != nil || s.Connected || !strings.Contains(s.Reason, "dunlin agent reset") || !strings.Contains(a.Log(), "declared dead") {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	reset := func(args ...string) (string, error) { return a.Run(append([]string{"agent", "reset"}, args...)...) }
	if out, err := reset("--yes"); err == nil || !strings.Contains(out, "nothing was changed") {
		t.Errorf("reset of a running agent: %v: %s", err, out)
	}
	// Also after a restart with no network it runs nothing of the past.
	a.Stop(syscall.SIGTERM)
	m[node].Cut()
	a.Start()
	c.Eventually(time.Minute, "the agent answers", func() error { _, err := a.Status(); return err })
	pause(t, 3*time.Second)
	if now := a.HostPIDs(); len(now) != 0 {
		t.Errorf("it runs %v", now)
	}
	m[node].Heal()
	a.Stop(syscall.SIGTERM)
	if out, err := reset(); err == nil || !strings.Contains(out, "nothing was changed") || !strings.Contains(out, "the node's key and certificate ("+node) {
		t.Errorf("reset without an answer: %v: %s", err, out)
	}
	if out, err := reset("--yes"); err != nil {
		t.Fatalf("reset: %v: %s", err, out)
	}
	if out, err := reset("--yes"); err != nil || !strings.Contains(out, "nothing to forget") {
		t.Errorf("reset again: %v: %s", err, out)
	}
	// The name is still the dead node's.
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	c.Eventually(time.Minute, "it is told how to get its old name", func() error {
		if !strings.Contains(a.Log(), "dunlin delete node NAME") {
			return errors.New("not yet")
		}
		return nil
	})
	a.Stop(syscall.SIGTERM)
	if out, err := reset("--yes"); err != nil {
		t.Fatalf("reset: %v: %s", err, out)
	}
	c.Run(0, "delete", "node", node)
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	c.Eventually(time.Minute, "it is a node again", func() error { return c.NodeReady(0, node) })
}

// copiedDisk is one cycle of TestStory16CopiedDisk.
func copiedDisk(t *testing.T) {
	c := cluster.NewServers(t, 1)
	a := cluster.NewAgent(t, "n1", nil)
	a.Import("sleep.wasm", cluster.Module(t, "sleep"))
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")), "--machine-boot", "first")
	c.Eventually(time.Minute, "n1 is Ready", func() error { return c.NodeReady(0, "n1") })
	if _, err := c.TryIn(0, deployment("app", "sleep.wasm", 2, ""), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	c.Eventually(time.Minute, "2 guests", guestsOf(a, 2))
	guests, since := a.HostPIDs(), readySince(t, c, "n1")
	pause(t, 2*time.Second) // until its database is at rest
	clone := cluster.NewAgent(t, "n1", nil)
	if out, err := exec.Command("cp", "-a", filepath.Join(a.Dir, "state"), clone.Dir).CombinedOutput(); err != nil {
		t.Fatalf("copy: %v: %s", err, out)
	}
	clone.Start("--machine-boot", "second")
	c.Eventually(time.Minute, "the copy is told", func() error {
		if s, err := clone.Status(); err != nil || !strings.Contains(s.Reason, "duplicate identity") || !strings.Contains(s.Reason, "dunlin agent reset") {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	c.Eventually(30*time.Second, "the copy runs nothing of the original's", guestsOf(clone, 0))
	c.Eventually(30*time.Second, "the original says it", func() error {
		if !strings.Contains(a.Log(), "another machine has this node's key") {
			return errors.New("it does not")
		}
		return nil
	})
	for what, want := range map[string]string{"get nodes": "Ready,DuplicateIdentity", "describe node n1": "same key", "events": "DuplicateIdentity"} {
		c.Eventually(20*time.Second, what+" names it", func() error {
			out, err := c.Try(0, strings.Split(what, " ")...)
			if err != nil || !strings.Contains(out, want) {
				return fmt.Errorf("%s, %v", out, err)
			}
			return nil
		})
	}
	// The original's agent restarts: the copy, which comes all the time, does
	// not get its place.
	a.Stop(syscall.SIGKILL)
	pause(t, 3*time.Second)
	a.Start("--machine-boot", "first")
	c.Eventually(time.Minute, "the original is connected", func() error {
		if s, err := a.Status(); err != nil || !s.Connected {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	if s, err := clone.Status(); err != nil || s.Connected {
		t.Errorf("the copy: %+v, %v", s, err)
	}
	if now := a.HostPIDs(); !maps.Equal(now, guests) {
		t.Errorf("guests %v, were %v", now, guests)
	}
	if now := readySince(t, c, "n1"); now != since {
		t.Errorf("Ready since %s, was %s", now, since)
	}
	clone.Stop(syscall.SIGTERM)
	if out, err := clone.Run("agent", "reset", "--yes"); err != nil {
		t.Fatalf("reset: %v: %s", err, out)
	}
	clone.Start("--machine-boot", "second", "--node-name", "n2", "--join", strings.TrimSpace(c.Run(0, "token", "create")))
	c.Eventually(time.Minute, "n2 is Ready", func() error { return c.NodeReady(0, "n2") })
	if err := c.NodeReady(0, "n1"); err != nil {
		t.Error(err)
	}
	var list corev1.NodeList
	if err := json.Unmarshal([]byte(c.Run(0, "get", "nodes", "-o", "json")), &list); err != nil || len(list.Items) != 2 {
		t.Errorf("%d nodes, %v", len(list.Items), err)
	}
}

// TestMachineSetUpAnew: a machine whose disk was wiped joins with the name that
// it had. It is another node, which says how to get the name back; the work of
// the one that it was waits until that is declared dead, and then runs again.
func TestMachineSetUpAnew(t *testing.T) {
	c := cluster.NewServers(t, 1)
	start := func() *cluster.Agent {
		a := cluster.NewAgent(t, "n1", nil)
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
		return a
	}
	was := start()
	c.Eventually(time.Minute, "n1 is Ready", func() error { return c.NodeReady(0, "n1") })
	if _, err := c.TryIn(0, stateful("db", "sleep.wasm"), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	var pod corev1.Pod
	c.Eventually(time.Minute, "the pod runs", func() (err error) {
		if pod, err = onePod(c, "db"); err == nil && !cluster.Ready(&pod) {
			err = errors.New("not Ready")
		}
		return err
	})
	was.Kill() // with its guests, as a machine whose power goes

	now := start()
	var name string
	c.Eventually(time.Minute, "another node is Ready", func() error {
		for _, line := range strings.Split(c.Run(0, "get", "nodes"), "\n") {
			if f := strings.Fields(line); len(f) > 1 && strings.HasPrefix(f[0], "n1-") && f[1] == "Ready" {
				name = f[0]
				return nil
			}
		}
		return errors.New(c.Run(0, "get", "nodes"))
	})
	for _, want := range []string{name, "dunlin agent reset", "dunlin node declare-dead NAME", "dunlin delete node NAME"} {
		if !strings.Contains(now.Log(), want) {
			t.Errorf("the agent does not say %q: %s", want, now.Log())
		}
	}
	if p, err := onePod(c, "db"); err != nil || p.UID != pod.UID {
		t.Errorf("the pod has moved although nobody said that n1 is gone: %v, %v", p.UID, err)
	}
	now.Stop(syscall.SIGTERM)
	if out, err := now.Run("agent", "reset", "--yes"); err != nil {
		t.Fatalf("reset: %v: %s", err, out)
	}
	for _, n := range []string{"n1", name} {
		c.Eventually(time.Minute, "the servers miss "+n, func() error {
			if c.NodeReady(0, n) == nil {
				return errors.New("it is Ready")
			}
			return nil
		})
		c.Run(0, "node", "declare-dead", n, "--yes")
	}
	c.Run(0, "delete", "node", "n1", name)
	now.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	c.Eventually(time.Minute, "it has its name", func() error { return c.NodeReady(0, "n1") })
	c.Eventually(time.Minute, "the pod runs there", func() error {
		p, err := onePod(c, "db")
		if err == nil && (p.UID == pod.UID || !cluster.Ready(&p)) {
			err = fmt.Errorf("%s, Ready %v", p.UID, cluster.Ready(&p))
		}
		if err != nil {
			out, _ := c.Try(0, "describe", "pod", "db-0")
			err = fmt.Errorf("%w: %s", err, out)
		}
		return err
	})
}
