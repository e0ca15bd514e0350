package dns

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// Where no upstream answers, as on a site that is cut off, pods are told so
// before their resolvers give up, and the next ones sooner.
func TestSilentUpstreamsAreToldInTime(t *testing.T) {
	silent, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	addr, _, _ := upstream(t)
	h := &Handler{Records: records(), Domain: func() string { return "cluster.local" }, Forward: NewForwarder(filepath.Join(t.TempDir(), "resolv.conf"), nil)}
	f := h.Forward
	f.looked = time.Now().Add(time.Hour)
	ask := func(name string, servers ...string) (rcode int, took time.Duration) {
		f.mu.Lock()
		f.servers = servers
		f.mu.Unlock()
		q := new(dns.Msg)
		q.SetQuestion(name, dns.TypeA)
		began := time.Now()
		return h.Answer(t.Context(), q).Rcode, time.Since(began)
	}
	dead := silent.LocalAddr().String()
	rcode, took := ask("a.example.", dead, dead)
	if rcode != dns.RcodeServerFailure || took > 4500*time.Millisecond || took < 3*time.Second {
		t.Errorf("at first: %s after %s", dns.RcodeToString[rcode], took)
	}
	if rcode, took := ask("b.example.", dead); rcode != dns.RcodeServerFailure || took > 2*time.Second {
		t.Errorf("then: %s after %s", dns.RcodeToString[rcode], took)
	}
	if rcode, _ := ask("c.example.", dead, addr); rcode != dns.RcodeSuccess {
		t.Errorf("one answers: %s", dns.RcodeToString[rcode])
	}
	if rcode, took := ask("d.example.", dead); rcode != dns.RcodeServerFailure || took < 3*time.Second {
		t.Errorf("after one answered, a datagram that is lost is not sent again: %s after %s", dns.RcodeToString[rcode], took)
	}
}
