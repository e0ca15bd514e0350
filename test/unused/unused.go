// Package unused finds ports for tests that must know one before anybody
// listens on it.
package unused

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
)

// Port is an address of this host on which nobody listens. It is below the
// range that the kernel takes ports from for those who ask for any (32768 on,
// ip_local_port_range), and outside what the proxy chooses without root: else
// the next listener or connection of the same test might get it.
func Port(t testing.TB) netip.AddrPort {
	t.Helper()
	var last error
	for range 100 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10000+rand.IntN(10000)))
		if err != nil {
			last = err
			continue
		}
		defer func() { _ = l.Close() }()
		return netip.MustParseAddrPort(l.Addr().String())
	}
	t.Fatal("no unused port:", last)
	return netip.AddrPort{}
}
