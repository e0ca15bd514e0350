package proxy

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/node/balance"
	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

// A UDP node port is open on all of the node's addresses, and answers from the
// one that was asked.
func TestUDPNodePortAnswersFromWhereItWasAsked(t *testing.T) {
	port := unused.Port(t).Port()
	direct(t, &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "UDP", Port: 80, NodePort: port}}}, udpServerFor(t, "a"))
	// Where the kernel has no IPv6.
	e4 := direct(t, &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "UDP", Port: 80}}}, udpServerFor(t, "a"))
	lc := net.ListenConfig{Control: place{where: host, protocol: "udp", addr: netip.AddrPortFrom(netip.IPv6Unspecified(), 0)}.control}
	four, err := lc.ListenPacket(t.Context(), "udp4", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = four.Close() }()
	s4 := &udpServer{e: e4, t: e4.pool.Targets[balance.TargetKey{Service: "d/s", Port: "p", Protocol: "UDP"}], conn: four.(*net.UDPConn), flows: map[flowKey]*udpFlow{}}
	go s4.run()
	asksUDP(t, "udp4", uint16(four.LocalAddr().(*net.UDPAddr).Port), "127.0.0.1", "127.0.0.2")
	asksUDP(t, "udp4", port, "127.0.0.1", "127.0.0.2", "127.1.2.3")
	asksUDP(t, "udp6", port, "::1")
}

// asksUDP is one client that asks at several addresses.
func asksUDP(t *testing.T, network string, port uint16, addrs ...string) {
	t.Helper()
	c, err := net.ListenUDP(network, nil)
	if err != nil {
		t.Logf("SKIPPED: %s: %v", network, err)
		return
	}
	defer func() { _ = c.Close() }()
	for _, a := range addrs {
		to := netip.AddrPortFrom(netip.MustParseAddr(a), port)
		if _, err := c.WriteToUDPAddrPort([]byte(a), to); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		b := make([]byte, 64)
		n, from, err := c.ReadFromUDPAddrPort(b)
		if err != nil || netip.AddrPortFrom(from.Addr().Unmap(), from.Port()) != to || string(b[:n]) != "a "+a {
			t.Fatal(fmt.Sprintf("asked %s, %q from %s", to, b[:n], from), err)
		}
	}
}
