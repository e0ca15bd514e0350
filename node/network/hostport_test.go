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
		// A pod that is deleted now leaves nothing: nobody knows of it.
		if links, err := n.podLinks(); err != nil || len(links) > 0 {
			t.Errorf("%s: %d links are left, %v", what, len(links), err)
		}
		if _, err := os.Stat("/run/netns/" + n.podNamespace(pod.UID)); err == nil {
			t.Errorf("%s: a namespace is left", what)
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

// TestRefusedSetUpKeepsWhatRuns: the record of a pod that runs was lost, and a
// set-up that fails takes nothing from it.
func TestRefusedSetUpKeepsWhatRuns(t *testing.T) {
	if err := Usable(); err != nil {
		t.Skipf("SKIPPED: no network namespaces here: %v", err)
	}
	n, err := NewNamespaced(fmt.Sprintf("dlk%d", os.Getpid()%100000), []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Destroy(); err != nil {
			t.Error(err)
		}
	})
	if err := n.SetCIDRs([]string{"10.242.16.0/24"}); err != nil {
		t.Fatal(err)
	}
	a, err := n.SetupNamespace(t.Context(), Pod{UID: "runs"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:32086")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if _, err := n.SetupNamespace(t.Context(), Pod{UID: "runs", Ports: []HostPort{{Host: 32086, Container: 80, Protocol: "TCP"}}}, nil); err == nil {
		t.Error("a taken port was given")
	}
	if _, err := os.Stat(a.Namespace); err != nil {
		t.Errorf("the namespace of the pod that runs: %v", err)
	}
}

// TestDestroyRemovesRoutes: those to other nodes' pods, too.
func TestDestroyRemovesRoutes(t *testing.T) {
	if err := Usable(); err != nil {
		t.Skipf("SKIPPED: no network namespaces here: %v", err)
	}
	n := onALink(t, "dlr", "198.18.250")
	to := netip.MustParsePrefix("10.242.15.0/24")
	if skipped, err := n.SetPeers([]Peer{{CIDR: to, Via: netip.MustParseAddr("198.18.250.2")}}, true); err != nil || len(skipped) > 0 {
		t.Fatal(skipped, err)
	}
	if len(routesOf(t, n)) == 0 {
		t.Fatal("no route was made")
	}
	if err := n.Destroy(); err != nil {
		t.Error(err)
	}
	if left := routesOf(t, n); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
