package proxy

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

// Only who is in the ranges of a load balancer reaches its addresses; the
// Service's own address is not theirs to guard.
func TestLoadBalancerSources(t *testing.T) {
	for _, tc := range []struct {
		name    string
		sources []string
		in      bool
	}{
		{"everybody", nil, true},
		{"this network", []string{"10.0.0.0/8", "127.0.0.0/8"}, true},
		{"another one", []string{"10.0.0.0/8", "fd00::/8"}, false},
		{"damaged", []string{"x"}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, proto := range []string{"TCP", "UDP"} {
				w := newWorld(t)
				w.stop()
				w.nodeIPs = []netip.Addr{netip.MustParseAddr("127.0.0.1")}
				w.supervise()
				port := unused.Port(t).Port()
				ep := backendServer(t, "a")
				if proto == "UDP" {
					ep = udpServerFor(t, "a")
				}
				w.service(proto, func(s *wire.Service) {
					s.Ports[0].Port, s.ExternalIPs, s.Sources = port, []string{"127.0.0.1"}, tc.sources
				}, endpoint{addr: ep, state: readyState})
				w.address(map[string]string{"TCP": "tcp", "UDP": "udp"}[proto])
				at := netip.AddrPortFrom(w.nodeIPs[0], port).String()
				reach := func() bool {
					if proto == "TCP" {
						_, c, err := who(at)
						if err == nil {
							_ = c.Close()
						}
						return err == nil
					}
					c, err := net.Dial("udp", at)
					if err != nil {
						return false
					}
					defer func() { _ = c.Close() }()
					_ = c.SetDeadline(time.Now().Add(200 * time.Millisecond))
					_, _ = c.Write([]byte("x"))
					_, err = c.Read(make([]byte, 16))
					return err == nil
				}
				if tc.in {
					w.eventually(proto+": the address answers", func() error {
						if !reach() {
							return net.ErrClosed
						}
						return nil
					})
				}
				for range 3 {
					if got := reach(); got != tc.in {
						t.Errorf("%s: reached %v, want %v", proto, got, tc.in)
					}
				}
			}
		})
	}
}
