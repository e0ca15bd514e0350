package ingress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dunlin-project/dunlin/node/balance"
)

// errNoEndpoint: nothing of the Service is ready.
var errNoEndpoint = errors.New("no endpoint is ready")

// dialError: an endpoint could not be reached, so nothing was sent to it.
type dialError struct{ err error }

func (d *dialError) Error() string { return fmt.Sprintf("reach an endpoint: %v", d.err) }
func (d *dialError) Unwrap() error { return d.err }

// lateAnswer: nothing was answered for so long.
type lateAnswer time.Duration

func (l *lateAnswer) Error() string { return "no answer within " + time.Duration(*l).String() }

// upstream sends requests to endpoints, each to the one that is the least
// loaded then.
type upstream struct {
	c        *counters
	http1, h *http.Transport
}

func newUpstream(c *counters) *upstream {
	d := &net.Dialer{Timeout: dialTimeout}
	transport := func(h2c bool) *http.Transport {
		p := new(http.Protocols)
		p.SetHTTP1(!h2c)
		p.SetUnencryptedHTTP2(h2c)
		return &http.Transport{
			DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				c, err := d.DialContext(ctx, network, addr)
				if err != nil {
					return nil, &dialError{err}
				}
				return c, nil
			},
			Protocols: p, DisableCompression: true, MaxIdleConns: keepMost, MaxIdleConnsPerHost: keepEach, IdleConnTimeout: keepIdle,
			MaxResponseHeaderBytes: answerMost, ExpectContinueTimeout: time.Second,
			HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: connWindow, SendPingTimeout: pingAfter, PingTimeout: headerTimeout, WriteByteTimeout: bodyTimeout},
		}
	}
	return &upstream{c: c, http1: transport(false), h: transport(true)}
}

func (u *upstream) closeIdle() {
	u.http1.CloseIdleConnections()
	u.h.CloseIdleConnections()
}

// RoundTrip implements http.RoundTripper. Another endpoint is tried only while
// nothing of the request was sent: when one could not be reached.
func (u *upstream) RoundTrip(r *http.Request) (*http.Response, error) {
	to, ok := r.Context().Value(routeKey{}).(*route)
	if !ok {
		return nil, errNoEndpoint
	}
	var client netip.Addr
	if a, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		client = a.Addr().Unmap()
	}
	var tried map[*balance.Backend]bool
	failed := errNoEndpoint
	for range dialsMost {
		b := to.target.Pick(client, false, tried)
		if b == nil {
			break
		}
		b.Active.Add(1)
		resp, err := u.once(to, b, r)
		if err == nil {
			b.Reached()
			return resp, nil
		}
		b.Active.Add(-1)
		var d *dialError
		if !errors.As(err, &d) || r.Context().Err() != nil {
			return nil, err
		}
		b.Fail(time.Now())
		failed = err
		if tried == nil {
			tried = map[*balance.Backend]bool{}
		}
		tried[b] = true
	}
	return nil, failed
}

// once asks one endpoint.
func (u *upstream) once(to *route, b *balance.Backend, r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(r.Context())
	out := r.WithContext(ctx)
	at := *r.URL
	at.Host = b.Addr.String()
	out.URL = &at
	due := newDue(to.timeout, cancel)
	defer due.stop()
	if r.Body != nil && r.Body != http.NoBody {
		out.Body = &upload{r.Body, due.later}
	}
	t := u.http1
	if to.h2c {
		t = u.h
	}
	resp, err := t.RoundTrip(out)
	if err != nil {
		if cause := context.Cause(ctx); r.Context().Err() == nil && cause != nil {
			err = cause
		}
		cancel(nil)
		return nil, err
	}
	end := sync.OnceFunc(func() {
		cancel(nil)
		b.Active.Add(-1)
	})
	if rw, ok := resp.Body.(io.ReadWriteCloser); ok && resp.StatusCode == http.StatusSwitchingProtocols {
		resp.Body = u.keep(b, rw, end)
		return resp, nil
	}
	resp.Body = &download{resp.Body, end}
	return resp, nil
}

// keep counts a connection that was upgraded, until it is closed: by either
// side, or by the engine once it is idle and its endpoint ends.
func (u *upstream) keep(b *balance.Backend, rw io.ReadWriteCloser, end func()) io.ReadCloser {
	f := &balance.Flow{End: func() { _ = rw.Close() }}
	f.Moved.Store(time.Now().UnixNano())
	b.Add(f)
	end() // it counts as a connection from here on, not as a request
	u.c.upgraded.Add(1)
	u.c.answered(http.StatusSwitchingProtocols)
	return &upgraded{ReadWriteCloser: rw, f: f, end: sync.OnceFunc(func() {
		b.Remove(f)
		u.c.upgraded.Add(-1)
	}), c: u.c}
}

// due ends a request whose answer does not begin in time.
type due struct {
	mu    sync.Mutex
	after time.Duration
	timer *time.Timer // nil: never, or not any more
}

func newDue(after time.Duration, cancel context.CancelCauseFunc) *due {
	d := &due{after: after}
	if after > 0 {
		late := lateAnswer(after)
		d.timer = time.AfterFunc(after, func() { cancel(&late) })
	}
	return d
}

// later counts anew.
func (d *due) later() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Reset(d.after)
	}
}

// stop is for an answer that began: the rest of the request may still be on
// its way.
func (d *due) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

// upload is a request's body. The transport closes it when an endpoint cannot
// be reached, but the next one shall get it: the server closes the real one.
type upload struct {
	io.Reader
	moved func()
}

// Read implements io.Reader.
func (u *upload) Read(p []byte) (int, error) {
	n, err := u.Reader.Read(p)
	if err == nil {
		u.moved() // an answer is not due while there is something to send
	}
	return n, err
}

// Close implements io.Closer.
func (u *upload) Close() error { return nil }

// download is an answer's body.
type download struct {
	io.ReadCloser
	end func()
}

// Close implements io.Closer.
func (d *download) Close() error {
	defer d.end()
	return d.ReadCloser.Close()
}

// upgraded is a connection that speaks something else by now.
type upgraded struct {
	io.ReadWriteCloser
	f   *balance.Flow
	end func()
	c   *counters
	// read: bytes were read that the client has not got yet.
	read atomic.Bool
}

// Read implements io.Reader.
func (u *upgraded) Read(p []byte) (int, error) {
	if u.read.Swap(false) {
		u.f.Release() // who reads again has passed on what was read before
	}
	n, err := u.ReadWriteCloser.Read(p)
	if n > 0 {
		u.f.Hold(false)
		u.read.Store(true)
	}
	u.c.out.Add(int64(n))
	return n, err
}

// Write implements io.Writer.
func (u *upgraded) Write(p []byte) (int, error) {
	u.f.Hold(true)
	defer u.f.Release()
	n, err := u.ReadWriteCloser.Write(p)
	u.c.in.Add(int64(n))
	return n, err
}

// Close implements io.Closer.
func (u *upgraded) Close() error {
	defer u.end()
	return u.ReadWriteCloser.Close()
}
