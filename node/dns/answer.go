// Package dns answers the names of Services from the node's service table, as
// the Kubernetes DNS specification 1.1.0 says, and forwards all else.
//
// Owner and goroutines: those of miekg/dns, one a query. The answers of the
// cluster's own names are pure functions of Records; the cache of the
// forwarder is guarded by one mutex.
package dns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// ttl of the cluster's own names, in seconds: how long a client goes on with
// an endpoint that is gone.
const ttl = 5

// Records is what the names of the cluster are made of.
type Records interface {
	// Service finds one; nil if there is none.
	Service(namespace, name string) *Service
	// HasNamespace says whether any Service is there.
	HasNamespace(namespace string) bool
	// Names are the names of an address, without the cluster's domain.
	Names(a netip.Addr) []string
	// Own says whether the address is one of a Service's range.
	Own(a netip.Addr) bool
}

// Service is what there is to say of one.
type Service struct {
	ClusterIPs []netip.Addr // none: headless
	External   string
	Ports      []Port
	Endpoints  []Endpoint // of a headless Service, those to be published
}

// Port is a named port.
type Port struct {
	Name, Protocol string // Protocol in lower case
	Port           uint16
}

// Endpoint is one backend of a headless Service.
type Endpoint struct {
	Addr     netip.Addr
	Hostname string
	Ports    []Port
}

// Label is the first label of the endpoint's own name.
func (e *Endpoint) Label() string {
	if e.Hostname != "" {
		return strings.ToLower(e.Hostname)
	}
	return strings.NewReplacer(".", "-", ":", "-").Replace(e.Addr.String())
}

// answer is what is to be said to a question about a name of the cluster.
type answer struct {
	exists bool // the name; without records of the type that is no error
	rrs    []dns.RR
	extra  []dns.RR
	follow string // a name outside: its addresses are to be looked up and added
}

// inZone answers a question for name, which is fully qualified, in lower case
// and below domain ("cluster.local."). Pure.
func inZone(r Records, domain, name string, qtype uint16) answer {
	rest := strings.TrimSuffix(strings.TrimSuffix(name, domain), ".")
	if rest == "" {
		return answer{exists: true}
	}
	labels := strings.Split(rest, ".")
	last := labels[len(labels)-1]
	switch {
	case rest == "dns-version":
		return answer{exists: true, rrs: typed(qtype, &dns.TXT{Hdr: header(name, dns.TypeTXT), Txt: []string{"1.1.0"}})}
	case last == "svc":
		return inService(r, domain, name, labels[:len(labels)-1], qtype)
	case last == "pod" && len(labels) == 3:
		if a, ok := dashed(labels[0]); ok && r.HasNamespace(labels[1]) {
			return answer{exists: true, rrs: addresses(name, qtype, a)}
		}
	case last == "pod" && (len(labels) == 1 || (len(labels) == 2 && r.HasNamespace(labels[0]))):
		return answer{exists: true}
	}
	return answer{}
}

func inService(r Records, domain, name string, labels []string, qtype uint16) answer {
	switch len(labels) {
	case 0:
		return answer{exists: true}
	case 1:
		return answer{exists: r.HasNamespace(labels[0])}
	}
	namespace, service := labels[len(labels)-1], labels[len(labels)-2]
	svc := r.Service(namespace, service)
	if svc == nil {
		return answer{}
	}
	base := service + "." + namespace + ".svc." + domain
	front := labels[:len(labels)-2]
	if svc.External != "" {
		if len(front) > 0 {
			return answer{}
		}
		target := dns.Fqdn(svc.External)
		return answer{exists: true, follow: target,
			rrs: []dns.RR{&dns.CNAME{Hdr: header(name, dns.TypeCNAME), Target: target}}}
	}
	switch {
	case len(front) == 0:
		if len(svc.ClusterIPs) > 0 {
			return answer{exists: true, rrs: addresses(name, qtype, svc.ClusterIPs...)}
		}
		var all []netip.Addr
		for i := range svc.Endpoints {
			all = append(all, svc.Endpoints[i].Addr)
		}
		return answer{exists: len(all) > 0, rrs: addresses(name, qtype, all...)}
	case len(front) == 1 && strings.HasPrefix(front[0], "_"):
		return answer{exists: hasProtocol(svc, front[0][1:])}
	case len(front) == 1:
		var found []netip.Addr
		for i := range svc.Endpoints {
			if svc.Endpoints[i].Label() == front[0] {
				found = append(found, svc.Endpoints[i].Addr)
			}
		}
		return answer{exists: len(found) > 0, rrs: addresses(name, qtype, found...)}
	case len(front) == 2 && strings.HasPrefix(front[0], "_") && strings.HasPrefix(front[1], "_"):
		return srv(svc, name, base, front[0][1:], front[1][1:], qtype)
	}
	return answer{}
}

