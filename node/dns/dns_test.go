package dns

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/dunlin-project/dunlin/test/unused"
)

type fakeRecords map[string]*Service

func (f fakeRecords) Service(namespace, name string) *Service { return f[namespace+"/"+name] }

func (f fakeRecords) HasNamespace(ns string) bool {
	for k := range f {
		if strings.HasPrefix(k, ns+"/") {
			return true
		}
	}
	return false
}

func (f fakeRecords) Names(a netip.Addr) []string {
	if a == netip.MustParseAddr("10.43.0.7") {
		return []string{"web.shop.svc"}
	}
	return nil
}

func (f fakeRecords) Own(a netip.Addr) bool { return netip.MustParsePrefix("10.43.0.0/16").Contains(a) }

func records() fakeRecords {
	ip := netip.MustParseAddr
	http := []Port{{"http", "tcp", 80}}
	return fakeRecords{
		"shop/web": {ClusterIPs: []netip.Addr{ip("10.43.0.7"), ip("fd43::7")}, Ports: http},
		"shop/db": {Ports: http, Endpoints: []Endpoint{{Addr: ip("10.42.0.5"), Hostname: "db-0", Ports: []Port{{"http", "tcp", 8080}}},
			{Addr: ip("fd42::5"), Hostname: "db-0", Ports: []Port{{"http", "tcp", 8080}}}, // the same pod's other family
			{Addr: ip("10.42.1.6"), Ports: []Port{{"http", "tcp", 8080}}}}},
		"shop/none": {Ports: http},
		"shop/ext":  {External: "web.shop.svc.cluster.local"},
	}
}

