package cluster

import (
	"fmt"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
)

// Lose drops percent of the packets that the machine receives and, apart
// from these, of those that it sends: each at the receiving end of the link,
// since a sender's kernel is told of what is dropped on its way out and
// repeats it at once.
func (m *Machine) Lose(percent int) {
	m.s.t.Helper()
	m.nft([]string{"nft", "-f", "-"}, m.lossRules(m.veth, percent))
	m.s.t.Cleanup(func() { _ = exec.Command("nft", "delete", "table", "netdev", m.lossTable()).Run() })
	m.nft(m.enter("nft", "-f", "-"), m.lossRules("eth0", percent))
}

func (m *Machine) lossTable() string { return "dunlinloss" + m.veth }

func (m *Machine) lossRules(device string, percent int) string {
	return fmt.Sprintf(`table netdev %s {
	chain in {
		type filter hook ingress device "%s" priority 0
		counter
		numgen random mod 100 < %d counter drop
	}
}
`, m.lossTable(), device, percent)
}

func (m *Machine) nft(args []string, input string) string {
	m.s.t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		m.s.t.Fatalf("nft: %v: %s", err, out)
	}
	return string(out)
}

var counted = regexp.MustCompile(`counter packets (\d+) bytes`)

// Lost says how many packets came since Lose, both ways, and how many of
// them were dropped.
func (m *Machine) Lost() (packets, dropped int) {
	m.s.t.Helper()
	list := []string{"nft", "list", "table", "netdev", m.lossTable()}
	for _, args := range [][]string{list, m.enter(list...)} {
		found := counted.FindAllStringSubmatch(m.nft(args, ""), -1)
		if len(found) != 2 {
			m.s.t.Fatalf("nft: %d counters, want 2", len(found))
		}
		p, _ := strconv.Atoi(found[0][1])
		d, _ := strconv.Atoi(found[1][1])
		packets, dropped = packets+p, dropped+d
	}
	return packets, dropped
}
