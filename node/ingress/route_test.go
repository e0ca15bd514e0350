package ingress

import (
	"net"
	"testing"

	"github.com/dunlin-project/dunlin/node/balance"
	"github.com/dunlin-project/dunlin/wire"
)

func leads(p string, exact bool, service string) wire.IngressPath {
	return wire.IngressPath{Path: p, Exact: exact, Backend: wire.IngressBackend{Service: service}}
}

// The rules of the Ingress documentation, and who keeps what two want.
func TestRoutes(t *testing.T) {
	list := []named{
		{"d", "young", &wire.Ingress{Created: 9, Rules: []wire.IngressRule{{Host: "a.example", Paths: []wire.IngressPath{leads("/foo", false, "late"), leads("/new", false, "new")}}}}},
		{"d", "main", &wire.Ingress{Created: 1, Default: &wire.IngressBackend{Service: "main-default"}, Rules: []wire.IngressRule{
			{Host: "a.example", Paths: []wire.IngressPath{leads("/foo/", false, "foo"), leads("/foo/bar", false, "bar"), leads("/foo", true, "exact"), leads("/x/", true, "slash")}},
			{Host: "*.b.example", Paths: []wire.IngressPath{leads("/", false, "wild")}},
			{Host: "c.b.example", Paths: []wire.IngressPath{leads("/only", false, "c")}},
		}}},
		{"d", "any", &wire.Ingress{Created: 5, Rules: []wire.IngressRule{{Paths: []wire.IngressPath{leads("/any", false, "any")}}}}},
		{"d", "rest", &wire.Ingress{Created: 7, Default: &wire.IngressBackend{Service: "rest"}}},
	}
	names := map[*balance.Target]string{}
	r := newRouter(list, func(_ string, b *wire.IngressBackend) (*balance.Target, bool, string) {
		to := new(balance.Target)
		names[to] = b.Service
		return to, false, ""
	})
	for _, c := range []struct{ host, path, want string }{
		{"a.example", "/foo", "exact"},
		{"a.example", "/foo/", "foo"},
		{"a.example", "/foo/ba", "foo"},
		{"a.example", "/foo/bar", "bar"},
		{"a.example", "/foo/bar/x", "bar"},
		{"a.example", "/foo/barx", "foo"},
		{"a.example", "/foobar", "main-default"},
		{"a.example", "/new", "new"},
		{"a.example", "/x", "main-default"},
		{"a.example", "/x/", "slash"},
		{"a.example", "/new/../foo/bar", "bar"},
		{"a.example", "//foo//bar", "bar"},
		{"x.b.example", "/y", "wild"},
		{"c.b.example", "/y", "main-default"}, // the exact host has it
		{"c.b.example", "/only", "c"},
		{"x.y.b.example", "/", "rest"},
		{"b.example", "/", "rest"},
		{"other", "/any/x", "any"},
		{"other", "/", "rest"},
		{"a.example", "*", "main-default"},
	} {
		got := "none"
		if to := r.find(c.host, c.path); to != nil {
			got = names[to.target]
		}
		if got != c.want {
			t.Errorf("%s%s goes to %s, want %s", c.host, c.path, got, c.want)
		}
	}
}

func TestHostOf(t *testing.T) {
	for in, want := range map[string]string{"A.Example:8080": "a.example", "a.example.": "a.example", "[::1]:80": "::1", "a": "a", "": "", "a.example:": "a.example"} {
		if got := hostOf(in); got != want {
			t.Errorf("%q is %q, want %q", in, got, want)
		}
	}
}

func TestSourceIsANetworkOfIPv6(t *testing.T) {
	a := sourceOf(&net.TCPAddr{IP: net.ParseIP("2001:db8::1")})
	if a != sourceOf(&net.TCPAddr{IP: net.ParseIP("2001:db8::ffff:2")}) || a == sourceOf(&net.TCPAddr{IP: net.ParseIP("2001:db8:0:1::1")}) {
		t.Error(a)
	}
	if sourceOf(&net.TCPAddr{IP: net.ParseIP("192.0.2.1")}) == sourceOf(&net.TCPAddr{IP: net.ParseIP("192.0.2.2")}) {
		t.Error("two IPv4 clients are one source")
	}
}

// No path makes the router panic, and what it compares has no dots in it.
func FuzzFind(f *testing.F) {
	for _, s := range []string{"/", "/a/../b", "//", "/./", "a", "/..", "/a//"} {
		f.Add("a.example", s)
	}
	list := []named{{"d", "i", &wire.Ingress{Rules: []wire.IngressRule{{Host: "a.example", Paths: []wire.IngressPath{leads("/a", false, "a"), leads("/b", true, "b")}}}}}}
	r := newRouter(list, func(string, *wire.IngressBackend) (*balance.Target, bool, string) { return nil, false, "" })
	f.Fuzz(func(t *testing.T, host, p string) {
		r.find(hostOf(host), p)
		if c := clean(p); c[0] != '/' || clean(c) != c {
			t.Errorf("%q is cleaned to %q, and that to %q", p, c, clean(c))
		}
	})
}
