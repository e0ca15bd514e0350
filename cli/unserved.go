package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/dunlin-project/dunlin/node/proxy"
)

const (
	// unservedLook is how often the proxy is asked what it cannot serve.
	unservedLook = 5 * time.Second
	// unservedTwice: what is so at two looks is told; a port changes hands in
	// less, from one pod, or one version of the proxy, to the next.
	unservedTwice = 2

	reasonUnserved = "PortNotServed"
	reasonLoop     = "EndpointLoop"
)

// unserved has people of a Service know when this node cannot serve a port of
// it, once; and takes that back when it can.
type unserved struct {
	node string
	ask  func() (*proxy.Status, error)
	tell func(service, reason, message string, over bool)

	seen map[proxy.Unserved]int
}

func (p *nodeProcess) unserved() *unserved {
	return &unserved{node: p.traffic.node, tell: p.agent.ServiceEvent,
		ask: func() (*proxy.Status, error) { return proxy.Ask(proxyDir(p.o.run)) }}
}

// run looks until ctx ends.
func (u *unserved) run(ctx context.Context) error {
	t := time.NewTicker(unservedLook)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
			u.look()
		}
	}
}

// look asks once. Without an answer nothing is known, and nothing changes.
func (u *unserved) look() {
	st, err := u.ask()
	if err != nil {
		return
	}
	now := make(map[proxy.Unserved]int, len(st.Unserved))
	for _, x := range st.Unserved {
		now[x] = min(u.seen[x]+1, unservedTwice)
		if now[x] == unservedTwice && u.seen[x] < unservedTwice {
			u.tell(x.Service, unservedReason(&x), unservedText(u.node, &x), false)
		}
	}
	for x, n := range u.seen {
		if now[x] == 0 && n == unservedTwice {
			u.tell(x.Service, unservedReason(&x), unservedText(u.node, &x), true)
		}
	}
	u.seen = now
}

func unservedReason(u *proxy.Unserved) string {
	if u.Why == proxy.WhyLoop {
		return reasonLoop
	}
	return reasonUnserved
}

// unservedText says where, why, and what to do. Pure.
func unservedText(node string, u *proxy.Unserved) string {
	if u.Why == proxy.WhyLoop {
		return fmt.Sprintf("node %s does not use endpoint %s/%s: %s; a connection there would go round and round: name the addresses of what shall answer in the EndpointSlices of this Service",
			node, u.Addr, u.Protocol, u.Error)
	}
	at, port := "address "+u.Addr.Addr().String(), u.Addr.Port()
	if u.Addr.Addr().IsUnspecified() {
		at = "all addresses"
	}
	text := fmt.Sprintf("node %s does not serve port %d/%s on %s (the Service's %s): %s", node, port, u.Protocol, at, u.Kind, u.Error)
	other := map[string]string{
		proxy.KindNodePort:   "give the Service another spec.ports[].nodePort",
		proxy.KindHealthPort: "give the Service another spec.healthCheckNodePort",
		proxy.KindExternal:   "give the Service another spec.ports[].port, or another node the label dunlin.dev/loadbalancer=true",
	}[u.Kind]
	flag := map[string]string{"TCP": "t", "UDP": "u"}[u.Protocol]
	switch {
	case u.Why == proxy.WhyReserved, u.Why == proxy.WhyService:
		return text + "; " + other
	case u.Why == proxy.WhyTaken && other != "":
		text += fmt.Sprintf("; end the process that has it (on %s: ss -ln%sp sport = :%d), or %s", node, flag, port, other)
	case u.Why == proxy.WhyDenied && other != "":
		text += "; run the agent as root, or " + other
	case u.Why == proxy.WhyTaken && port != 0:
		text += fmt.Sprintf("; end the process that has it (on %s: ss -ln%sp sport = :%d)", node, flag, port)
	default:
		text += "; the proxy's log on " + node + " says more (RUN-DIR/proxy/log)"
	}
	return text + "; it is tried again every 10 s"
}
