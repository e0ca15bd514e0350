package ingress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// acmePath is where ACME looks for the answer to its challenge (RFC 8555,
// 8.3): over HTTP, so it is never redirected.
const acmePath = "/.well-known/acme-challenge/"

type routeKey struct{}

// serve answers a request.
func (e *engine) serve(w http.ResponseWriter, r *http.Request) {
	answer := &response{ResponseWriter: w, rc: http.NewResponseController(w), c: &e.counters, h2: r.ProtoMajor == 2, patience: e.patience.body}
	// The server itself writes before and after us: "100 Continue", and what
	// ends an answer, which may come long after the last piece of it.
	defer answer.deadline()
	if !answer.h2 {
		answer.deadline()
	}
	if r.Body != nil && r.Body != http.NoBody {
		answer.body = newBody(r.Body, answer)
		r.Body = answer.body
	}
	if e.counters.requests.Add(1) > e.limit.Load() {
		w.Header().Set("Retry-After", "1")
		e.refuse(answer, faultBusy, http.StatusServiceUnavailable, "this node serves as many requests as it may; try again")
		e.counters.requests.Add(-1)
		return
	}
	defer e.counters.requests.Add(-1)
	if r.Method == http.MethodConnect {
		// This is no tunnel, and what a 2xx to it means backends do not know (RFC 9110, 9.3.6).
		e.refuse(answer, faultRoute, http.StatusMethodNotAllowed, "CONNECT is not served here")
		return
	}
	v, host := e.view.Load(), hostOf(r.Host)
	if r.TLS == nil {
		if secure, _ := lookup(v.router.secure, host); secure && !strings.HasPrefix(r.URL.Path, acmePath) {
			e.redirect(answer, r, host)
			return
		}
	} else if !sameCertificate(v, r, host) {
		// A connection is kept for the names of one certificate (RFC 9110, 15.5.20).
		e.refuse(answer, faultMisdirected, http.StatusMisdirectedRequest, "this connection was opened for another host; open a new one")
		return
	}
	to := v.router.find(host, r.URL.Path)
	if to == nil {
		e.refuse(answer, faultRoute, http.StatusNotFound, "no rule for this host and path")
		return
	}
	if to.target == nil {
		e.refuse(answer, faultEndpoint, http.StatusServiceUnavailable, to.why)
		return
	}
	e.proxy.ServeHTTP(answer, r.WithContext(context.WithValue(r.Context(), routeKey{}, to)))
}

// sameCertificate says whether a request's host is one that the connection's
// certificate stands for.
func sameCertificate(v *view, r *http.Request, host string) bool {
	name := hostOf(r.TLS.ServerName)
	return name == "" || name == host || v.certs.of(name) == v.certs.of(host)
}

func (e *engine) redirect(w http.ResponseWriter, r *http.Request, host string) {
	e.mu.Lock()
	_, port, _ := net.SplitHostPort(e.cfg.HTTPS)
	e.mu.Unlock()
	if port != "443" && port != "" {
		host = net.JoinHostPort(host, port)
	}
	http.Redirect(w, r, "https://"+host+r.URL.RequestURI(), http.StatusPermanentRedirect) //nolint:gosec // to the same host, which has a rule
}

// refuse answers in one line, which tells nothing of what is behind.
func (e *engine) refuse(w http.ResponseWriter, f fault, status int, why string) {
	e.counters.faults[f].Add(1)
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = fmt.Fprintf(w, "%d: %s\n", status, why)
}

// failed is the reverse proxy's: the request could not be passed on, and
// nothing was answered yet.
func (e *engine) failed(w http.ResponseWriter, r *http.Request, err error) {
	var slow *slowBody
	var broken *brokenBody
	var late *lateAnswer
	var unreachable *dialError
	answer, _ := w.(*response)
	switch {
	case errors.As(err, &slow), r.Context().Err() != nil && answer != nil && answer.late():
		e.refuse(w, faultBody, http.StatusRequestTimeout, "the request's body did not arrive in time")
	case errors.As(err, &broken) && r.Context().Err() == nil:
		e.refuse(w, faultBroken, http.StatusBadRequest, "the request's body cannot be read")
	case errors.As(err, &late):
		e.refuse(w, faultTimeout, http.StatusGatewayTimeout, "the service did not answer within "+time.Duration(*late).String())
	case errors.Is(err, errNoEndpoint):
		w.Header().Set("Retry-After", "1")
		e.refuse(w, faultEndpoint, http.StatusServiceUnavailable, "no instance of the service is ready")
	case errors.As(err, &unreachable):
		e.refuse(w, faultDial, http.StatusBadGateway, "the service cannot be reached")
	case strings.Contains(err.Error(), "response headers exceeded"): // net/http has no type for it
		e.refuse(w, faultBackend, http.StatusBadGateway, fmt.Sprintf("the header of the service's answer is larger than %d KiB", answerMost>>10))
	case r.Context().Err() != nil:
		panic(http.ErrAbortHandler) // the client is gone
	default:
		e.log.Debug("request failed", "error", err)
		e.refuse(w, faultBackend, http.StatusBadGateway, "the service broke off before it answered")
	}
}

