package proxy

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/dunlin-project/dunlin/wire"
)

// Connections divide by the endpoints' weights, those that stay and those that
// end at once; weights that change count from the next connection on, and cut
// none.
func TestWeightsDivideConnections(t *testing.T) {
	w := newWorld(t)
	at := map[string]netip.AddrPort{"a": backendServer(t, "a"), "b": backendServer(t, "b")}
	weigh := func(a, b uint16) {
		t.Helper()
		for name, weight := range map[string]uint16{"a": a, "b": b} {
			w.put(wire.ItemSlice+"d/s-"+name, &wire.Slice{Service: "s", Ports: []wire.SlicePort{{Name: "p", Protocol: "TCP", Port: at[name].Port()}},
				Endpoints: []wire.Endpoint{{Address: at[name].Addr().AsSlice(), State: readyState, Node: "n", Weight: weight}}})
		}
	}
	w.service("TCP", nil)
	weigh(900, 0) // 0 is 100
	addr := w.address("tcp")
	open := func(n int64) {
		t.Helper()
		w.eventually(fmt.Sprint(n, " are open"), func() error {
			if st, err := Ask(w.dir); err != nil || st.Connections != n {
				return fmt.Errorf("%+v %w", st, err)
			}
			return nil
		})
	}
	alone := func() string {
		t.Helper()
		n, c, err := who(addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
		open(0)
		return n
	}
	for alone() != "b" { // until both are known
		continue
	}
	short := map[string]int{}
	for range 50 {
		short[alone()]++
	}
	if short["a"] < 44 || short["a"] > 46 {
		t.Errorf("nine to one, one after the other: %v", short)
	}
	hold := func() map[string]int {
		t.Helper()
		held := map[string]int{}
		for range 20 {
			n, c, err := who(addr)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			held[n]++
		}
		return held
	}
	if held := hold(); held["a"] != 18 {
		t.Errorf("nine to one, at once: %v", held)
	}
	weigh(1, 9)
	w.eventually("the other is preferred", func() error {
		if n := w.seen(addr); n["b"] != 9 {
			return fmt.Errorf("%v", n)
		}
		return nil
	})
	open(20)
	if held := hold(); held["b"] != 18 {
		t.Errorf("one to nine, at once: %v", held)
	}
	open(40)
}

// seen is who answers ten connections that end at once.
func (w *world) seen(addr string) map[string]int {
	w.t.Helper()
	out := map[string]int{}
	for range 10 {
		n, c, err := who(addr)
		if err != nil {
			w.t.Fatal(err)
		}
		out[n]++
		_ = c.Close()
	}
	return out
}
