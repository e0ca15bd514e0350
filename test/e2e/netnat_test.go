//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestNetCheckAcrossNAT: a node behind a router that hides it, and one on the
// site. While the hidden one is in the others' pool, and while only it thinks so,
// the check says of it, once for each pair, that nothing gets through and that a
// NAT may be why; of the other two that they reach each other; and that the
// hidden node reaches the server, so it is Ready.
func TestNetCheckAcrossNAT(t *testing.T) {
	site := cluster.NewSite(t)
	c := cluster.NewServersOn(t, 1, site.Host())
	behind, beside := site.NewMachineBehindNAT(), site.NewMachine()
	hidden, open := cluster.NewAgent(t, "hidden", behind), cluster.NewAgent(t, "open", beside)
	for _, a := range []*cluster.Agent{hidden, open} {
		a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
		c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(0, a.Name) })
	}
	c.Eventually(time.Minute, "the check tells", func() error {
		out, err := c.Try(0, "net", "check")
		if err == nil {
			return errors.New("all is well: " + out)
		}
		table := strings.Join(strings.Fields(out), " ")
		for _, want := range []string{"hidden s1 (" + c.List[0].Address + ") server TCP ok", "open s1 (" + c.List[0].Address + ") server TCP ok"} {
			if !strings.Contains(table, want) {
				return fmt.Errorf("no %q in %s", want, out)
			}
		}
		for _, path := range []string{"gossip UDP ok", "gossip TCP ok"} { // of s1 and open, from each
			if strings.Count(table, path) != 2 {
				return fmt.Errorf("not twice %q in %s", path, out)
			}
		}
		said := err.Error() // "UDP from" begins what is said of one direction
		n := strings.Count(said, "nothing gets through between ")
		if n < 1 || n > 2 || strings.Count(said, "hidden ("+behind.IP) != n || strings.Count(said, "behind a NAT") != n || strings.Contains(said, "P from ") {
			return fmt.Errorf("%s, %w", out, err)
		}
		for _, other := range []string{"open (" + beside.IP, "s1 (" + site.Host()} {
			if strings.Count(said, other) > 1 {
				return fmt.Errorf("%s twice: %w", other, err)
			}
		}
		return nil
	})
	if err := c.NodeReady(0, "hidden"); err != nil {
		t.Error(err)
	}
	out, err := hidden.Command("net", "check", "--local")
	if err == nil || !strings.Contains(out, "no answer") || !strings.Contains(out, "behind a NAT") || strings.Contains(out, "P from ") {
		t.Errorf("the hidden node's own view: %v, %s", err, out)
	}
}
