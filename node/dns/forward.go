package dns

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	forwardTimeout = time.Second
	// secondTimeout is for the second round, of who lost a datagram, or needs
	// longer: together they are well within a resolver's five seconds.
	secondTimeout = 2500 * time.Millisecond
	// cacheEntries bound the cache; a full one forgets whatever.
	cacheEntries = 1000
	cacheMaxTTL  = time.Hour
	cacheNoTTL   = 30 * time.Second // of what has no records and names no time
	// staleFor is how long after its end a record is used when no upstream
	// answers, and staleTTL what clients are told then (RFC 8767).
	staleFor = 24 * time.Hour
	staleTTL = 30
	// retryStale spares an upstream that does not answer.
	retryStale = 5 * time.Second
	// silentFor is how long after no upstream answered a question others get the
	// first round alone: this site is probably cut off, and pods wait.
	silentFor  = 30 * time.Second
	lookResolv = 5 * time.Second
	inFlight   = 256 // questions asked upstream at once
)

var errNoUpstream = errors.New("dns: no upstream server is known")

// Forwarder asks the machine's own servers, and remembers.
type Forwarder struct {
	// Resolv is the file that names them; it is read again when it changes.
	Resolv string
	// Skip are addresses that must not be asked: our own.
	Skip func(netip.Addr) bool

	mu       sync.Mutex
	cache    map[cacheKey]*cached
	servers  []string
	looked   time.Time
	modified time.Time
	slots    chan struct{}
	waiting  map[cacheKey]*pending
	silent   time.Time // when no upstream answered; zero once one did
}

type cacheKey struct {
	name  string
	qtype uint16
	do    bool
}

type cached struct {
	msg    *dns.Msg
	at     time.Time
	until  time.Time
	failed time.Time // last time that no upstream answered
}

type pending struct {
	done chan struct{}
	msg  *dns.Msg
	err  error
}

// NewForwarder reads servers from the file when first asked.
func NewForwarder(resolv string, skip func(netip.Addr) bool) *Forwarder {
	return &Forwarder{Resolv: resolv, Skip: skip, cache: map[cacheKey]*cached{}, slots: make(chan struct{}, inFlight), waiting: map[cacheKey]*pending{}}
}

// upstreams are the addresses to ask, host:port.
func (f *Forwarder) upstreams() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	if now.Sub(f.looked) < lookResolv && !f.looked.IsZero() {
		return f.servers
	}
	f.looked = now
	file, err := os.Open(f.Resolv)
	if err != nil {
		return f.servers
	}
	defer func() { _ = file.Close() }()
	if st, err := file.Stat(); err == nil && st.ModTime().Equal(f.modified) {
		return f.servers
	} else if err == nil {
		f.modified = st.ModTime()
	}
	f.servers = nil
	for sc := bufio.NewScanner(file); sc.Scan() && len(f.servers) < 8; {
		l := strings.Fields(sc.Text())
		if len(l) < 2 || l[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(l[1]); err == nil && (f.Skip == nil || !f.Skip(a)) {
			f.servers = append(f.servers, net.JoinHostPort(a.String(), "53"))
		}
	}
	return f.servers
}

