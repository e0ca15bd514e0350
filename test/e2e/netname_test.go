//go:build e2e

package e2e

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// Somebody takes the name of the pods' network namespace away: new pods start
// beside the old ones, and an agent that is started anew finds them all.
func TestNetworkNamespaceLosesItsName(t *testing.T) {
	cluster.NeedContainers(t) // root
	c := cluster.New(t)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	c.Apply(hello("1", 1) + "---\n" + helloService)
	first := c.WaitReady("app=hello", 1)[0]
	ip, _ := clusterIP(t, c, "hello")
	lose := func() {
		t.Helper()
		if out, err := exec.Command("ip", "netns", "del", c.NetNS).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	answers := func(what string) {
		t.Helper()
		c.Eventually(30*time.Second, what, func() error { _, err := get("http://" + ip + "/"); return err })
	}
	answers("the Service answers")
	lose()
	c.Run("scale", "deployment", "hello", "--replicas=2")
	c.WaitReady("app=hello", 2)
	answers("the Service answers with a second pod")
	lose()
	c.Kill()
	c.Start()
	for _, p := range c.WaitReady("app=hello", 2) {
		if n := p.Status.ContainerStatuses[0].RestartCount; n != 0 {
			t.Errorf("%s was restarted %d times", p.Name, n)
		}
		if p.Name == first.Name && p.Status.PodIP != first.Status.PodIP {
			t.Errorf("%s is at %s, was at %s", p.Name, p.Status.PodIP, first.Status.PodIP)
		}
		c.Eventually(30*time.Second, p.Name+" answers", func() error {
			_, err := get(fmt.Sprintf("http://%s:8080/", p.Status.PodIP))
			return err
		})
	}
	answers("the Service answers after a new start")
	c.Run("scale", "deployment", "hello", "--replicas=3")
	c.WaitReady("app=hello", 3)
}
