package outbound

import (
	"net/netip"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	r, err := Parse("api.Example.com.:443, *.example.org:8000-8010\n10.0.0.0/8:5432 192.0.2.7:1883/tcp,[fd00::/8]:*,[2001:db8::1]:53/udp")
	if err != nil || len(r) != 6 {
		t.Fatal(r, err)
	}
	for _, c := range []struct {
		name string
		port uint16
		udp  bool
		want bool
	}{
		{"api.example.com", 443, false, true}, {"API.example.com.", 443, false, true}, {"api.example.com", 80, false, false}, {"api.example.com", 443, true, false},
		{"x.api.example.com", 443, false, false}, {"a.b.example.org", 8005, false, true}, {"example.org", 8005, false, false}, {"badexample.org", 8005, false, false},
		{"10.0.0.1", 5432, false, false},
	} {
		if got := r.ByName(c.name, c.port, c.udp); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
	for _, c := range []struct {
		addr string
		port uint16
		udp  bool
		want bool
	}{
		{"10.1.2.3", 5432, false, true}, {"10.1.2.3", 5433, false, false}, {"11.0.0.1", 5432, false, false}, {"192.0.2.7", 1883, false, true},
		{"fd12::1", 1, false, true}, {"2001:db8::1", 53, true, true}, {"2001:db8::1", 53, false, false},
	} {
		if got := r.ByAddress(netip.MustParseAddr(c.addr), c.port, c.udp, netip.Prefix{}); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
	if !r.Resolves("api.example.com") || r.Resolves("other.example") {
		t.Error("what may be looked up")
	}
	if none, err := Parse(" \n"); err != nil || len(none) != 0 {
		t.Error(none, err)
	}
}

func TestParseRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"example.com":              "a port is missing",
		"example.com:0":            "is no port",
		"example.com:70000":        "is no port",
		"example.com:9-8":          "is no port",
		"example.com:http":         "is no port",
		"http://example.com:80":    "is a URL",
		":443":                     "neither a name",
		"*:443":                    "neither a name",
		"*.:443":                   "neither a name",
		"a..b:443":                 "neither a name",
		"-a.example:443":           "neither a name",
		"10.0.0.256:443":           "neither a name",
		"https://x.example:443":    "is a URL",
		"10.0.0.1/8:443":           "the range is 10.0.0.0/8",
		"10.0.0.0/33:443":          "not a range",
		"fd00::1:443":              "stands in brackets",
		"[fd00::1:443":             "bracket is not closed",
		"[x.example]:443":          "no IPv6 address",
		"[fe80::1%eth0]:443":       "no IPv6 address",
		strings.Repeat("x", 5000):  "longer than",
		strings.Repeat("a:1 ", 65): "more than 64 entries",
	} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
}

// What is special opens by a rule of its own only.
func TestSpecial(t *testing.T) {
	wide, _ := Parse("0.0.0.0/0:*, [::/0]:*")
	exact, _ := Parse("169.254.169.254:80, 127.0.0.0/8:9000, [::1]:9000")
	for _, c := range []struct {
		addr string
		port uint16
		ok   bool
	}{{"169.254.169.254", 80, true}, {"169.254.169.253", 80, false}, {"127.0.0.1", 9000, true}, {"::1", 9000, true}, {"::1", 80, false}} {
		a := netip.MustParseAddr(c.addr)
		within, _, special := Special(a)
		if !special || wide.ByAddress(a, c.port, false, within) || exact.ByAddress(a, c.port, false, within) != c.ok {
			t.Errorf("%+v", c)
		}
	}
	if _, what, ok := Special(netip.MustParseAddr("10.0.0.1")); ok {
		t.Error("a private address is", what)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"a.example:443", "[::/0]:*", "1.2.3.4/5:6-7/udp", "*.a:1,b:2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := Parse(s)
		if err == nil && len(r) > maxRules {
			t.Error(len(r))
		}
		r.Ports()
	})
}
