// Package podproxy passes HTTP requests on to ports of pods, for the
// sub-resource proxy of pods and services. The connections go through the
// nodes' own outbound ones, as those of port-forward do: a pod behind NAT is
// reached, and one that no route leads to from here.
//
// Owner and goroutines: those of http.Transport for each open connection, and
// one reader for each session with a node. Bounded: connections for each pod
// (connsMost), idle ones by time (idleTimeout), HTML by the size of one token
// (tokenMost); nothing is kept of a body.
package podproxy

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/wire/mux"
)

const (
	// connsPort bounds the connections to one port of a pod: more requests
	// wait. connsMost bounds those to all ports of one.
	connsPort, connsMost = 48, 60
	// connsIdle is how many unused connections are kept, and idleTimeout for
	// how long.
	connsIdle   = 64
	idleTimeout = 15 * time.Second
	// headerMost bounds the header of an answer, bytes.
	headerMost = 256 << 10
)

// Nodes opens sessions to nodes; *nodeapi.Server is one.
type Nodes interface {
	// Session opens a session of a pod; kind is portforward. Errors are
	// *apierrors.StatusError.
	Session(ctx context.Context, pod *corev1.Pod, kind, container string) (*mux.Mux, error)
}

// Config of a Server. Nodes is required.
type Config struct {
	Nodes Nodes
	// Idle ends a connection in use over which nothing went for so long,
	// default 4 hours as that of other streams.
	Idle time.Duration
	Log  *slog.Logger
}

// Server implements api.PodProxy.
type Server struct {
	c     Config
	log   *slog.Logger
	pods  *sessions
	tr    *http.Transport
	proxy *httputil.ReverseProxy
}

// New returns a Server. Close must be called.
func New(c Config) (*Server, error) {
	if c.Nodes == nil {
		return nil, errors.New("podproxy: nodes are required")
	}
	if c.Idle == 0 {
		c.Idle = 4 * time.Hour
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{c: c, log: c.Log}
	s.pods = &sessions{nodes: c.Nodes, idle: c.Idle, by: map[string]*session{}}
	s.tr = &http.Transport{
		DialContext: s.dial, DialTLSContext: s.dialTLS, DisableCompression: true,
		MaxIdleConns: connsIdle, MaxConnsPerHost: connsPort, IdleConnTimeout: idleTimeout, MaxResponseHeaderBytes: headerMost,
	}
	s.pods.full = s.tr.CloseIdleConnections
	s.proxy = &httputil.ReverseProxy{
		Transport: s.tr, FlushInterval: -1, Rewrite: rewriteRequest, ModifyResponse: rewriteResponse, ErrorHandler: failed,
		ErrorLog: log.New(discard{s.log}, "", 0),
	}
	return s, nil
}

// Close ends all connections that no request uses.
func (s *Server) Close() error {
	s.tr.CloseIdleConnections()
	return nil
}

// call is one request on its way.
type call struct {
	pod    *corev1.Pod
	to     *url.URL // scheme, port, path and query
	host   string   // what the pod's own addresses begin with
	prefix string   // what stands before the path in the client's address
	in     *http.Request
	w      http.ResponseWriter
	err    error
}

type callKey struct{}

func callOf(ctx context.Context) *call {
	c, _ := ctx.Value(callKey{}).(*call)
	return c
}

// ServeProxy implements api.PodProxy. An error comes before any answer.
func (s *Server) ServeProxy(w http.ResponseWriter, r *http.Request, pod *corev1.Pod, to *url.URL, prefix string) error {
	// The connections of one pod are never another's, whoever has its address
	// or its name after it.
	target := *to
	target.Host = string(pod.UID) + ":" + to.Port()
	c := &call{pod: pod, to: &target, host: to.Host, prefix: prefix, in: r, w: w}
	s.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callKey{}, c)))
	return c.err
}

// failed keeps why there is no answer.
func failed(_ http.ResponseWriter, r *http.Request, err error) {
	c := callOf(r.Context())
	var st apierrors.APIStatus
	switch {
	case errors.As(err, &st):
		c.err = err
	case r.Context().Err() != nil:
		c.err = r.Context().Err()
	default:
		c.err = apierrors.NewServiceUnavailable(fmt.Sprintf("error trying to reach service: %v", err))
	}
}

// Headers that are this server's business: what a client proved itself with
// is never a pod's to see.
func forServer(name string) bool {
	return name == "Authorization" || strings.HasPrefix(name, "Impersonate-") || strings.HasPrefix(name, "Dunlin-Forwarded-")
}

func rewriteRequest(p *httputil.ProxyRequest) {
	c := callOf(p.In.Context())
	u := *c.to
	p.Out.URL, p.Out.Host = &u, p.In.Host
	h := p.Out.Header
	for name := range h {
		if forServer(name) {
			h.Del(name)
		}
	}
	h["X-Forwarded-For"] = p.In.Header["X-Forwarded-For"]
	p.SetXForwarded()
	h.Set("X-Forwarded-Uri", c.prefix+u.EscapedPath())
	if _, ok := h["User-Agent"]; !ok {
		h.Set("User-Agent", "") // none, instead of Go's
	}
}

// discard takes what the proxy of the standard library would print.
type discard struct{ log *slog.Logger }

// Write implements io.Writer.
func (d discard) Write(p []byte) (int, error) {
	d.log.Debug("proxied request", "says", strings.TrimSpace(string(p)))
	return len(p), nil
}
