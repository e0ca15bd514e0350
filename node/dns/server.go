package dns

import (
	"context"
	"slices"
	"strings"

	"github.com/miekg/dns"
)

// Handler answers DNS queries; it is a dns.Handler.
type Handler struct {
	Records Records
	Domain  func() string // such as cluster.local
	Forward *Forwarder
}

// questionTimeout bounds a query that is passed on: resolvers wait for 5 s, and
// who gets no answer until then asks again, and waits as long again.
const questionTimeout = forwardTimeout + secondTimeout

// ServeDNS implements dns.Handler.
func (h *Handler) ServeDNS(w dns.ResponseWriter, r *dns.Msg) {
	m := h.Answer(context.Background(), r)
	if w.RemoteAddr().Network() == "udp" {
		size := dns.MinMsgSize
		if opt := r.IsEdns0(); opt != nil {
			size = max(size, min(int(opt.UDPSize()), 4096))
		}
		m.Truncate(size)
	} else {
		m.Truncate(dns.MaxMsgSize)
	}
	_ = w.WriteMsg(m) // who asked is gone
}

// Answer makes the reply to a query.
func (h *Handler) Answer(ctx context.Context, r *dns.Msg) *dns.Msg {
	m := new(dns.Msg)
	m.SetReply(r)
	m.RecursionAvailable = true
	if r.Opcode != dns.OpcodeQuery || len(r.Question) != 1 || r.Question[0].Qclass != dns.ClassINET {
		m.Rcode = dns.RcodeNotImplemented
		return m
	}
	if opt := r.IsEdns0(); opt != nil {
		m.SetEdns0(1232, opt.Do())
	}
	q := r.Question[0]
	name := strings.ToLower(q.Name)
	domain := dns.Fqdn(h.Domain())
	if name == domain || strings.HasSuffix(name, "."+domain) {
		h.own(ctx, m, inZone(h.Records, domain, name, q.Qtype), q, domain)
		return m
	}
	if a, ok := reverse(name); ok {
		if ans, known := pointers(h.Records, domain, name, a, q.Qtype); known {
			h.own(ctx, m, ans, q, domain)
			return m
		}
	}
	h.forward(ctx, m, q, r)
	return m
}

// own fills in an answer about a name of the cluster.
func (h *Handler) own(ctx context.Context, m *dns.Msg, a answer, q dns.Question, domain string) {
	m.Authoritative = true
	if !a.exists {
		m.Rcode = dns.RcodeNameError
	}
	m.Answer = a.rrs
	m.Extra = append(m.Extra, a.extra...)
	for _, rr := range m.Answer {
		rr.Header().Name = q.Name // as it was asked: some clients compare
	}
	if a.follow != "" && (q.Qtype == dns.TypeA || q.Qtype == dns.TypeAAAA) {
		next := dns.Question{Name: a.follow, Qtype: q.Qtype, Qclass: q.Qclass}
		if strings.HasSuffix(strings.ToLower(a.follow), "."+domain) {
			m.Answer = append(m.Answer, inZone(h.Records, domain, strings.ToLower(a.follow), q.Qtype).rrs...)
			return
		}
		ctx, cancel := context.WithTimeout(ctx, questionTimeout)
		defer cancel()
		r, err := h.Forward.Resolve(ctx, next, false)
		if err != nil {
			m.Rcode = dns.RcodeServerFailure
			return
		}
		m.Answer = append(m.Answer, r.Answer...)
		return
	}
	if len(m.Answer) == 0 {
		m.Ns = []dns.RR{&dns.SOA{Hdr: header(domain, dns.TypeSOA), Ns: "ns.dns." + domain, Mbox: "hostmaster." + domain,
			Serial: 1, Refresh: 7200, Retry: 1800, Expire: 86400, Minttl: ttl}}
	}
}

func (h *Handler) forward(ctx context.Context, m *dns.Msg, q dns.Question, r *dns.Msg) {
	if !r.RecursionDesired {
		m.Rcode = dns.RcodeRefused
		return
	}
	opt := r.IsEdns0()
	ctx, cancel := context.WithTimeout(ctx, questionTimeout)
	defer cancel()
	u, err := h.Forward.Resolve(ctx, q, opt != nil && opt.Do())
	if err != nil {
		m.Rcode = dns.RcodeServerFailure
		return
	}
	m.Rcode, m.Answer, m.Ns = u.Rcode, u.Answer, u.Ns
	m.Extra = append(m.Extra, slices.DeleteFunc(slices.Clone(u.Extra), func(rr dns.RR) bool { return rr.Header().Rrtype == dns.TypeOPT })...)
}
