package host

import (
	"bytes"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// nameServer answers A questions with what the name has now; "" is no such
// name.
func nameServer(t *testing.T, answer *atomic.Value) string {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		b := make([]byte, 512)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(b[:n]) != nil {
				continue
			}
			m.Response = true
			text, _ := answer.Load().(string)
			q := m.Questions[0]
			if text == "" || !strings.HasPrefix(strings.ToLower(q.Name.String()), "api.test.") {
				m.RCode = dnsmessage.RCodeNameError
			} else if q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 1}, Body: &dnsmessage.AResource{A: netip.MustParseAddr(text).As4()}}}
			}
			out, err := m.Pack()
			if err == nil {
				_, _ = c.WriteTo(out, from)
			}
		}
	}()
	return c.LocalAddr().String()
}

// What a name stands for is checked where it is connected to, so a name that
// means something else a moment later opens nothing.
func TestNamesOpenTheirAddresses(t *testing.T) {
	var answer atomic.Value
	var log bytes.Buffer
	g, err := newGate(Outbound{Allow: "api.test:443, 10.9.0.0/16:80", DNS: []string{nameServer(t, &answer)}, Search: []string{"x.invalid"}}, &log)
	if err != nil {
		t.Fatal(err)
	}
	g.local = func(a netip.Addr) bool { return a == netip.MustParseAddr("192.0.2.99") }
	at := netip.MustParseAddrPort
	if g.may(at("192.0.2.1:443"), false) {
		t.Error("an address that nobody named")
	}
	answer.Store("192.0.2.1")
	if list, e := g.resolve("API.test", 443, false); e != 0 || len(list) != 1 || !g.may(at("192.0.2.1:443"), false) {
		t.Fatal(list, e)
	}
	if g.may(at("192.0.2.1:80"), false) || g.may(at("192.0.2.1:443"), true) || g.may(at("192.0.2.2:443"), false) || !g.may(at("10.9.1.1:80"), false) || !g.may(at("[::ffff:10.9.1.1]:80"), false) {
		t.Error("more, or less, than was allowed")
	}
	// Rebinding: to the node, its loopback, a cloud's metadata.
	for _, to := range []string{"127.0.0.1", "169.254.169.254", "192.0.2.99", "0.0.0.0"} {
		answer.Store(to)
		if list, e := g.resolve("api.test", 443, false); e != eAcces {
			t.Errorf("%s: %v %d", to, list, e)
		}
		if g.may(netip.AddrPortFrom(netip.MustParseAddr(to), 443), false) {
			t.Errorf("the name opened %s", to)
		}
	}
	if g.may(at("[::ffff:127.0.0.1]:443"), false) || g.may(at("[64:ff9b::7f00:1]:443"), false) {
		t.Error("a way around")
	}
	if _, e := g.resolve("other.test", 8443, false); e != eAcces {
		t.Error("a name that no rule has was looked up")
	}
	answer.Store("")
	if _, e := g.resolve("api.test", 443, false); e != eNoent {
		t.Error(e)
	}
	if !g.may(at("192.0.2.1:443"), false) {
		t.Error("what the name stood for is forgotten")
	}
	// Each destination is told once, and not too many.
	before := log.Len()
	g.may(at("192.0.2.1:80"), false)
	if log.Len() != before {
		t.Error("told twice")
	}
	for i := range 100 {
		g.may(netip.AddrPortFrom(netip.MustParseAddr("198.51.100.1"), uint16(i+1)), false)
	}
	text := log.String()
	if n := strings.Count(text, "\n"); n != complaints+1 || !strings.Contains(text, `annotate the pod with dunlin.dev/outbound: "192.0.2.1:443"`) || !strings.Contains(text, "which are not told") {
		t.Errorf("%d lines: %s", n, text)
	}
}

// A refusal names the entry that would do, with the host and the port that the
// guest asked for; with that entry the same attempt is let through.
func TestRefusalsNameTheEntryThatHelps(t *testing.T) {
	var answer atomic.Value
	server := nameServer(t, &answer)
	for what, c := range map[string]struct {
		allow, answer, host string
		port                uint16
		udp                 bool
		want                string
	}{
		"a name":             {"x.test:1", "192.0.2.1", "api.test", 1883, false, "api.test:1883"},
		"without annotation": {"", "192.0.2.1", "api.test", 1883, false, "api.test:1883"},
		"another port":       {"api.test:443", "192.0.2.1", "api.test", 80, false, "api.test:80"},
		"datagrams":          {"api.test:443", "192.0.2.1", "api.test", 443, true, "api.test:443/udp"},
		"localhost":          {"x.test:1", "", "localhost", 8080, false, "127.0.0.1:8080"},
		"a name of loopback": {"api.test:8080", "127.0.0.1", "api.test", 8080, false, "127.0.0.1:8080"},
		"an address":         {"", "", "198.51.100.7", 25, false, "198.51.100.7:25"},
		"an address of IPv6": {"x.test:1", "", "2001:db8::1", 25, false, "[2001:db8::1]:25"},
		"loopback's address": {"0.0.0.0/0:*", "", "127.0.0.1", 25, false, "127.0.0.1:25"},
		"a name's datagrams": {"x.test:1", "192.0.2.1", "api.test", 53, true, "api.test:53/udp"},
	} {
		t.Run(what, func(t *testing.T) {
			answer.Store(c.answer)
			reaches := func(allow string) (bool, []Refusal, string) {
				var log bytes.Buffer
				var told []Refusal
				g, err := newGate(Outbound{Allow: allow, DNS: []string{server}}, &log)
				if err != nil {
					t.Fatal(err)
				}
				g.local, g.note = func(netip.Addr) bool { return false }, func(l []Refusal) { told = l }
				list, e := g.resolve(c.host, c.port, c.udp)
				return e == 0 && g.may(netip.AddrPortFrom(list[0], c.port), c.udp), told, log.String()
			}
			ok, told, log := reaches(c.allow)
			if ok || len(told) != 1 || told[0].Entry != c.want || !strings.Contains(log, `"`+c.want+`"`) {
				t.Fatalf("%v %+v: %s", ok, told, log)
			}
			if ok, told, _ := reaches(strings.TrimPrefix(c.allow+", "+told[0].Entry, ", ")); !ok {
				t.Errorf("what was suggested does not help: %+v", told)
			}
		})
	}
	// A guest that does not say the port with the name.
	var log bytes.Buffer
	g, err := newGate(Outbound{Allow: "x.test:1"}, &log)
	if err != nil {
		t.Fatal(err)
	}
	if _, e := g.resolve("api.test", 0, false); e != eAcces || strings.Contains(log.String(), "443") || !strings.Contains(log.String(), `"api.test:PORT", where PORT is the one`) {
		t.Error(e, log.String())
	}
}

func TestGateRefusesBadRules(t *testing.T) {
	if _, err := newGate(Outbound{Allow: "x"}, nil); err == nil || !strings.Contains(err.Error(), "annotation dunlin.dev/outbound entry \"x\"") {
		t.Error(err)
	}
}

// Whatever is sent back as an answer, it is read to its end.
func FuzzAnswer(f *testing.F) {
	q := dnsmessage.Message{Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName("a."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}}}
	m := q
	m.Response = true
	m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Questions[0].Name, Class: dnsmessage.ClassINET}, Body: &dnsmessage.AResource{A: [4]byte{1, 2, 3, 4}}}}
	b, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		if out, _ := addressesIn(b, &q); len(out) > dnsAnswers {
			t.Error(len(out))
		}
	})
}
