package balance

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/dunlin-project/dunlin/wire"
)

// A pod with addresses of both families counts once, by that of the cluster's
// first family; one that has only the other by that.
func TestAPodCountsOnce(t *testing.T) {
	end := func(pod, ip string) wire.Endpoint {
		return wire.Endpoint{Address: netip.MustParseAddr(ip).AsSlice(), State: readyState, Pod: pod}
	}
	four := []wire.Endpoint{end("a", "10.42.0.2"), end("b", "10.42.0.3"), end("", "192.0.2.1")}
	six := []wire.Endpoint{end("a", "fd42::2"), end("c", "fd42::4"), end("", "2001:db8::1")}
	for _, c := range []struct {
		first string
		lists [][]wire.Endpoint
		want  string
	}{
		{"10.43.0.0/16", [][]wire.Endpoint{four, six}, "[10.42.0.2 10.42.0.3 192.0.2.1 2001:db8::1 fd42::4]"},
		{"fd43::/112", [][]wire.Endpoint{four, six}, "[10.42.0.3 192.0.2.1 2001:db8::1 fd42::2 fd42::4]"},
		{"10.43.0.0/16", [][]wire.Endpoint{six}, "[2001:db8::1 fd42::2 fd42::4]"},
		{"10.43.0.0/16", [][]wire.Endpoint{six, nil}, "[2001:db8::1 fd42::2 fd42::4]"},
	} {
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
		put(wire.ItemNetwork, &wire.ClusterNetwork{ServiceCIDRs: []string{c.first}})
		put(wire.ItemService+"d/s", &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80}}})
		for i, l := range c.lists {
			put(fmt.Sprint(wire.ItemSlice, "d/s-", i), &wire.Slice{Service: "s", Ports: []wire.SlicePort{{Name: "p", Protocol: "TCP", Port: 8080}}, Endpoints: l})
		}
		p.Rebuild("d/s", "n", "default")
		var got []netip.Addr
		for _, x := range p.Targets[TargetKey{"d/s", "p", "TCP"}].choices {
			got = append(got, x.b.Addr.Addr())
		}
		slices.SortFunc(got, netip.Addr.Compare)
		if fmt.Sprint(got) != c.want {
			t.Errorf("%s: %v, want %s", c.first, got, c.want)
		}
	}
}
