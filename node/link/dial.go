package link

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/dunlin-project/dunlin/internal/attempt"
	"github.com/dunlin-project/dunlin/pki"
)

// DialFunc opens a TCP connection; the zero value of Config uses
// net.Dialer, which resolves names anew every time.
type DialFunc func(ctx context.Context, network, addr string) (net.Conn, error)

const (
	dialTimeout = 5 * time.Second
	// upgradePath is the server's HTTP/1.1 way to the same protocols.
	upgradePath = "/dunlin/v1/connect"
)

// Counters count bytes on the wire: TLS records included, IP and TCP headers
// not.
type Counters struct{ in, out atomic.Uint64 }

// Bytes returns what was read and written so far.
func (c *Counters) Bytes() (in, out uint64) { return c.in.Load(), c.out.Load() }

type countedConn struct {
	net.Conn
	n *Counters
}

// Read implements net.Conn.
func (c countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.n.in.Add(uint64(n))
	return n, err
}

// Write implements net.Conn.
func (c countedConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.n.out.Add(uint64(n))
	return n, err
}

// dialer opens TLS connections for one of our protocols.
type dialer struct {
	dial     DialFunc
	counters *Counters
}

func newDialer(d DialFunc) dialer {
	if d == nil {
		nd := &net.Dialer{KeepAlive: -1} // leases are the keep-alive
		d = nd.DialContext
	}
	return dialer{dial: d, counters: &Counters{}}
}

// errNoALPN says that something between here and the server takes the
// protocol's name out of the handshake.
var errNoALPN = errors.New("link: the server did not take the protocol (a middlebox?)")

// tls opens a connection that speaks proto: by ALPN, or, with upgrade, by an
// HTTP/1.1 upgrade inside a plain TLS connection.
func (d dialer) tls(ctx context.Context, addr, proto string, upgrade bool, cert *tls.Certificate, verify func(tls.ConnectionState) error) (*conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	raw, err := d.dial(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("link: dial %s: %w", addr, err)
	}
	if tc, ok := raw.(*net.TCPConn); ok {
		_ = tc.SetWriteBuffer(64 << 10) // a lease must not queue behind a report
	}
	tc, err := handshake(ctx, countedConn{raw, d.counters}, proto, upgrade, cert, verify)
	if err != nil {
		_ = raw.Close()
		return nil, fmt.Errorf("link: TLS with %s: %w", addr, err)
	}
	c := &conn{Conn: tc, tls: tc, raw: raw, addr: addr}
	if !upgrade {
		if tc.ConnectionState().NegotiatedProtocol != proto {
			_ = tc.Close()
			return nil, errNoALPN
		}
		return c, nil
	}
	if err := c.upgrade(ctx, proto); err != nil {
		_ = tc.Close()
		return nil, err
	}
	return c, nil
}

// handshake is the client's side of TLS over any connection. With upgrade no
// protocol is named.
func handshake(ctx context.Context, over net.Conn, proto string, upgrade bool, cert *tls.Certificate, verify func(tls.ConnectionState) error) (*tls.Conn, error) {
	cfg := &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it: by identity, not by host name
		VerifyConnection:   verify,
		NextProtos:         []string{proto},
	}
	if upgrade {
		cfg.NextProtos = nil
	}
	if cert != nil {
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil }
	}
	tc := tls.Client(over, cfg)
	if err := tc.HandshakeContext(ctx); err != nil {
		return nil, err
	}
	return tc, nil
}

// conn is a connection that speaks one of our protocols.
type conn struct {
	net.Conn
	tls *tls.Conn
	raw net.Conn
	// addr is the server that was dialled; relayed: it passes everything on to
	// the one that leads.
	addr    string
	relayed bool
}

func (c *conn) upgrade(ctx context.Context, proto string) error {
	if dl, ok := ctx.Deadline(); ok {
		_ = c.tls.SetDeadline(dl)
		defer func() { _ = c.tls.SetDeadline(time.Time{}) }()
	}
	_, err := fmt.Fprintf(c.tls, "GET %s HTTP/1.1\r\nHost: dunlin\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", upgradePath, proto)
	if err != nil {
		return fmt.Errorf("link: upgrade: %w", err)
	}
	br := bufio.NewReader(c.tls)
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		return fmt.Errorf("link: upgrade: %w", err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return fmt.Errorf("link: upgrade: the server answered %s", resp.Status)
	}
	if n := br.Buffered(); n > 0 {
		// Servers speak second in all our protocols.
		return fmt.Errorf("link: upgrade: %d bytes too early", n)
	}
	return nil
}

// permanent says that trying again with the same credentials cannot help.
func permanent(err error) bool {
	return errors.Is(err, pki.ErrUntrusted) || errors.Is(err, pki.ErrRevoked)
}

// targets are the addresses to try, with their ports, each once: those that
// the servers told, and the join line's as the fallback for ever.
func targets(lists ...[]string) []string {
	var out []string
	add := func(a string) {
		if a != "" && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	for _, l := range lists {
		for _, a := range l {
			if hp, err := pki.WithPort(a); err == nil {
				add(hp)
			}
		}
	}
	return out
}

// dialStagger is how long one address may stay silent before the next is
// tried beside it: two dead servers must not cost a node its lease.
const dialStagger = 700 * time.Millisecond

// shuffled keeps nodes that lost the same server from all going to the same
// next one.
func shuffled(list []string) []string {
	out := slices.Clone(list)
	rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// connectAny takes the first address that answers: by ALPN, or by upgrade.
func (d dialer) connectAny(ctx context.Context, addrs []string, proto string, cert *tls.Certificate, verify func(tls.ConnectionState) error) (*conn, error) {
	if len(addrs) == 0 {
		return nil, errors.New("link: no server address is known")
	}
	return attempt.First(ctx, dialStagger, addrs, func(ctx context.Context, a string) (*conn, error) {
		return d.connect(ctx, a, proto, cert, verify)
	}, func(c *conn) { _ = c.Close() })
}

func (d dialer) connect(ctx context.Context, addr, proto string, cert *tls.Certificate, verify func(tls.ConnectionState) error) (*conn, error) {
	c, err := d.tls(ctx, addr, proto, false, cert, verify)
	if err == nil || permanent(err) || ctx.Err() != nil {
		return c, err
	}
	if !errors.Is(err, errNoALPN) && !handshakeBroken(err) {
		return nil, err
	}
	c, uerr := d.tls(ctx, addr, proto, true, cert, verify)
	if uerr != nil {
		return nil, err
	}
	return c, nil
}

// handshakeBroken says that TCP worked and TLS did not: it was cut off, or
// the other side refused the protocol's name.
func handshakeBroken(err error) bool {
	var op *net.OpError
	var alert tls.AlertError
	switch {
	case errors.As(err, &alert), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return true
	case errors.As(err, &op):
		return op.Op == "read" || op.Op == "remote error"
	}
	return false
}
