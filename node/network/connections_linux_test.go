package network

import (
	"net"
	"net/netip"
	"testing"
)

func TestParseEnd(t *testing.T) {
	for text, want := range map[string]string{
		"0100007F:1F90":                         "127.0.0.1:8080",
		"0500000A:0050":                         "10.0.0.5:80",
		"0000000000000000FFFF00000100007F:01BB": "127.0.0.1:443",
		"000042FD000000000000000005000000:0001": "[fd42::5]:1",
	} {
		if got, ok := parseEnd(text); !ok || got.String() != want {
			t.Errorf("%s is %s, %v, not %s", text, got, ok, want)
		}
	}
	for _, text := range []string{"", "0100007F", "0100007F:", "xx00007F:0001", "0100007:0001", "0100007F:1FFFF"} {
		if got, ok := parseEnd(text); ok {
			t.Errorf("%q is %s", text, got)
		}
	}
}

// What counts are connections that are open, to the pod's own ports.
func TestConnectionsAreCounted(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "::1"} {
		l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
		if err != nil {
			t.Logf("SKIPPED for %s: %v", host, err)
			continue
		}
		defer func() { _ = l.Close() }()
		real := int32(netip.MustParseAddrPort(l.Addr().String()).Port())
		a := Allocation{IP: netip.MustParseAddr(host), Ports: map[int32]int32{80: real}}
		expect := func(want int, ports ...int32) {
			t.Helper()
			if n, err := (&NodeAddress{}).Connections(a, ports); err != nil || n != want {
				t.Fatalf("%s: %d connections, want %d: %v", host, n, want, err)
			}
		}
		expect(0, 80)
		for want := 1; want <= 3; want++ {
			c, err := net.Dial("tcp", l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = c.Close() }()
			s, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			expect(want, 80)
		}
		expect(0, 81)
		expect(3, 81, 80)
	}
}
