package balance

import (
	"net/netip"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// Weights come from the service table; those that nobody said are equal. An
// endpoint that could not be reached for a while gets its share again, and not
// what it missed.
func TestWeightsOfThePool(t *testing.T) {
	p := NewPool()
	put := func(key string, v any) {
		t.Helper()
		b, err := wire.EncodeItem(v)
		if err == nil {
			_, err = p.Tables.Put(key, b)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	put(wire.ItemService+"d/s", &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80}}})
	big, small := netip.MustParseAddr("10.42.1.1"), netip.MustParseAddr("10.42.1.2")
	weigh := func(weight uint16) *Target {
		t.Helper()
		put(wire.ItemSlice+"d/s-1", &wire.Slice{Service: "s", Ports: []wire.SlicePort{{Name: "p", Protocol: "TCP", Port: 8080}}, Endpoints: []wire.Endpoint{
			{Address: big.AsSlice(), State: readyState, Node: "me", Pod: "big"},
			{Address: small.AsSlice(), State: readyState, Node: "far", Pod: "small", Weight: weight}}})
		p.Rebuild("d/s", "me", "default")
		return p.Targets[TargetKey{"d/s", "p", "TCP"}]
	}
	picked := func(tg *Target, n int) (of int) {
		for range n {
			if tg.Pick(netip.MustParseAddr("192.0.2.77"), false, nil).Addr.Addr() == small {
				of++
			}
		}
		return of
	}
	if n := picked(weigh(0), 100); n != 0 { // nearer ones first, while they have nothing to do
		t.Errorf("without weights the far one gets %d of 100", n)
	}
	if n := picked(weigh(wire.DefaultWeight), 100); n != 0 {
		t.Errorf("with the weight that all have the far one gets %d of 100", n)
	}
	tg := weigh(11)
	if n := picked(tg, 111); n < 11 || n > 12 {
		t.Errorf("11 to 100: %d of 111", n)
	}
	b := p.backends[netip.AddrPortFrom(small, 8080)]
	b.until.Store(time.Now().Add(time.Hour).UnixNano())
	if n := picked(tg, 1000); n != 0 {
		t.Errorf("%d connections to one that cannot be reached", n)
	}
	b.until.Store(0)
	if n := picked(tg, 111); n < 11 || n > 12 {
		t.Errorf("back after a while: %d of 111", n)
	}
}