// rewrite is the reverse proxy's: what a backend gets. Headers that a client
// made up about who forwarded are gone by now.
func rewrite(p *httputil.ProxyRequest) {
	for k := range p.Out.Header {
		// Programs behind CGI and its like cannot tell "_" from "-".
		name := strings.ToLower(strings.ReplaceAll(k, "_", "-"))
		if strings.HasPrefix(name, "x-forwarded-") || name == "forwarded" || name == "x-real-ip" || name == "true-client-ip" {
			delete(p.Out.Header, k)
		}
	}
	p.SetXForwarded()
	if client, _, err := net.SplitHostPort(p.In.RemoteAddr); err == nil {
		p.Out.Header.Set("X-Real-Ip", client) // what nginx's and Traefik's users know it by
	}
	_, port, err := net.SplitHostPort(p.In.Host)
	if err != nil {
		port = "80"
		if p.In.TLS != nil {
			port = "443"
		}
	}
	p.Out.Header.Set("X-Forwarded-Port", port)
	p.Out.Host = p.In.Host
	p.Out.URL.Scheme, p.Out.URL.Host, p.Out.URL.RawQuery = "http", "backend", p.In.URL.RawQuery
}

// buffers are httputil's for copying.
type buffers struct{ pool sync.Pool }

// Get implements httputil.BufferPool.
func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, copyBuffer)
}

// Put implements httputil.BufferPool.
func (b *buffers) Put(p []byte) { b.pool.Put(&p) }

// response counts, and gives a client so much time to take what is written.
type response struct {
	http.ResponseWriter
	rc    *http.ResponseController
	c     *counters
	h2    bool
	wrote bool
	// patience is how long the client may take nothing.
	patience time.Duration
	unread   atomic.Bool // there is more of the request's body
	body     *body       // nil: none
}

// Unwrap is for http.ResponseController.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (w *response) WriteHeader(status int) {
	if !w.wrote && (status >= 200 || status == http.StatusSwitchingProtocols) {
		w.wrote = true
		w.c.answered(status)
	}
	w.deadline()
	w.ResponseWriter.WriteHeader(status)
	w.rest()
}

// rest is for a stream of HTTP/2 that has nothing to write for a while.
func (w *response) rest() {
	if w.h2 {
		_ = w.rc.SetWriteDeadline(time.Time{})
	}
}

// deadline gives the client time to take something. On a stream of HTTP/2 it
// would end one that waits, too: there the connection has WriteByteTimeout.
func (w *response) deadline() {
	d := w.patience
	if w.unread.Load() {
		d *= 2 // the server may wait for the body first
	}
	_ = w.rc.SetWriteDeadline(time.Now().Add(d))
}

// Write implements http.ResponseWriter.
func (w *response) Write(p []byte) (int, error) {
	if !w.wrote {
		w.wrote = true
		w.c.answered(http.StatusOK)
	}
	w.deadline()
	n, err := w.ResponseWriter.Write(p)
	w.rest()
	w.c.out.Add(int64(n))
	return n, err
}

// slowBody is a client that stopped sending.
type slowBody struct{ error }

// Unwrap gives what the connection said.
func (s *slowBody) Unwrap() error { return s.error }

// brokenBody is one that is no body, such as chunks of a wrong form.
type brokenBody struct{ error }

// Unwrap gives what was wrong.
func (b *brokenBody) Unwrap() error { return b.error }

// body is a request's, each piece of which has to come in time.
type body struct {
	io.ReadCloser
	w *response

	mu   sync.Mutex
	slow bool
}

// newBody gives the first piece its time. What nobody reads, because the
// answer does not depend on it, is read by the server itself with HTTP/1,
// before it answers.
func newBody(b io.ReadCloser, w *response) *body {
	if !w.h2 {
		w.unread.Store(true)
		_ = w.rc.SetReadDeadline(time.Now().Add(w.patience))
	}
	return &body{ReadCloser: b, w: w}
}

// Read implements io.Reader. With HTTP/2 the deadline is taken back each time:
// it would end the request while nobody reads, because the backend is slow.
// With HTTP/1 it ends what reads, and after the last piece that is who looks
// whether the client is still there.
func (b *body) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_ = b.w.rc.SetReadDeadline(time.Now().Add(b.w.patience))
	n, err := b.ReadCloser.Read(p)
	if b.w.h2 || errors.Is(err, io.EOF) {
		b.w.unread.Store(false)
		_ = b.w.rc.SetReadDeadline(time.Time{})
	}
	b.w.c.in.Add(int64(n))
	var t net.Error
	if err != nil && errors.As(err, &t) && t.Timeout() {
		b.slow, err = true, &slowBody{err}
	} else if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) { // that one's client is gone
		err = &brokenBody{err}
	}
	return n, err
}

// late says whether the client was slow, once the request is cancelled. With
// HTTP/1 a read that fails for whatever reason cancels it, too, and either may
// be seen first.
func (w *response) late() bool {
	if w.body == nil {
		return false
	}
	w.body.mu.Lock() // what still reads ends with the request
	defer w.body.mu.Unlock()
	return w.body.slow
}
