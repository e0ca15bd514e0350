package balance

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/dunlin-project/dunlin/wire"
)

// Endpoints that lead back to their Service are found and never chosen, on
// whichever node, and however many Services are in between; what leads to
// another Service, and through it to something else, is used.
func TestLoopsAreNotChosen(t *testing.T) {
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
	put(wire.ItemNodeInfo+"n1", &wire.NodeInfo{Addresses: []string{"192.0.2.1", "2001:db8::1"}})
	put(wire.ItemNodeInfo+"n2", &wire.NodeInfo{Addresses: []string{"192.0.2.2"}})
	service := func(name, ip string, nodePort uint16, ends ...string) {
		t.Helper()
		put(wire.ItemService+"d/"+name, &wire.Service{ClusterIPs: []string{ip}, ExternalIPs: []string{"198.51.100." + fmt.Sprint(nodePort%100)},
			Ports: []wire.ServicePort{{Protocol: "TCP", Port: 80, NodePort: nodePort}}})
		for i, e := range ends {
			a := netip.MustParseAddrPort(e)
			put(fmt.Sprint(wire.ItemSlice, "d/", name, "-", i), &wire.Slice{Service: name, Ports: []wire.SlicePort{{Protocol: "TCP", Port: a.Port()}},
				Endpoints: []wire.Endpoint{{Address: a.Addr().AsSlice(), State: readyState}}})
		}
		p.Rebuild("d/"+name, "n1", "default")
	}
	service("own", "10.43.0.1", 30001, "10.43.0.1:80", "192.0.2.1:30001", "192.0.2.2:30001", "[2001:db8::1]:30001", "198.51.100.1:80", "203.0.113.1:30001")
	service("a", "10.43.0.2", 30002, "10.43.0.3:80")
	service("b", "10.43.0.3", 30003, "192.0.2.2:30004")
	service("c", "10.43.0.4", 30004, "10.43.0.2:80", "203.0.113.4:80")
	service("into", "10.43.0.5", 30005, "10.43.0.1:80")       // what it leads to loops, and leads elsewhere too
	service("other", "10.43.0.6", 30006, "192.0.2.9:30006")   // no node's
	service("port", "10.43.0.7", 30007, "10.43.0.7:81")       // not what it serves
	service("through", "10.43.0.8", 30008, "192.0.2.1:30006") // another one's
	want := "[{{d/a  TCP} 10.43.0.3:80 d/b} {{d/b  TCP} 192.0.2.2:30004 d/c} {{d/c  TCP} 10.43.0.2:80 d/a}" +
		" {{d/own  TCP} 10.43.0.1:80 } {{d/own  TCP} 192.0.2.1:30001 } {{d/own  TCP} 192.0.2.2:30001 } {{d/own  TCP} 198.51.100.1:80 } {{d/own  TCP} [2001:db8::1]:30001 }]"
	if got := fmt.Sprint(p.FindLoops()); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	p.Sweep()
	for name, want := range map[string]string{"own": "203.0.113.1:30001", "a": "", "b": "", "c": "203.0.113.4:80", "into": "10.43.0.1:80",
		"other": "192.0.2.9:30006", "port": "10.43.0.7:81", "through": "192.0.2.1:30006"} {
		tg := p.Targets[TargetKey{"d/" + name, "", "TCP"}]
		for range 20 {
			got := ""
			if b := tg.Pick(netip.MustParseAddr("192.0.2.77"), false, nil); b != nil {
				got = b.Addr.String()
			}
			if got != want {
				t.Fatalf("%s leads to %q, want %q", name, got, want)
			}
		}
		if got := tg.Reachable(true); got != (want != "") {
			t.Errorf("%s is reachable: %v", name, got)
		}
	}
	// A node that goes, or a Service that changes, takes the loop away.
	p.Tables.Remove(wire.ItemNodeInfo + "n2")
	if got := fmt.Sprint(p.FindLoops()); got != "[{{d/own  TCP} 10.43.0.1:80 } {{d/own  TCP} 192.0.2.1:30001 } {{d/own  TCP} 198.51.100.1:80 } {{d/own  TCP} [2001:db8::1]:30001 }]" {
		t.Error(got)
	}
	if p.Targets[TargetKey{"d/a", "", "TCP"}].Pick(netip.Addr{}, false, nil) == nil {
		t.Error("the way is free, and not used")
	}
}
