package proxy

import (
	"net/netip"
	"strings"
)

// claim has a Service get a place. Of two that want the same, the one that is
// served there keeps it, else the first by name has it; the other is told.
// e.mu is held.
func (e *engine) claim(out map[place]want, at place, w want) {
	has, taken := out[at]
	if !taken || has.service == w.service {
		out[at] = w
		return
	}
	now := ""
	if l := e.listeners[at]; l != nil {
		now = l.service
	}
	if w.service == now || (has.service != now && w.service < has.service) {
		has, w = w, has
	}
	out[at] = has
	e.lost = append(e.lost, lost{at, w})
}

// lost is a place that a Service does not get, since another one has it.
type lost struct {
	at place
	w  want
}

// clash is that a Service's place is another one's.
func clash(at place, w, has want) Unserved {
	return Unserved{Service: w.service, Kind: w.kind, Protocol: strings.ToUpper(at.protocol), Addr: at.addr, Why: WhyService,
		Error: "Service " + has.service + " has it as " + has.kind}
}

// inTheWay finds the Service for which this process itself has a port that is
// taken: on one address, or on all. e.mu is held.
func (e *engine) inTheWay(at place) (has want, ok bool) {
	on := func(a, b netip.Addr) bool { return a == b || a.IsUnspecified() || b.IsUnspecified() }
	for p, l := range e.listeners {
		if (p.where == host || p.where == health) && (at.where == host || at.where == health) && p.protocol == at.protocol &&
			p.addr.Port() == at.addr.Port() && on(p.addr.Addr(), at.addr.Addr()) && l.service != "" {
			return l.want, true
		}
	}
	return want{}, false
}
