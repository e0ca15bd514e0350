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
// site. The check says of each of the two pairs with the hidden one, once, that
// nothing gets through between them and that a NAT may be why; that the other
// two reach each other; and that the hidden node reaches the server, so it is
// Ready.
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
		said := err.Error()
		if strings.Count(said, "nothing gets through between ") != 2 || strings.Count(said, "hidden ("+behind.IP) != 2 || strings.Count(said, "behind a NAT") != 2 ||
			strings.Contains(said, "is blocked") || !strings.Contains(said, "open ("+beside.IP) || !strings.Contains(said, "s1 ("+site.Host()) {
			return fmt.Errorf("%s, %w", out, err)
		}
		return nil
	})
	if err := c.NodeReady(0, "hidden"); err != nil {
		t.Error(err)
	}
	out, err := hidden.Command("net", "check", "--local")
	if err == nil || !strings.Contains(out, "no answer") || !strings.Contains(out, "behind a NAT") || strings.Contains(out, "is blocked") {
		t.Errorf("the hidden node's own view: %v, %s", err, out)
	}
}
