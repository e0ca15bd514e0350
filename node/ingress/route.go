package ingress

import (
	"cmp"
	"net"
	"net/netip"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/dunlin-project/dunlin/node/balance"
	"github.com/dunlin-project/dunlin/wire"
)

// named is an Ingress with its namespace and name.
type named struct {
	namespace, name string
	*wire.Ingress
}

// older orders Ingresses: who is first keeps what two of them want.
func older(a, b named) int {
	return cmp.Or(cmp.Compare(a.Created, b.Created), cmp.Compare(a.namespace+"/"+a.name, b.namespace+"/"+b.name))
}

// route is where a request goes.
type route struct {
	target  *balance.Target // nil: it leads nowhere
	why     string          // and why
	h2c     bool
	timeout time.Duration // until the answer begins; 0 is none
}

// prefix is a route for paths that begin with whole elements of it.
type prefix struct {
	path string // without a slash at its end; "" is all
	to   *route
}

// site is what one host leads to.
type site struct {
	exact    map[string]*route
	prefixes []prefix // longest first
	fallback *route   // of the Ingress that had the host first
}

// router finds routes. It is immutable.
type router struct {
	hosts    map[string]*site // exact, and "*.x" for one label more than x
	fallback *route           // for what no rule matches
	secure   map[string]bool  // hosts, and patterns, that HTTP is redirected for
}

// lookup finds what a name, or the pattern that covers it, stands for. Pure.
func lookup[T any](m map[string]T, host string) (v T, ok bool) {
	if v, ok = m[host]; ok {
		return v, ok
	}
	if _, rest, cut := strings.Cut(host, "."); cut {
		v, ok = m["*."+rest]
	}
	return v, ok
}

// find is the route of a request; nil is none. Pure.
func (r *router) find(host, path string) *route {
	s, ok := lookup(r.hosts, host)
	if !ok {
		s, ok = r.hosts[""]
	}
	if ok {
		if to := s.find(clean(path)); to != nil {
			return to
		}
	}
	return r.fallback
}

func (s *site) find(p string) *route {
	if to := s.exact[p]; to != nil {
		return to
	}
	for _, x := range s.prefixes {
		if strings.HasPrefix(p, x.path) && (len(p) == len(x.path) || p[len(x.path)] == '/') {
			return x.to
		}
	}
	return s.fallback
}

// clean is the path that rules are compared with: dots and doubled slashes
// would lead around them. The backend gets the path as it was sent.
func clean(p string) string {
	if p == "" || p[0] != '/' {
		return "/"
	}
	if !strings.Contains(p, "//") && !strings.Contains(p, "/.") {
		return p
	}
	out := path.Clean(p)
	if strings.HasSuffix(p, "/") && out != "/" {
		out += "/"
	}
	return out
}

// hostOf is the name that a Host header names, in lower case. Pure.
func hostOf(h string) string {
	if i := strings.LastIndexByte(h, ':'); i >= 0 {
		if name, _, err := net.SplitHostPort(h); err == nil {
			h = name
		}
	}
	return strings.ToLower(strings.TrimSuffix(h, "."))
}

// newRouter builds the table. to finds the target of a backend.
func newRouter(list []named, to func(namespace string, b *wire.IngressBackend) (t *balance.Target, h2c bool, why string)) *router {
	r := &router{hosts: map[string]*site{}, secure: map[string]bool{}}
	slices.SortFunc(list, older)
	ruled := false // the fallback is that of an Ingress that has rules, too
	for _, ing := range list {
		leads := func(b *wire.IngressBackend) *route {
			out := &route{timeout: time.Duration(ing.Timeout) * time.Millisecond}
			out.target, out.h2c, out.why = to(ing.namespace, b)
			if out.timeout == 0 && !out.h2c {
				out.timeout = answerTimeout // a stream of gRPC answers when it has something to say
			}
			return out
		}
		var fallback *route
		if ing.Default != nil {
			fallback = leads(ing.Default)
			if r.fallback == nil || (ruled && len(ing.Rules) == 0) {
				r.fallback, ruled = fallback, len(ing.Rules) > 0
			}
		}
		for i := range ing.Rules {
			r.add(&ing.Rules[i], fallback, leads)
		}
		for _, t := range ing.TLS {
			for _, h := range t.Hosts {
				r.secure[h] = r.secure[h] || ing.Redirect
			}
		}
	}
	for _, s := range r.hosts {
		slices.SortStableFunc(s.prefixes, func(a, b prefix) int { return len(b.path) - len(a.path) })
	}
	return r
}

// add takes a rule; what an older one has stays.
func (r *router) add(rule *wire.IngressRule, fallback *route, leads func(*wire.IngressBackend) *route) {
	host := strings.ToLower(rule.Host)
	s := r.hosts[host]
	if s == nil {
		s = &site{exact: map[string]*route{}, fallback: fallback}
		r.hosts[host] = s
	}
	for i := range rule.Paths {
		p := &rule.Paths[i]
		if p.Exact {
			if s.exact[p.Path] == nil {
				s.exact[p.Path] = leads(&p.Backend)
			}
			continue
		}
		at := strings.TrimSuffix(p.Path, "/")
		if !slices.ContainsFunc(s.prefixes, func(x prefix) bool { return x.path == at }) {
			s.prefixes = append(s.prefixes, prefix{at, leads(&p.Backend)})
		}
	}
}

// sourceOf is what connections are counted by: an address, or a network of
// IPv6, of which one client has many. Pure.
func sourceOf(a net.Addr) netip.Addr {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	ip := t.AddrPort().Addr().Unmap()
	if ip.Is6() {
		if p, err := ip.Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return ip
}
