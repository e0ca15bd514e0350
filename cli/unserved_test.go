package cli

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/node/proxy"
)

// A port that cannot be served is told once, not for a moment's sake, and taken
// back when it is served.
func TestUnservedPortsAreToldOnce(t *testing.T) {
	taken := proxy.Unserved{Service: "shop/web", Kind: proxy.KindNodePort, Protocol: "TCP", Why: proxy.WhyTaken,
		Addr: netip.MustParseAddrPort("[::]:30080"), Error: "address already in use"}
	low := proxy.Unserved{Service: "shop/web", Kind: proxy.KindExternal, Protocol: "UDP", Why: proxy.WhyDenied,
		Addr: netip.MustParseAddrPort("192.0.2.1:53"), Error: "permission denied"}
	if s := unservedText("n1", &proxy.Unserved{Kind: proxy.KindExternal, Protocol: "TCP", Why: proxy.WhyReserved, Addr: netip.MustParseAddrPort("192.0.2.1:6443"), Error: "it is a port of dunlin's own, of the servers or of gossip"}); !strings.HasSuffix(s, "of gossip; give the Service another spec.ports[].port, or another node the label dunlin.dev/loadbalancer=true") {
		t.Error(s)
	}
	if got := reservedPorts([]string{"10.0.0.1:6443", "[fd00::1]:6443", "h:7000", "x"}, 7946); !slices.Equal(got, []uint16{6443, 7000, 7946}) {
		t.Error(got)
	}
	var told []string
	var now *proxy.Status
	u := &unserved{node: "n1", tell: func(service, reason, message string, over bool) {
		told = append(told, fmt.Sprint(service, " ", reason, " ", over, " ", message))
	}, ask: func() (*proxy.Status, error) {
		if now == nil {
			return nil, errors.New("no proxy")
		}
		return now, nil
	}}
	look := func(times int, list ...proxy.Unserved) (out []string) {
		now, told = &proxy.Status{Unserved: list}, nil
		for range times {
			u.look()
		}
		slices.Sort(told)
		return told
	}
	if got := look(1, taken); got != nil {
		t.Error("told of a moment", got)
	}
	if got := look(1); got != nil {
		t.Error("what was not told is over", got)
	}
	got := look(10, taken, low)
	if len(got) != 2 || !strings.HasPrefix(got[0], "shop/web PortNotServed false node n1 does not serve port 30080/TCP on all addresses (the Service's node port): address already in use; end the process") ||
		!strings.Contains(got[0], "ss -lntp sport = :30080") || !strings.Contains(got[0], "another spec.ports[].nodePort") ||
		!strings.Contains(got[1], "port 53/UDP on address 192.0.2.1") || !strings.Contains(got[1], "run the agent as root") {
		t.Fatal(strings.Join(got, "\n"))
	}
	message := strings.TrimPrefix(got[0], "shop/web PortNotServed false ")
	now, told = nil, nil
	u.look() // the proxy is being replaced: nothing is known
	if told != nil {
		t.Error(told)
	}
	if got := look(3, low); len(got) != 1 || got[0] != "shop/web PortNotServed true "+message {
		t.Error(got)
	}
	if got := look(3, taken, low); len(got) != 1 || !strings.Contains(got[0], "false") {
		t.Error("not told again", got)
	}
	loop := proxy.Unserved{Service: "shop/web", Kind: proxy.KindEndpoint, Protocol: "TCP", Why: proxy.WhyLoop,
		Addr: netip.MustParseAddrPort("192.0.2.1:30080"), Error: "it is an address of the Service itself"}
	look(9)
	if got := look(9, loop); len(got) != 1 || !strings.HasPrefix(got[0], "shop/web EndpointLoop false node n1 does not use endpoint 192.0.2.1:30080/TCP: it is an address of the Service itself; ") {
		t.Error(got)
	}
	if got := look(1); len(got) != 1 || !strings.HasPrefix(got[0], "shop/web EndpointLoop true node n1 does not use") {
		t.Error(got)
	}
}
