//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// internalIPs are the addresses that a node tells.
func internalIPs(c *cluster.Servers, node string) (out []string, err error) {
	text, err := c.Try(0, "get", "node/"+node, "-o", "json")
	if err != nil {
		return nil, err
	}
	var n corev1.Node
	if err := json.Unmarshal([]byte(text), &n); err != nil {
		return nil, fmt.Errorf("%w: %s", err, text)
	}
	for _, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			out = append(out, a.Address)
		}
	}
	return out, nil
}

// lineTo is a join line with the server's address written in another way.
func lineTo(c *cluster.Servers, address string) string {
	head, _, _ := strings.Cut(strings.TrimSpace(c.Run(0, "token", "create")), "@")
	return head + "@" + address
}

// TestJoinByIPv6: machines without IPv4 find out their addresses, and join by a
// line with brackets and without, and by a link-local address with the zone of
// their own card. Nobody tells an address that is the reader's own only.
func TestJoinByIPv6(t *testing.T) {
	site := cluster.NewSite(t)
	on := site.NewMachine()
	linkLocal := on.OnlyIPv6("11")
	c := cluster.NewServersApart(t, on)
	line := strings.TrimSpace(c.Run(0, "token", "create"))
	if !strings.HasSuffix(line, "@[fd31::11]:6443") {
		t.Fatalf("the line does not tell the server's address: %s", line)
	}
	for i, way := range []struct {
		name, line, last string
	}{
		{"as it is", line, "21"},
		{"without brackets and port", lineTo(c, "fd31::11"), "22"},
		{"with brackets, without port", lineTo(c, "[fd31::11]"), "23"},
		{"link-local with its zone", lineTo(c, "["+linkLocal+"%eth0]:6443"), "24"},
		{"link-local without brackets and port", lineTo(c, linkLocal+"%eth0"), "25"},
		{"from a machine that has a link-local address only", lineTo(c, "["+linkLocal+"%eth0]:6443"), ""},
	} {
		m := site.NewMachine()
		own := m.OnlyIPv6(way.last)
		want := m.IP
		if want == "" {
			want = own
		}
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), m)
		a.Start("--join", way.line)
		c.Eventually(time.Minute, way.name+": Ready", func() error { return c.NodeReady(0, a.Name) })
		if got, err := internalIPs(c, a.Name); err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("%s: its address is %v, %v; want %s", way.name, got, err, want)
		}
		if said := "address=" + want; !strings.Contains(a.Log(), said) {
			t.Errorf("%s: the choice is not printed (%s): %s", way.name, said, a.Log())
		}
	}
}

// TestAddressOfTwoCards: a machine has two cards, and the way elsewhere leads by
// the one that does not reach the server. It tells the address of the other.
func TestAddressOfTwoCards(t *testing.T) {
	site := cluster.NewSite(t)
	c := cluster.NewServersOn(t, 1, site.Host())
	m := site.NewMachine()
	wrong := m.SecondNIC()
	a := cluster.NewAgent(t, "n1", m)
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	for _, what := range []string{"joined", "started again"} {
		c.Eventually(time.Minute, what+": Ready", func() error { return c.NodeReady(0, "n1") })
		c.Eventually(time.Minute, what+": its address", func() error {
			got, err := internalIPs(c, "n1")
			if err != nil || len(got) != 1 || got[0] != m.IP {
				return fmt.Errorf("%v, %w; want %s and not %s", got, err, m.IP, wrong)
			}
			return nil
		})
		a.Stop(syscall.SIGTERM)
		a.Start()
	}
}

// TestAServerThatOnlyItsMachineReaches says so with the join line.
func TestAServerThatOnlyItsMachineReaches(t *testing.T) {
	c := cluster.NewServers(t, 1)
	out, err := exec.Command(cluster.Binary(t), "token", "create", "--kubeconfig", c.Kubeconfig(0)).CombinedOutput()
	if strings.Count(string(out), "Warning: this server tells nodes the address "+c.List[0].Address+", which other machines cannot reach") != 1 {
		t.Errorf("%s, %v", out, err)
	}
}
