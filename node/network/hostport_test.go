package network

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
)

// TestTakenHostPort: a pod whose host port another process has waits, and takes
// nothing from it; once it is free the pod gets it, and keeps it.
func TestTakenHostPort(t *testing.T) {
	if err := Usable(); err != nil {
		t.Skipf("SKIPPED: no network namespaces here: %v", err)
	}
	n, err := NewNamespaced(fmt.Sprintf("dlh%d", os.Getpid()%100000), []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Destroy(); err != nil {
			t.Error(err)
		}
	})
	if err := n.SetCIDRs([]string{"10.242.12.0/24", "fd42:12::/64"}); err != nil {
		t.Fatal(err)
	}
	const port = 32082
	loopback := netip.MustParseAddr("127.0.0.1")
	for what, x := range map[string]struct {
		take func() (io.Closer, error)
		p    HostPort
		says string
	}{
		"TCP":         {func() (io.Closer, error) { return net.Listen("tcp", fmt.Sprint(":", port)) }, HostPort{Protocol: "TCP"}, "hostPort: port :32082/TCP is in use by another process on this node"},
		"an address":  {func() (io.Closer, error) { return net.Listen("tcp", fmt.Sprint("127.0.0.1:", port)) }, HostPort{Protocol: "TCP"}, "(ss -lntp sport = :32082)"},
		"its address": {func() (io.Closer, error) { return net.Listen("tcp", fmt.Sprint("127.0.0.1:", port)) }, HostPort{Protocol: "TCP", IP: loopback}, "port 127.0.0.1:32082/TCP"},
		"IPv6":        {func() (io.Closer, error) { return net.Listen("tcp6", fmt.Sprintf("[::1]:%d", port)) }, HostPort{Protocol: "TCP"}, "port :32082/TCP"},
		"IPv6's":      {func() (io.Closer, error) { return net.Listen("tcp6", fmt.Sprintf("[::1]:%d", port)) }, HostPort{Protocol: "TCP", IP: netip.IPv6Loopback()}, "port [::1]:32082/TCP"},
		"UDP":         {func() (io.Closer, error) { return net.ListenPacket("udp", fmt.Sprint(":", port)) }, HostPort{Protocol: "UDP"}, "(ss -lnup sport = :32082)"},
	} {
		x.p.Host, x.p.Container = port, 80
		pod := Pod{UID: "waits " + what, Ports: []HostPort{x.p}}
		l, err := x.take()
		if err != nil {
			t.Fatal(err)
		}
		_, err = n.SetupNamespace(t.Context(), pod, nil)
		if in := (*PortInUseError)(nil); !errors.As(err, &in) || !strings.Contains(err.Error(), x.says) {
			t.Fatalf("%s: %v", what, err)
		}
		if n.published(pod.UID) {
			t.Errorf("%s: the port was taken away from its process", what)
		}
		_ = l.Close()
		a, err := n.SetupNamespace(t.Context(), pod, nil)
		if err != nil {
			t.Fatalf("%s: it is free: %v", what, err)
		}
		// Who comes later takes it from nobody, and is in nobody's way.
		if l, err = x.take(); err != nil {
			t.Fatal(err)
		}
		if _, err := n.SetupNamespace(t.Context(), pod, &a); err != nil {
			t.Errorf("%s: a second set-up: %v", what, err)
		}
		_ = l.Close()
		if err := n.Teardown(t.Context(), pod.UID); err != nil {
			t.Fatal(err)
		}
		if n.published(pod.UID) {
			t.Errorf("%s: rules are left", what)
		}
	}
}
