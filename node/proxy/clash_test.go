package proxy

import (
	"net/netip"
	"testing"

	"github.com/dunlin-project/dunlin/node/companion"
	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

// Of Services that want the same address and port one has it, and stays; the
// others are told which. A port that this process itself holds is no foreign
// process's.
func TestServicesThatWantTheSamePort(t *testing.T) {
	node, port := unused.Port(t).Port(), unused.Port(t).Port()
	backend := backendServer(t, "a")
	e := direct(t, &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80, NodePort: node}}}, backend)
	here := netip.MustParseAddr("127.0.0.1")
	e.cfg.NodeIPs = []netip.Addr{here}
	put := func(name string, ports ...uint16) {
		t.Helper()
		svc := &wire.Service{ExternalIPs: []string{here.String()}}
		sl := &wire.Slice{Service: name, Endpoints: []wire.Endpoint{{Address: backend.Addr().AsSlice(), State: readyState, Node: "n"}}}
		for i, p := range ports {
			n := string(rune('p' + i))
			svc.Ports = append(svc.Ports, wire.ServicePort{Name: n, Protocol: "TCP", Port: p})
			sl.Ports = append(sl.Ports, wire.SlicePort{Name: n, Protocol: "TCP", Port: backend.Port()})
		}
		var items []wire.ServiceItem
		for key, v := range map[string]any{wire.ItemService + "d/" + name: svc, wire.ItemSlice + "d/" + name: sl} {
			b, err := wire.EncodeItem(v)
			if err != nil {
				t.Fatal(err)
			}
			items = append(items, wire.ServiceItem{Key: key, Data: b})
		}
		e.Apply(items, nil, true)
	}
	put("m", port)
	put("z", port, node)
	put("a", port) // the first by name, but too late
	told := map[Unserved]bool{}
	for _, u := range e.Status(companion.Head{}).(*Status).Unserved {
		told[u] = true
	}
	for _, want := range []Unserved{
		{"d/z", KindExternal, "TCP", netip.AddrPortFrom(here, port), WhyService, "Service d/m has it as " + KindExternal},
		{"d/a", KindExternal, "TCP", netip.AddrPortFrom(here, port), WhyService, "Service d/m has it as " + KindExternal},
		{"d/z", KindExternal, "TCP", netip.AddrPortFrom(here, node), WhyService, "Service d/s has it as " + KindNodePort},
	} {
		if !told[want] {
			t.Errorf("nobody is told of %+v", want)
		}
	}
	if len(told) != 3 {
		t.Errorf("%+v", told)
	}
}
