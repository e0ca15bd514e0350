package balance

import (
	"cmp"
	"net"
	"net/netip"
	"slices"

	"github.com/dunlin-project/dunlin/wire"
)

// TargetKey names one port of a Service.
type TargetKey struct{ Service, Port, Protocol string }

// Pool is the service table with the targets and backends that follow from
// it. Its owner guards it.
type Pool struct {
	Tables  *Tables
	Targets map[TargetKey]*Target

	backends map[netip.AddrPort]*Backend
	users    map[string][]TargetKey // service: its targets
}

// NewPool makes an empty one.
func NewPool() *Pool {
	return &Pool{Tables: newTables(), Targets: map[TargetKey]*Target{}, backends: map[netip.AddrPort]*Backend{}, users: map[string][]TargetKey{}}
}

// Retain drops what a full feed did not name: items that went while the agent
// was away. It returns the Services that changed.
func (p *Pool) Retain(keys map[string]bool) (changed []string) {
	for name := range p.Tables.Services {
		if !keys[wire.ItemService+name] {
			changed = append(changed, p.Tables.Remove(wire.ItemService+name))
		}
	}
	for slice := range p.Tables.owner {
		if !keys[wire.ItemSlice+slice] {
			changed = append(changed, p.Tables.Remove(wire.ItemSlice+slice))
		}
	}
	for name := range p.Tables.Nodes {
		if !keys[wire.ItemNodeInfo+name] {
			p.Tables.removeNode(name)
		}
	}
	return changed
}

// Rebuild computes the targets of a Service anew, as node, in zone, sees them.
func (p *Pool) Rebuild(name, node, zone string) {
	svc := p.Tables.Services[name]
	old := p.users[name]
	delete(p.users, name)
	if svc != nil {
		for i := range svc.Ports {
			port := &svc.Ports[i]
			k := TargetKey{name, port.Name, port.Protocol}
			t := p.Targets[k]
			if t == nil {
				t = new(Target)
				p.Targets[k] = t
			}
			t.set(svc, p.choices(name, port, node, zone))
			p.users[name] = append(p.users[name], k)
		}
	}
	for _, k := range old {
		if !slices.Contains(p.users[name], k) {
			delete(p.Targets, k)
		}
	}
}

// choices are the endpoints of one port.
func (p *Pool) choices(name string, port *wire.ServicePort, node, zone string) []choice {
	var out []choice
	seen := map[netip.AddrPort]bool{}
	preferred, six := p.preferred(name, port)
	for _, sl := range p.Tables.Slices[name] {
		number := numberOf(sl, port)
		if number == 0 {
			continue
		}
		for i := range sl.Endpoints {
			ep := &sl.Endpoints[i]
			ip, ok := netip.AddrFromSlice(ep.Address)
			if !ok || seen[netip.AddrPortFrom(ip, number)] {
				continue
			}
			if ip.Is6() != six && preferred[ep.Pod] {
				continue
			}
			a := netip.AddrPortFrom(ip, number)
			seen[a] = true
			b := p.backends[a]
			if b == nil {
				b = &Backend{Addr: a, conns: map[*Flow]struct{}{}}
				p.backends[a] = b
			}
			out = append(out, choice{b: b, tier: tierOf(ep, node, zone), weight: float64(cmp.Or(ep.Weight, wire.DefaultWeight)), state: ep.State,
				outside: ep.Pod == "", silent: ep.Node != node && p.Tables.silent[ep.Node]})
		}
	}
	slices.SortFunc(out, func(a, b choice) int { return a.b.Addr.Compare(b.b.Addr) })
	return out
}

// numberOf is the port of a slice's endpoints, 0 if they have none of that name.
func numberOf(sl *wire.Slice, port *wire.ServicePort) (number uint16) {
	for i := range sl.Ports {
		if sl.Ports[i].Name == port.Name && sl.Ports[i].Protocol == port.Protocol {
			number = sl.Ports[i].Port
		}
	}
	return number
}

// preferred are the pods that have an endpoint of the cluster's first family
// (six: that is IPv6), where a Service has endpoints of both. Either address
// of the Service leads to those alone: a pod counts once, and a node that lacks
// an address of the other family costs nobody a wait.
func (p *Pool) preferred(name string, port *wire.ServicePort) (pods map[string]bool, six bool) {
	if c := p.Tables.Network.ServiceCIDRs; len(c) > 0 {
		if r, err := netip.ParsePrefix(c[0]); err == nil {
			six = r.Addr().Is6()
		}
	}
	both := [2]bool{}
	for _, sl := range p.Tables.Slices[name] {
		if len(sl.Endpoints) > 0 && numberOf(sl, port) != 0 {
			both[len(sl.Endpoints[0].Address)/net.IPv6len] = true // a slice is of one family
		}
	}
	if !both[0] || !both[1] {
		return nil, six
	}
	pods = map[string]bool{}
	for _, sl := range p.Tables.Slices[name] {
		if numberOf(sl, port) == 0 {
			continue
		}
		for i := range sl.Endpoints {
			if ep := &sl.Endpoints[i]; ep.Pod != "" && (len(ep.Address) == net.IPv6len) == six {
				pods[ep.Pod] = true
			}
		}
	}
	return pods, six
}

func tierOf(ep *wire.Endpoint, node, zone string) tier {
	switch {
	case ep.Node != "" && ep.Node == node:
		return sameNode
	case ep.Zone == zone || (ep.Zone == "" && zone == "default"):
		return sameZone
	}
	return elsewhere
}

// Sweep finds the backends that drain and those that are passed over, and
// forgets those that nobody uses.
func (p *Pool) Sweep() (draining bool) {
	live, ready, wanted := map[*Backend]bool{}, map[*Backend]bool{}, map[*Backend]bool{}
	for _, t := range p.Targets {
		t.mu.Lock()
		chosen := t.wanted()
		for i := range t.choices {
			c := &t.choices[i]
			if c.loop {
				continue
			}
			wanted[c.b] = wanted[c.b] || chosen(c)
			live[c.b] = live[c.b] || c.state&wire.EndpointTerminating == 0
			ready[c.b] = ready[c.b] || c.state&wire.EndpointReady != 0
		}
		t.mu.Unlock()
	}
	for a, b := range p.backends {
		stays, named := live[b]
		b.mu.Lock()
		draining = draining || (!b.draining && !stays)
		b.draining, b.ready, b.passed = !stays, ready[b], !wanted[b]
		unused := len(b.conns) == 0
		b.mu.Unlock()
		if !named && unused {
			delete(p.backends, a)
		}
	}
	return draining
}

// Backends lists them all.
func (p *Pool) Backends() []*Backend {
	list := make([]*Backend, 0, len(p.backends))
	for _, b := range p.backends {
		list = append(list, b)
	}
	return list
}

// Here counts the ready endpoints of this node.
func (t *Target) Here() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.choices {
		if c.tier == sameNode && c.state&wire.EndpointReady != 0 {
			n++
		}
	}
	return n
}
