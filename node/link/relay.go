package link

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/dunlin-project/dunlin/internal/attempt"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// A node talks to the server that leads. Where it cannot reach it, another
// server passes the bytes on (wire.ALPNRelay): TLS inside TLS, so that only
// the leader itself can acknowledge a lease.

// route is a way to a server.
type route struct {
	addr    string
	relayed bool // on to the leader, by way of addr
}

// String is what attempt.First knows a route by; no address has a space.
func (r route) String() string {
	if r.relayed {
		return "relay " + r.addr
	}
	return r.addr
}

const (
	// silentFor is how long an address is tried last that was silent.
	silentFor = 45 * time.Second
	// directEvery is how often a relayed session looks whether the leader can
	// be reached directly again.
	directEvery = 20 * time.Second
)

// errDirect ends a relayed session: the leader can be reached.
var errDirect = errors.New("link: the leader can be reached directly again")

// errSilent: nothing was acknowledged for leaseDead.
var errSilent = errors.New("link: no lease acknowledged")

// silence remembers addresses at which nobody answered, or not for long.
type silence map[string]time.Time

func (s silence) add(now time.Time, addr string) {
	for a, at := range s {
		if now.Sub(at) > silentFor {
			delete(s, a)
		}
	}
	s[addr] = now
}

// since is when an address was silent; zero: it was not, lately.
func (s silence) since(now time.Time, addr string) time.Time {
	if at := s[addr]; now.Sub(at) <= silentFor {
		return at
	}
	return time.Time{}
}

// routes orders the ways to try. Without a redirect: the server that worked
// last, then the others. After one: the leader itself, then by way of the
// server that named it, then the others, since all of this may be old. What
// was silent lately comes last, the longest ago first: everything may have
// been.
func routes(leader []string, via, last string, others []string, silent func(addr string) time.Time) []route {
	var out []route
	add := func(r route) {
		if r.addr != "" && !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	for _, a := range leader {
		add(route{addr: a})
	}
	if len(leader) > 0 {
		add(route{via, true})
	}
	add(route{addr: last})
	for _, a := range others {
		add(route{addr: a})
	}
	slices.SortStableFunc(out, func(a, b route) int { return silent(a.addr).Compare(silent(b.addr)) })
	return out
}

// connectRoutes takes the first route that answers.
func (l *Link) connectRoutes(ctx context.Context, list []route, proto string, cert *tls.Certificate) (*conn, error) {
	if len(list) == 0 {
		return nil, errors.New("link: no server address is known")
	}
	names, by := make([]string, len(list)), make(map[string]route, len(list))
	for i, r := range list {
		names[i] = r.String()
		by[names[i]] = r
	}
	return attempt.First(ctx, dialStagger, names, func(ctx context.Context, name string) (*conn, error) {
		return l.connect(ctx, by[name], proto, cert)
	}, func(c *conn) { _ = c.Close() })
}

func (l *Link) connect(ctx context.Context, r route, proto string, cert *tls.Certificate) (*conn, error) {
	verify := pki.VerifyServer(l.c.Identity.Roots())
	if !r.relayed {
		return l.d.connect(ctx, r.addr, proto, cert, verify)
	}
	outer, err := l.d.connect(ctx, r.addr, wire.ALPNRelay, cert, verify)
	if err != nil {
		return nil, err
	}
	c, err := l.throughRelay(ctx, outer, proto, cert)
	if err != nil {
		_ = outer.Close()
		return nil, fmt.Errorf("link: by way of %s: %w", r.addr, err)
	}
	return c, nil
}

// throughRelay greets the server in between, and then the leader.
func (l *Link) throughRelay(ctx context.Context, outer *conn, proto string, cert *tls.Certificate) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = outer.raw.Close() })
	defer stop()
	g := l.c.Identity.Grant()
	if err := wire.WriteMessage(outer, l.greeting(g, outer)); err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	h := new(wire.Hello)
	if err := wire.ReadMessage(outer, h); err != nil {
		return nil, fmt.Errorf("hello: %w", err)
	}
	if h.Refused != "" {
		return nil, errors.New(h.Refused)
	}
	if reason := refuseServer(h, g); reason != "" {
		return nil, fmt.Errorf("not accepted: %s", reason)
	}
	tc, err := handshake(ctx, outer, proto, false, cert, pki.VerifyServer(l.c.Identity.Roots()))
	if err != nil {
		return nil, fmt.Errorf("TLS with the leader: %w", err)
	}
	if !stop() {
		return nil, ctx.Err()
	}
	return &conn{Conn: tc, tls: tc, raw: outer.raw, addr: outer.addr, relayed: true}, nil
}

// seekDirect ends a relayed session once the leader answers directly.
func (l *Link) seekDirect(ctx context.Context, wc *wire.Conn, leader []string) {
	for {
		if !sleep(ctx, jittered(directEvery)) {
			return
		}
		c, err := l.d.connectAny(ctx, leader, wire.ALPNNode, l.certificate(), pki.VerifyServer(l.c.Identity.Roots()))
		if err == nil {
			_ = c.Close()
			l.mu.Lock()
			l.redirect = leader
			for _, a := range leader {
				delete(l.silent, a)
			}
			l.mu.Unlock()
			wc.Close(errDirect)
			return
		}
		l.wereSilent(leader)
	}
}

func (l *Link) wereSilent(addrs []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range addrs {
		l.silent.add(time.Now(), a)
	}
}
