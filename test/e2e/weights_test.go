//go:build e2e

package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// A canary gets the share of new connections that its weight says, and another
// one as soon as its weight is another.
func TestWeightsOfACanary(t *testing.T) {
	c := cluster.New(t)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	weighed := func(name string, weight int) string {
		return strings.Replace(leavingPod(name), "labels:", fmt.Sprintf(`annotations: {dunlin.dev/weight: "%d"}, labels:`, weight), 1)
	}
	c.Apply(leavingPod("stable") + "---\n" + weighed("canary", 11) + "---\n" + helloService)
	c.WaitReady("app=hello", 2)
	ip, _ := clusterIP(t, c, "hello")
	share := func() (canary int, err error) {
		for range 111 {
			b, err := get("http://" + ip + "/")
			if err != nil {
				return 0, err
			}
			if strings.Contains(b, "from canary ") {
				canary++
			}
		}
		return canary, nil
	}
	wanted := func(n int) {
		t.Helper()
		c.Eventually(30*time.Second, fmt.Sprintf("%d of 111 connections are the canary's", n), func() error {
			got, err := share()
			if err != nil {
				return err
			}
			if got < n-1 || got > n+1 {
				return fmt.Errorf("%d", got)
			}
			return nil
		})
	}
	wanted(11)
	c.Apply(weighed("canary", 455)) // 455 to 100
	wanted(91)
	if _, err := c.TryIn(weighed("canary", 0), "apply", "-f", "-"); err == nil || !strings.Contains(err.Error(), "dunlin.dev/weight") {
		t.Errorf("a weight of 0: %v", err)
	}
}
