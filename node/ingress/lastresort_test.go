package ingress

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/dunlin-project/dunlin/wire"
)

// Requests go to an endpoint on a node that is not heard of, or to one that
// terminates, when there is no other; the one that terminates comes first.
func TestLastResorts(t *testing.T) {
	w := newWorld(t)
	end := func(i int, name, node string, state uint8) {
		a := netip.MustParseAddrPort(backend(t, says(name)))
		w.item(fmt.Sprintf("%sd/s-%d", wire.ItemSlice, i), &wire.Slice{Service: "s", Ports: []wire.SlicePort{{Name: "p", Protocol: "TCP", Port: a.Port()}},
			Endpoints: []wire.Endpoint{{Address: a.Addr().AsSlice(), State: state, Node: node}}})
	}
	w.item(wire.ItemService+"d/s", &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80}}})
	w.rule("a", "a.example", "/", "s")
	end(0, "away", "away", wire.EndpointReady|wire.EndpointServing)
	w.publish()
	c := w.client()
	w.expect(c, "http://a.example/", 200, "away")
	only := func(name string) {
		t.Helper()
		w.publish()
		w.expect(c, "http://a.example/", 200, name)
		for range 20 {
			if status, b, err := get(c, "http://a.example/"); err != nil || status != 200 || b != name {
				t.Fatalf("%d %q, %v, want %q", status, b, err, name)
			}
		}
	}
	w.item(wire.ItemNodeInfo+"away", &wire.NodeInfo{Silent: true})
	only("away")
	end(1, "ends", "n", wire.EndpointServing|wire.EndpointTerminating)
	only("ends")
	end(2, "ready", "n", wire.EndpointReady|wire.EndpointServing)
	only("ready")
	end(2, "unready", "n", 0)
	only("ends")
	end(1, "ended", "n", 0)
	only("away")
}
