package balance

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/dunlin-project/dunlin/wire"
)

// Endpoints on nodes that are not heard of are used once there is nothing else,
// those of the node itself as ever; and a node that falls silent or comes back
// names the Services that it has endpoints of.
func TestSilentNodesComeLast(t *testing.T) {
	terminating := wire.EndpointServing | wire.EndpointTerminating
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
	slice := func(service string, eps ...wire.Endpoint) {
		put(wire.ItemService+"d/"+service, &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "UDP", Port: 53}}})
		put(wire.ItemSlice+"d/"+service+"-1", &wire.Slice{Service: service, Ports: []wire.SlicePort{{Name: "p", Protocol: "UDP", Port: 5353}}, Endpoints: eps})
	}
	end := func(ip, node string, state uint8) wire.Endpoint {
		return wire.Endpoint{Address: netip.MustParseAddr(ip).AsSlice(), Node: node, State: state, Pod: ip}
	}
	slice("both", end("10.42.1.1", "away", readyState), end("10.42.2.1", "far", readyState))
	slice("ends", end("10.42.1.2", "away", readyState), end("10.42.2.2", "far", terminating))
	slice("only", end("10.42.1.3", "away", readyState), end("10.42.2.3", "far", 0))
	slice("here", end("10.42.0.4", "me", readyState), end("10.42.2.4", "far", readyState))
	slice("none", end("10.42.1.5", "away", 0))
	silence := func(node string, silent bool) []string {
		put(wire.ItemNodeInfo+node, &wire.NodeInfo{Addresses: []string{"192.0.2.9"}, Silent: silent})
		turned := p.Tables.Turned()
		slices.Sort(turned)
		return turned
	}
	choices := func(service string) []string {
		p.Rebuild("d/"+service, "me", "default")
		tg := p.Targets[TargetKey{"d/" + service, "p", "UDP"}]
		used := map[string]bool{}
		for range 50 {
			if b := tg.Pick(netip.MustParseAddr("192.0.2.77"), false, nil); b != nil {
				used[b.Addr.Addr().String()] = true
			}
		}
		p.Sweep()
		var out []string
		for a, b := range p.backends {
			if used[a.Addr().String()] && b.Passed() {
				t.Errorf("%s: %s is chosen, and passed over", service, a)
			}
		}
		for a := range used {
			out = append(out, a)
		}
		slices.Sort(out)
		return out
	}
	check := func(when string, want map[string]string) {
		t.Helper()
		for service, w := range want {
			if got := fmt.Sprint(choices(service)); got != w {
				t.Errorf("%s, %s leads to %s, want %s", when, service, got, w)
			}
		}
	}
	usual := map[string]string{"both": "[10.42.1.1 10.42.2.1]", "ends": "[10.42.1.2]", "only": "[10.42.1.3]", "none": "[]"}
	check("at first", usual)
	if got := silence("me", true); fmt.Sprint(got) != "[d/here]" {
		t.Errorf("turned: %v", got)
	}
	check("with itself silent", map[string]string{"here": "[10.42.0.4]"})
	if got := silence("away", true); fmt.Sprint(got) != "[d/both d/ends d/none d/only]" {
		t.Errorf("turned: %v", got)
	}
	check("with a silent node", map[string]string{"both": "[10.42.2.1]", "ends": "[10.42.2.2]", "only": "[10.42.1.3]", "none": "[]"})
	if got := silence("away", true); got != nil {
		t.Errorf("told again, turned: %v", got)
	}
	silence("far", true)
	check("with all silent", map[string]string{"both": "[10.42.1.1 10.42.2.1]", "ends": "[10.42.1.2 10.42.2.2]", "here": "[10.42.0.4]"})
	p.Tables.Remove(wire.ItemNodeInfo + "far")
	if got := silence("away", false); fmt.Sprint(got) != "[d/both d/ends d/here d/none d/only]" {
		t.Errorf("turned: %v", got)
	}
	check("with all back", usual)
}
