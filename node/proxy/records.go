package proxy

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/dunlin-project/dunlin/node/dns"
	"github.com/dunlin-project/dunlin/wire"
)

// records are the service table as DNS wants it.
type records engine

// Service implements dns.Records.
func (r *records) Service(namespace, name string) *dns.Service {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.service(namespace + "/" + name)
}

func (r *records) service(key string) *dns.Service {
	svc := r.pool.Tables.Services[key]
	if svc == nil {
		return nil
	}
	out := &dns.Service{External: svc.ExternalName}
	for _, ip := range svc.ClusterIPs {
		if a, err := netip.ParseAddr(ip); err == nil {
			out.ClusterIPs = append(out.ClusterIPs, a)
		}
	}
	for _, p := range svc.Ports {
		out.Ports = append(out.Ports, dns.Port{Name: p.Name, Protocol: strings.ToLower(p.Protocol), Port: p.Port})
	}
	if len(out.ClusterIPs) > 0 || out.External != "" {
		return out
	}
	byAddr := map[netip.Addr]int{}
	for _, sl := range r.pool.Tables.Slices[key] {
		var ports []dns.Port
		for _, p := range sl.Ports {
			ports = append(ports, dns.Port{Name: p.Name, Protocol: strings.ToLower(p.Protocol), Port: p.Port})
		}
		for i := range sl.Endpoints {
			e := &sl.Endpoints[i]
			a, ok := netip.AddrFromSlice(e.Address)
			if !ok || (e.State&wire.EndpointReady == 0 && !svc.NotReady) {
				continue
			}
			if at, ok := byAddr[a]; ok {
				out.Endpoints[at].Ports = append(out.Endpoints[at].Ports, ports...)
				continue
			}
			byAddr[a] = len(out.Endpoints)
			out.Endpoints = append(out.Endpoints, dns.Endpoint{Addr: a, Hostname: e.Hostname, Ports: slices.Clone(ports)})
		}
	}
	slices.SortFunc(out.Endpoints, func(a, b dns.Endpoint) int { return a.Addr.Compare(b.Addr) })
	return out
}

// HasNamespace implements dns.Records.
func (r *records) HasNamespace(namespace string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key := range r.pool.Tables.Services {
		if strings.HasPrefix(key, namespace+"/") {
			return true
		}
	}
	return false
}

// Names implements dns.Records. The index is made when it is first asked for
// after a change: few ask.
func (r *records) Names(a netip.Addr) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.names == nil {
		r.names = map[netip.Addr][]string{}
		for key := range r.pool.Tables.Services {
			namespace, name, _ := strings.Cut(key, "/")
			base := name + "." + namespace + ".svc"
			svc := r.service(key)
			for _, ip := range svc.ClusterIPs {
				r.names[ip] = append(r.names[ip], base)
			}
			for i := range svc.Endpoints {
				e := &svc.Endpoints[i]
				r.names[e.Addr] = append(r.names[e.Addr], e.Label()+"."+base)
			}
		}
		for _, l := range r.names {
			slices.SortFunc(l, cmp.Compare[string])
		}
	}
	return r.names[a]
}

// Own implements dns.Records.
func (r *records) Own(a netip.Addr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.pool.Tables.Network.ServiceCIDRs {
		if p, err := netip.ParsePrefix(c); err == nil && p.Contains(a) {
			return true
		}
	}
	return false
}