// The examples of the Kubernetes DNS specification 1.1.0, and what is not
// there.
func TestClusterNames(t *testing.T) {
	h := &Handler{Records: records(), Domain: func() string { return "cluster.local" }, Forward: NewForwarder("/nonexistent", nil)}
	for _, c := range []struct {
		name  string
		qtype uint16
		rcode int
		want  string // of each answer the last field, joined
	}{
		{"web.shop.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, "10.43.0.7"},
		{"WEB.shop.svc.Cluster.Local.", dns.TypeAAAA, dns.RcodeSuccess, "fd43::7"},
		{"web.shop.svc.cluster.local.", dns.TypeMX, dns.RcodeSuccess, ""},
		{"db.shop.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, "10.42.0.5 10.42.1.6"},
		{"db-0.db.shop.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, "10.42.0.5"},
		{"10-42-1-6.db.shop.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, "10.42.1.6"},
		{"_http._tcp.web.shop.svc.cluster.local.", dns.TypeSRV, dns.RcodeSuccess, "web.shop.svc.cluster.local."},
		{"_http._tcp.db.shop.svc.cluster.local.", dns.TypeSRV, dns.RcodeSuccess, "db-0.db.shop.svc.cluster.local. 10-42-1-6.db.shop.svc.cluster.local."},
		{"_http._udp.db.shop.svc.cluster.local.", dns.TypeSRV, dns.RcodeNameError, ""},
		{"ext.shop.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, "web.shop.svc.cluster.local. 10.43.0.7"},
		{"7.0.43.10.in-addr.arpa.", dns.TypePTR, dns.RcodeSuccess, "web.shop.svc.cluster.local."},
		{"8.0.43.10.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, ""},
		{"10-42-0-9.shop.pod.cluster.local.", dns.TypeA, dns.RcodeSuccess, "10.42.0.9"},
		{"10-42-0-9.nowhere.pod.cluster.local.", dns.TypeA, dns.RcodeNameError, ""},
		{"dns-version.cluster.local.", dns.TypeTXT, dns.RcodeSuccess, `"1.1.0"`},
		{"shop.svc.cluster.local.", dns.TypeA, dns.RcodeSuccess, ""},
		{"none.shop.svc.cluster.local.", dns.TypeA, dns.RcodeNameError, ""},
		{"web.other.svc.cluster.local.", dns.TypeA, dns.RcodeNameError, ""},
		{"a.b.c.d.web.shop.svc.cluster.local.", dns.TypeA, dns.RcodeNameError, ""},
		{"example.org.", dns.TypeA, dns.RcodeServerFailure, ""}, // no upstream
	} {
		q := new(dns.Msg)
		q.SetQuestion(c.name, c.qtype)
		m := h.Answer(t.Context(), q)
		var got []string
		for _, rr := range m.Answer {
			f := strings.Fields(rr.String())
			got = append(got, f[len(f)-1])
		}
		if m.Rcode != c.rcode || strings.Join(got, " ") != c.want {
			t.Errorf("%s %s: %s %q, want %s %q", c.name, dns.TypeToString[c.qtype], dns.RcodeToString[m.Rcode], got, dns.RcodeToString[c.rcode], c.want)
		}
		if m.Authoritative && len(m.Answer) == 0 && len(m.Ns) != 1 {
			t.Errorf("%s: an empty answer without SOA is not cached", c.name)
		}
		if _, err := m.Pack(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// upstream is a server that can be turned off.
func upstream(t *testing.T) (resolv string, asked *atomic.Int64, stop func()) {
	t.Helper()
	asked = new(atomic.Int64)
	at := unused.Port(t).String()
	pc, err := net.ListenPacket("udp", at)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	var lost atomic.Int64
	answer := dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		if asked.Add(1); strings.HasPrefix(r.Question[0].Name, "lost.") && lost.Add(1) == 1 {
			return
		}
		m := new(dns.Msg)
		m.SetReply(r)
		if strings.HasPrefix(r.Question[0].Name, "big.") && w.RemoteAddr().Network() == "udp" {
			m.Truncated = true
		} else {
			m.Answer = addresses(r.Question[0].Name, dns.TypeA, netip.MustParseAddr("192.0.2.1"))
		}
		_ = w.WriteMsg(m)
	})
	u, c := &dns.Server{PacketConn: pc, Handler: answer}, &dns.Server{Listener: l, Handler: answer}
	go func() { _ = u.ActivateAndServe() }()
	go func() { _ = c.ActivateAndServe() }()
	stop = func() { _ = u.Shutdown(); _ = c.Shutdown(); _ = pc.Close(); _ = l.Close() }
	t.Cleanup(stop)
	return pc.LocalAddr().String(), asked, stop
}

// Forwarded answers are kept for their time, asked over TCP where UDP cannot
// hold them, and used on when nobody answers any more (RFC 8767).
func TestForwardingCacheAndStale(t *testing.T) {
	addr, asked, stop := upstream(t)
	f := NewForwarder(filepath.Join(t.TempDir(), "resolv.conf"), nil)
	f.servers, f.looked = []string{addr}, time.Now().Add(time.Hour)
	q := func(name string) (*dns.Msg, error) {
		return f.Resolve(t.Context(), dns.Question{Name: name, Qtype: dns.TypeA, Qclass: dns.ClassINET}, false)
	}
	for range 3 {
		if m, err := q("a.example."); err != nil || len(m.Answer) != 1 {
			t.Fatal(m, err)
		}
	}
	if n := asked.Load(); n != 1 {
		t.Fatalf("asked %d times", n)
	}
	if m, err := q("big.example."); err != nil || len(m.Answer) != 1 {
		t.Fatal("truncated and not asked over TCP:", m, err)
	}
	if m, err := q("lost.example."); err != nil || len(m.Answer) != 1 {
		t.Fatal("a datagram was lost, and it was not asked again:", m, err)
	}
	stop()
	for _, c := range f.cache {
		c.until = time.Now().Add(-time.Minute)
	}
	if m, err := q("a.example."); err != nil || len(m.Answer) != 1 || m.Answer[0].Header().Ttl > staleTTL {
		t.Fatal("nothing stale:", m, err)
	}
	if _, err := q("b.example."); err == nil {
		t.Fatal("answered what was never known")
	}
}

func TestCacheIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewForwarder("/nonexistent", nil)
		m := new(dns.Msg)
		for i := range 5 * cacheEntries {
			f.store(cacheKey{name: string(rune(i)), qtype: dns.TypeA}, &pending{msg: m})
		}
		if len(f.cache) > cacheEntries {
			t.Fatal(len(f.cache))
		}
	})
}

// Servers of the machine are read anew when the file changes; our own address
// is not asked.
func TestUpstreamsFollowTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	own := netip.MustParseAddr("10.43.0.10")
	f := NewForwarder(path, func(a netip.Addr) bool { return a == own })
	if got := f.upstreams(); len(got) != 0 {
		t.Fatal(got)
	}
	if err := os.WriteFile(path, []byte("# x\nnameserver 10.43.0.10\nnameserver 192.0.2.53\nnameserver fd00::53\noptions ndots:5\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.looked = time.Time{}
	if got := strings.Join(f.upstreams(), " "); got != "192.0.2.53:53 [fd00::53]:53" {
		t.Fatal(got)
	}
}
