package balance

import (
	"cmp"
	"net/netip"
	"slices"
)

// Loop is an endpoint that leads back to the Service that names it: a
// connection there would go round until nobody has descriptors any more.
type Loop struct {
	Target TargetKey
	Addr   netip.AddrPort
	Via    string // the Service that the address is of, if that is another one
}

// front is an address and port of a Service.
type front struct {
	protocol string
	addr     netip.AddrPort
}

// fronts are where Services are reached. An address that is invalid stands for
// those of all nodes.
func (t *Tables) fronts() map[front]TargetKey {
	out := map[front]TargetKey{}
	for name, svc := range t.Services {
		for i := range svc.Ports {
			p := &svc.Ports[i]
			k := TargetKey{name, p.Name, p.Protocol}
			for _, list := range [][]string{svc.ClusterIPs, svc.ExternalIPs} {
				for _, s := range list {
					if a, err := netip.ParseAddr(s); err == nil {
						out[front{p.Protocol, netip.AddrPortFrom(a.Unmap(), p.Port)}] = k
					}
				}
			}
			if p.NodePort != 0 {
				out[front{p.Protocol, netip.AddrPortFrom(netip.Addr{}, p.NodePort)}] = k
			}
		}
	}
	return out
}

// FindLoops marks the endpoints that lead back to their own Service, by an
// address of a Service or by a node port, at once or by way of other Services,
// so that none is chosen. Endpoints that are pods' lead to pods. What is in
// between and no Service's, such as a load balancer elsewhere, is not seen.
func (p *Pool) FindLoops() (out []Loop) {
	leads := map[TargetKey]map[netip.AddrPort]TargetKey{}
	var fronts map[front]TargetKey
	nodes := map[netip.Addr]bool{}
	for k, t := range p.Targets {
		for _, a := range t.outside() {
			if fronts == nil {
				fronts = p.Tables.fronts()
				for _, list := range p.Tables.Nodes {
					for _, n := range list {
						nodes[n] = true
					}
				}
			}
			to, ok := fronts[front{k.Protocol, a}]
			if !ok && nodes[a.Addr()] {
				to, ok = fronts[front{k.Protocol, netip.AddrPortFrom(netip.Addr{}, a.Port())}]
			}
			if !ok {
				continue
			}
			if leads[k] == nil {
				leads[k] = map[netip.AddrPort]TargetKey{}
			}
			leads[k][a] = to
		}
	}
	for k, list := range leads {
		for a, to := range list {
			if !reaches(leads, to, k, map[TargetKey]bool{}) {
				delete(list, a)
				continue
			}
			l := Loop{Target: k, Addr: a}
			if to.Service != k.Service {
				l.Via = to.Service
			}
			out = append(out, l)
		}
	}
	for k, t := range p.Targets {
		t.markLoops(leads[k])
	}
	slices.SortFunc(out, func(a, b Loop) int {
		return cmp.Or(cmp.Compare(a.Target.Service, b.Target.Service), cmp.Compare(a.Target.Port, b.Target.Port), a.Addr.Compare(b.Addr))
	})
	return out
}

// reaches says whether one leads to the other.
func reaches(leads map[TargetKey]map[netip.AddrPort]TargetKey, from, to TargetKey, seen map[TargetKey]bool) bool {
	if from == to {
		return true
	}
	if seen[from] {
		return false
	}
	seen[from] = true
	for _, next := range leads[from] {
		if reaches(leads, next, to, seen) {
			return true
		}
	}
	return false
}

// outside are the addresses of endpoints that are no pods'.
func (t *Target) outside() (out []netip.AddrPort) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.choices {
		if t.choices[i].outside {
			out = append(out, t.choices[i].b.Addr)
		}
	}
	return out
}

func (t *Target) markLoops(loops map[netip.AddrPort]TargetKey) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.choices {
		_, t.choices[i].loop = loops[t.choices[i].b.Addr]
	}
}