// Resolve answers a question from the cache or upstream. The message is
// shared: it must not be changed.
func (f *Forwarder) Resolve(ctx context.Context, q dns.Question, do bool) (*dns.Msg, error) {
	k := cacheKey{strings.ToLower(q.Name), q.Qtype, do}
	now := time.Now()
	f.mu.Lock()
	c := f.cache[k]
	if c != nil && (now.Before(c.until) || now.Sub(c.failed) < retryStale) {
		f.mu.Unlock()
		return c.aged(now), nil
	}
	p := f.waiting[k]
	if p == nil {
		p = &pending{done: make(chan struct{})}
		f.waiting[k] = p
		rounds := []time.Duration{forwardTimeout, secondTimeout}
		if c != nil || now.Sub(f.silent) < silentFor {
			rounds = rounds[:1] // what is known already must not wait long
		}
		f.mu.Unlock()
		p.msg, p.err = f.ask(ctx, q, do, rounds)
		f.mu.Lock()
		delete(f.waiting, k)
		f.store(k, p)
		f.mu.Unlock()
		close(p.done)
	} else {
		f.mu.Unlock()
		select {
		case <-p.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if p.err != nil && c != nil && now.Sub(c.until) < staleFor {
		return c.aged(now), nil
	}
	return p.msg, p.err
}

// store keeps an answer; f.mu is held.
func (f *Forwarder) store(k cacheKey, p *pending) {
	now := time.Now()
	if p.err != nil {
		f.silent = now
		if c := f.cache[k]; c != nil {
			c.failed = now
		}
		return
	}
	f.silent = time.Time{}
	if p.msg.Rcode != dns.RcodeSuccess && p.msg.Rcode != dns.RcodeNameError {
		return
	}
	if len(f.cache) >= cacheEntries {
		for old := range f.cache {
			delete(f.cache, old)
			if len(f.cache) < cacheEntries*9/10 {
				break
			}
		}
	}
	f.cache[k] = &cached{msg: p.msg, at: now, until: now.Add(lifetime(p.msg))}
}

// lifetime is the shortest of the records'.
func lifetime(m *dns.Msg) time.Duration {
	d := cacheMaxTTL
	some := false
	for _, rrs := range [][]dns.RR{m.Answer, m.Ns} {
		for _, rr := range rrs {
			some = true
			t := rr.Header().Ttl
			if soa, ok := rr.(*dns.SOA); ok {
				t = min(t, soa.Minttl) // RFC 2308
			}
			d = min(d, time.Duration(t)*time.Second)
		}
	}
	if !some {
		return cacheNoTTL
	}
	return d
}

// aged is the message with what is left of its times.
func (c *cached) aged(now time.Time) *dns.Msg {
	out := c.msg.Copy()
	for _, rrs := range [][]dns.RR{out.Answer, out.Ns, out.Extra} {
		for _, rr := range rrs {
			h := rr.Header()
			if h.Rrtype == dns.TypeOPT {
				continue
			}
			if spent := uint32(now.Sub(c.at) / time.Second); h.Ttl > spent {
				h.Ttl -= spent
			} else {
				h.Ttl = staleTTL
			}
		}
	}
	return out
}

// ask asks one server after the other, in rounds: a question that is lost on
// its way must not be an answer.
func (f *Forwarder) ask(ctx context.Context, q dns.Question, do bool, rounds []time.Duration) (*dns.Msg, error) {
	select {
	case f.slots <- struct{}{}:
		defer func() { <-f.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	err := errNoUpstream
	var refused *dns.Msg
	for _, patience := range rounds {
		for _, s := range f.upstreams() {
			var r *dns.Msg
			if r, err = exchange(ctx, s, q, do, patience); err != nil {
				continue
			}
			if r.Rcode != dns.RcodeServerFailure && r.Rcode != dns.RcodeRefused {
				return r, nil
			}
			refused = r
		}
		if refused != nil {
			return refused, nil
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

// exchange asks one server, by TCP too where UDP cannot hold the answer.
func exchange(ctx context.Context, server string, q dns.Question, do bool, patience time.Duration) (*dns.Msg, error) {
	m := new(dns.Msg)
	m.Id, m.RecursionDesired, m.Question = dns.Id(), true, []dns.Question{q}
	m.SetEdns0(1232, do) // what passes everywhere (DNS flag day 2020)
	c := dns.Client{Timeout: patience, UDPSize: 1232}
	r, _, err := c.ExchangeContext(ctx, m, server)
	if err != nil || !r.Truncated {
		return r, err
	}
	c.Net = "tcp"
	full, _, err := c.ExchangeContext(ctx, m, server)
	return full, err
}