func hasProtocol(svc *Service, protocol string) bool {
	for _, p := range svc.Ports {
		if p.Protocol == protocol {
			return true
		}
	}
	return false
}

// srv answers _port._protocol names: the Service's own, or each endpoint's.
func srv(svc *Service, name, base, port, protocol string, qtype uint16) answer {
	var a answer
	add := func(target string, p Port, ip ...netip.Addr) {
		a.exists = true
		if qtype != dns.TypeSRV && qtype != dns.TypeANY {
			return
		}
		// A pod of two families is two endpoints of one name.
		if !slices.ContainsFunc(a.rrs, func(rr dns.RR) bool { s := rr.(*dns.SRV); return s.Target == target && s.Port == p.Port }) {
			a.rrs = append(a.rrs, &dns.SRV{Hdr: header(name, dns.TypeSRV), Weight: 100, Port: p.Port, Target: target})
		}
		a.extra = append(a.extra, addresses(target, dns.TypeANY, ip...)...)
	}
	if len(svc.ClusterIPs) > 0 {
		for _, p := range svc.Ports {
			if p.Name == port && p.Protocol == protocol {
				add(base, p, svc.ClusterIPs...)
			}
		}
		return a
	}
	for i := range svc.Endpoints {
		e := &svc.Endpoints[i]
		for _, p := range e.Ports {
			if p.Name == port && p.Protocol == protocol {
				add(e.Label()+"."+base, p, e.Addr)
			}
		}
	}
	return a
}

func header(name string, t uint16) dns.RR_Header {
	return dns.RR_Header{Name: name, Rrtype: t, Class: dns.ClassINET, Ttl: ttl}
}

func typed(qtype uint16, rr dns.RR) []dns.RR {
	if qtype == rr.Header().Rrtype || qtype == dns.TypeANY {
		return []dns.RR{rr}
	}
	return nil
}

func addresses(name string, qtype uint16, list ...netip.Addr) (out []dns.RR) {
	for _, a := range list {
		switch {
		case a.Is4() && (qtype == dns.TypeA || qtype == dns.TypeANY):
			out = append(out, &dns.A{Hdr: header(name, dns.TypeA), A: a.AsSlice()})
		case a.Is6() && (qtype == dns.TypeAAAA || qtype == dns.TypeANY):
			out = append(out, &dns.AAAA{Hdr: header(name, dns.TypeAAAA), AAAA: a.AsSlice()})
		}
	}
	return out
}

// dashed reads 10-42-0-7 or fd42--7.
func dashed(label string) (netip.Addr, bool) {
	if a, err := netip.ParseAddr(strings.ReplaceAll(label, "-", ".")); err == nil && a.Is4() {
		return a, true
	}
	a, err := netip.ParseAddr(strings.ReplaceAll(label, "-", ":"))
	return a, err == nil && a.Is6()
}

// reverse reads the address in a name below in-addr.arpa or ip6.arpa.
func reverse(name string) (netip.Addr, bool) {
	if s, ok := strings.CutSuffix(name, ".in-addr.arpa."); ok {
		l := strings.Split(s, ".")
		if len(l) != 4 {
			return netip.Addr{}, false
		}
		a, err := netip.ParseAddr(fmt.Sprintf("%s.%s.%s.%s", l[3], l[2], l[1], l[0]))
		return a, err == nil
	}
	s, ok := strings.CutSuffix(name, ".ip6.arpa.")
	l := strings.Split(s, ".")
	if !ok || len(l) != 32 {
		return netip.Addr{}, false
	}
	var b strings.Builder
	for i := 31; i >= 0; i-- {
		b.WriteString(l[i])
		if i%4 == 0 && i > 0 {
			b.WriteByte(':')
		}
	}
	a, err := netip.ParseAddr(b.String())
	return a, err == nil
}

// pointers answers a PTR question for an address of the cluster; known is
// false for one that is somebody else's.
func pointers(r Records, domain, name string, a netip.Addr, qtype uint16) (ans answer, known bool) {
	names := r.Names(a)
	if len(names) == 0 {
		return answer{}, r.Own(a)
	}
	ans.exists = true
	for _, n := range names {
		ans.rrs = append(ans.rrs, typed(qtype, &dns.PTR{Hdr: header(name, dns.TypePTR), Ptr: n + "." + domain})...)
	}
	return ans, true
}
