package proxy

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

// A Service that leads to its own node port is not served, and told; beside
// another endpoint that one gets everything.
func TestALoopIsNotServed(t *testing.T) {
	w := newWorld(t)
	port := unused.Port(t)
	service := func(eps ...endpoint) {
		w.service("TCP", func(s *wire.Service) { s.Ports[0].NodePort = port.Port() }, eps...)
		w.put(wire.ItemNodeInfo+"n", &wire.NodeInfo{Addresses: []string{"127.0.0.1"}})
	}
	loop := endpoint{addr: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port.Port()), state: readyState}
	service(loop, endpoint{addr: backendServer(t, "a"), state: readyState})
	told := func(want int) func() error {
		return func() error {
			st, err := Ask(w.dir)
			if err != nil {
				return err
			}
			if len(st.Unserved) != want {
				return fmt.Errorf("%+v", st)
			}
			for _, u := range st.Unserved {
				if u.Service != "d/s" || u.Kind != KindEndpoint || u.Why != WhyLoop || u.Addr != loop.addr || u.Protocol != "TCP" || u.Error == "" {
					t.Fatalf("%+v", u)
				}
			}
			return nil
		}
	}
	w.eventually("the loop is told", told(1))
	for range 20 {
		n, c, err := who(port.String())
		if err != nil || n != "a" {
			t.Fatal(n, err)
		}
		_ = c.Close()
	}
	service(loop)
	w.eventually("nothing is served", func() error {
		_, c, err := who(port.String())
		if err == nil {
			_ = c.Close()
			return fmt.Errorf("answered")
		}
		if st, err := Ask(w.dir); err != nil || st.Listeners != 0 || len(st.Unserved) != 1 || st.Connections != 0 {
			return fmt.Errorf("%+v %w", st, err)
		}
		return nil
	})
	service(endpoint{addr: backendServer(t, "b"), state: readyState})
	w.eventually("it is over", told(0))
}
