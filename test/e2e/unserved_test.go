//go:build e2e

package e2e

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// A node port that another process has is an event of its Service, which says
// where and what to do, and is gone once the port is served.
func TestTakenNodePortIsTold(t *testing.T) {
	c := cluster.New(t)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	l, err := net.Listen("tcp", ":30123")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	c.Apply(hello("1", 1) + "---\n" + strings.Replace(helloService, "targetPort: http", "targetPort: http, nodePort: 30123", 1))
	c.Run("rollout", "status", "deployment", "hello", "--timeout", "2m")
	described := func(want bool) func() error {
		return func() error {
			out := c.Run("describe", "service", "hello")
			if got := strings.Contains(out, "PortNotServed"); got != want {
				return fmt.Errorf("told %v, want %v: %s", got, want, out)
			}
			if want && (!strings.Contains(out, "node e2e does not serve port 30123/TCP on all addresses") || !strings.Contains(out, "ss -lntp sport = :30123") || strings.Count(out, "PortNotServed") != 1) {
				return fmt.Errorf("it says: %s", out)
			}
			return nil
		}
	}
	c.Eventually(time.Minute, "the Service's event", described(true))
	_ = l.Close()
	c.Eventually(time.Minute, "the port is served", func() error { _, err := get("http://127.0.0.1:30123/"); return err })
	c.Eventually(time.Minute, "the event is gone", described(false))
}
