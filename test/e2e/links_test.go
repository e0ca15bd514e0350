//go:build e2e

package e2e

import (
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestNodesBehindOneAddress: two nodes behind one router, which the servers see
// at one address. Each is Ready, runs its own pod and shows its own log; one
// that dies is Unknown, and the other one is not touched.
func TestNodesBehindOneAddress(t *testing.T) {
	site := cluster.NewSite(t)
	c := cluster.NewServersOn(t, 1, site.Host())
	machines, _ := site.NewMachinesBehindNAT(2)
	line := strings.TrimSpace(c.Run(0, "token", "create", "--uses", "2"))
	var agents []*cluster.Agent
	for i, name := range []string{"n1", "n2"} {
		a := cluster.NewAgent(t, name, machines[i])
		a.Import("hello.wasm", example(t, "hello.wasm"))
		a.Start("--join", line)
		agents = append(agents, a)
		c.Eventually(time.Minute, name+" is Ready", func() error { return c.NodeReady(0, name) })
		if _, err := c.TryIn(0, serverOn("on-"+name, name), "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
	}
	for i, a := range agents {
		pod := "on-" + a.Name
		c.Eventually(time.Minute, pod+" runs", func() error { return podRuns(c, pod) })
		c.Eventually(30*time.Second, "its log comes", func() error {
			if out, err := c.Try(0, "logs", pod); err != nil || !strings.Contains(out, "serving version") {
				return fmt.Errorf("%q, %w", out, err)
			}
			return nil
		})
		if n := len(a.HostPIDs()); n != 1 {
			t.Errorf("node %d runs %d guests", i, n)
		}
	}
	since, guests := readySince(t, c, "n2"), agents[1].HostPIDs()
	agents[0].Stop(syscall.SIGKILL)
	c.Eventually(time.Minute, "n1 is not Ready", func() error {
		if c.NodeReady(0, "n1") == nil {
			return errors.New("it is")
		}
		return nil
	})
	agents[0].Start()
	c.Eventually(time.Minute, "n1 is Ready again", func() error { return c.NodeReady(0, "n1") })
	if now := readySince(t, c, "n2"); now != since {
		t.Errorf("n2 is Ready since %s, was since %s", now, since)
	}
	if now := agents[1].HostPIDs(); !maps.Equal(now, guests) {
		t.Errorf("guests %v, were %v", now, guests)
	}
}

// TestNarrowLink: on the way to a node's server packets above 1280 bytes
// vanish, and nobody is told. The node joins, gets a large object, and its
// status and logs come back.
func TestNarrowLink(t *testing.T) {
	site := cluster.NewSite(t)
	c := cluster.NewServersOn(t, 1, site.Host())
	machines, router := site.NewMachinesBehindNAT(1)
	router.Narrow()
	a := cluster.NewAgent(t, "n1", machines[0])
	a.Import("hello.wasm", example(t, "hello.wasm"))
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady(0, "n1") })
	noise := make([]byte, 300<<10)
	_, _ = rand.Read(noise)
	text := "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: large}\ndata: {noise: " + base64.StdEncoding.EncodeToString(noise) + "}\n---\n" +
		strings.Replace(serverOn("reader", "n1"), "  containers: [{", "  volumes: [{name: v, configMap: {name: large}}]\n  containers: [{volumeMounts: [{name: v, mountPath: /large}], ", 1)
	if _, err := c.TryIn(0, text, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	c.Eventually(time.Minute, "the pod runs", func() error { return podRuns(c, "reader") })
	if out := c.Run(0, "logs", "reader"); !strings.Contains(out, "serving version") {
		t.Errorf("its log: %q", out)
	}
}

// serverOn is a pod on the node that says so when it listens.
func serverOn(name, node string) string {
	return strings.Replace(podOn(name, "hello.wasm", node), "containers: [{name: c,", "containers: [{name: c, ports: [{containerPort: 8080}],", 1)
}
