package cluster

import (
	"fmt"
	"os/exec"
)

// NewMachineBehindNAT adds a machine behind a router that hides it: it can
// reach the site, and nothing there can reach it.
func (s *Site) NewMachineBehindNAT() *Machine {
	s.t.Helper()
	list, _ := s.NewMachinesBehindNAT(1)
	return list[0]
}

// NewMachinesBehindNAT adds machines behind one router: the site sees them all
// at the router's address.
func (s *Site) NewMachinesBehindNAT(n int) (list []*Machine, router *Machine) {
	s.t.Helper()
	router = s.NewMachine()
	s.ip("-n", router.ns, "link", "add", "lan", "address", "02:00:c0:a8:4d:01", "type", "bridge")
	s.ip("-n", router.ns, "addr", "add", "192.168.77.1/24", "dev", "lan")
	s.ip("-n", router.ns, "link", "set", "lan", "up")
	for i := range n {
		s.n++
		m := &Machine{s: s, ns: fmt.Sprintf("%sm%d", s.bridge, s.n), veth: fmt.Sprintf("%sv%d", s.bridge, s.n), IP: fmt.Sprintf("192.168.77.%d", i+2)}
		s.ip("netns", "add", m.ns)
		s.t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", m.ns).Run() })
		port := fmt.Sprintf("lan%d", i)
		s.ip("-n", router.ns, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", m.ns)
		s.ip("-n", router.ns, "link", "set", port, "master", "lan", "up")
		s.ip("-n", m.ns, "addr", "add", m.IP+"/24", "dev", "eth0")
		s.ip("-n", m.ns, "link", "set", "eth0", "up")
		s.ip("-n", m.ns, "link", "set", "lo", "up")
		s.ip("-n", m.ns, "route", "add", "default", "via", "192.168.77.1")
		list = append(list, m)
	}
	router.nft(router.enter("sysctl", "-qw", "net.ipv4.ip_forward=1"), "")
	router.nft(router.enter("nft", "-f", "-"), `table ip dunlinnat {
	chain post { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
	chain forward { type filter hook forward priority 0; iifname "eth0" ct state new drop; }
}
`)
	return list, router
}

// Narrow makes a router's links, both ways, as narrow as IPv6 allows them to
// be, and nobody is told: the messages that would say so are lost, as behind
// many a firewall. What is larger vanishes.
func (m *Machine) Narrow() {
	m.s.t.Helper()
	for _, device := range []string{"eth0", "lan"} {
		m.s.ip("-n", m.ns, "link", "set", device, "mtu", "1280")
	}
	m.nft(m.enter("nft", "-f", "-"), `table ip dunlinnarrow {
	chain out { type filter hook output priority 0; icmp type destination-unreachable counter drop; }
}
`)
}
