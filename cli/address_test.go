package cli

import (
	"net/netip"
	"testing"
)

// TestAddressWithoutARoute: a switch and some boards are a network, too.
func TestAddressWithoutARoute(t *testing.T) {
	addrs := func(list ...string) (out []netip.Addr) {
		for _, s := range list {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	for _, c := range []struct {
		why  string
		list []nic
		want string
	}{
		{"nothing", nil, "127.0.0.1"},
		{"loopback and link-local only", []nic{{"lo", false, addrs("127.0.0.1", "::1")}, {"eth0", true, addrs("169.254.3.4", "fe80::1")}}, "127.0.0.1"},
		{"a device before a bridge", []nic{{"docker0", false, addrs("172.17.0.1")}, {"eth0", true, addrs("10.0.0.5")}}, "10.0.0.5"},
		{"a device with IPv6 before a bridge", []nic{{"docker0", false, addrs("172.17.0.1")}, {"eth0", true, addrs("fd00::5", "fe80::1")}}, "fd00::5"},
		{"IPv4 before IPv6", []nic{{"eth0", true, addrs("fd00::5", "10.0.0.5")}}, "10.0.0.5"},
		{"the first of two", []nic{{"eth0", true, addrs("10.0.0.5")}, {"wlan0", true, addrs("10.0.1.5")}}, "10.0.0.5"},
	} {
		if got := choose(c.list); got.String() != c.want {
			t.Errorf("%s: %s, want %s", c.why, got, c.want)
		}
	}
}
