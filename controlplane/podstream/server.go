// Package podstream is the clients' side of exec, attach and port-forward:
// what kubectl speaks (WebSocket or SPDY/3.1, in all the versions of both that
// are about) on one end, and streams of wire/mux from the node on the other.
//
// Owner and goroutines: none but those of a request, which have all ended
// when ServeStream returns. What waits for a client is bounded by the window
// of its stream to the node (mux.Window); a client that does not read holds
// up the program whose output it asked for, and nothing else.
package podstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gorilla/websocket"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

const (
	// pingInterval is how often a client is written to, so that one that is gone
	// is noticed also while it is not being read from. An answer is not asked
	// for: one that is paused is there.
	pingInterval = 15 * time.Second
	// openTimeout is how long a client may take to open its streams.
	openTimeout = 30 * time.Second
	// lingerTimeout is how long a client may take to leave once it was told the
	// end: whoever closes first could make it lose what was told last.
	lingerTimeout = 10 * time.Second
	// copyBuffer is one direction's; with a frame's header it fits a TLS record.
	copyBuffer = 16<<10 - 64
)

// Nodes opens sessions to nodes; *nodeapi.Server is one.
type Nodes interface {
	// Session opens an exec, attach or portforward. Errors are
	// *apierrors.StatusError; what its streams say when it breaks is for people.
	Session(ctx context.Context, pod *corev1.Pod, kind, container string) (*mux.Mux, error)
}

// Config of a Server. Nodes is required.
type Config struct {
	Nodes Nodes
	// Idle ends a stream over which nothing went for so long, default 4 hours
	// as the kubelet's.
	Idle    time.Duration
	Metrics prometheus.Registerer // nil: none
	Log     *slog.Logger
}

// Server implements api.Streams.
type Server struct {
	c     Config
	log   *slog.Logger
	open  *prometheus.GaugeVec
	total *prometheus.CounterVec
}

// errIdle ends a stream that is not used.
type errIdle time.Duration

// Error implements error.
func (e errIdle) Error() string {
	return fmt.Sprintf("nothing went over the stream for %s: it was ended", time.Duration(e))
}

var errClosing = errors.New("this server is being stopped: try again")

// New returns a Server.
func New(c Config) (*Server, error) {
	if c.Nodes == nil {
		return nil, errors.New("podstream: nodes are required")
	}
	if c.Idle == 0 {
		c.Idle = 4 * time.Hour
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		c: c, log: c.Log,
		open:  prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "dunlin_pod_streams", Help: "Streams of clients into pods open now, by kind."}, []string{"kind"}),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dunlin_pod_streams_total", Help: "Streams of clients into pods, by kind and protocol."}, []string{"kind", "protocol"}),
	}
	for _, k := range []string{kindExec, kindAttach, kindForward, kindLog} {
		s.open.WithLabelValues(k)
	}
	if c.Metrics != nil {
		for _, m := range []prometheus.Collector{s.open, s.total} {
			if err := c.Metrics.Register(m); err != nil {
				return nil, fmt.Errorf("podstream: metrics: %w", err)
			}
		}
	}
	return s, nil
}

// Kinds, as the sub-resources are called.
const (
	kindExec    = "exec"
	kindAttach  = "attach"
	kindForward = "portforward"
)

// Protocols of what goes over an upgraded connection.
const (
	v1Channel   = "channel.k8s.io"
	v1Base64    = "base64.channel.k8s.io"
	v2Channel   = "v2.channel.k8s.io"
	v3Channel   = "v3.channel.k8s.io"
	v4Channel   = "v4.channel.k8s.io"
	v4Base64    = "v4.base64.channel.k8s.io"
	v5Channel   = "v5.channel.k8s.io"
	forwardSPDY = "portforward.k8s.io"
	tunnelled   = "SPDY/3.1+portforward.k8s.io"
)

// Of each the newest first: the first that the client knows is taken.
var (
	execWebSocket    = []string{v5Channel, v4Channel, v4Base64, v1Channel, v1Base64}
	execSPDY         = []string{v4Channel, v3Channel, v2Channel, v1Channel}
	forwardWebSocket = []string{tunnelled, v5Channel, v4Channel, v4Base64}
)

// ServeStream implements api.Streams.
func (s *Server) ServeStream(w http.ResponseWriter, r *http.Request, pod *corev1.Pod, kind, container string) error {
	ws := websocket.IsWebSocketUpgrade(r)
	if !ws && !headerHas(r, "Upgrade", "SPDY/3.1") {
		return apierrors.NewBadRequest("Upgrade request required: use kubectl, or 'dunlin " + cliName(kind) + "'")
	}
	if kind == kindForward {
		return s.serveForward(w, r, pod, ws)
	}
	o, err := execOptions(r, kind)
	if err != nil {
		return err
	}
	proto, err := negotiate(r, ws, execWebSocket, execSPDY, v1Channel)
	if err != nil {
		return err
	}
	m, err := s.c.Nodes.Session(r.Context(), pod, kind, container)
	if err != nil {
		return err
	}
	defer m.Close("")
	var c console
	if ws {
		c, err = newWSConsole(w, r, proto)
	} else {
		c, err = newSPDYConsole(w, r, proto, o)
	}
	if err != nil {
		s.log.Debug("stream not upgraded", "kind", kind, "err", err)
		return nil // the client has its answer, or is gone
	}
	defer s.count(kind, proto, ws)()
	s.exec(r.Context(), m, o, c)
	return nil
}

func cliName(kind string) string {
	if kind == kindForward {
		return "port-forward"
	}
	return kind
}

func (s *Server) count(kind, proto string, ws bool) (done func()) {
	transport := "spdy"
	if ws {
		transport = "websocket"
	}
	s.total.WithLabelValues(kind, transport+"/"+proto).Inc()
	s.open.WithLabelValues(kind).Inc()
	return s.open.WithLabelValues(kind).Dec
}

// execOptions are those of the query.
func execOptions(r *http.Request, kind string) (*wire.ExecOpen, error) {
	o := &corev1.PodExecOptions{} // those of attach are the same, without a command
	if err := manifests.ParameterCodec().DecodeParameters(r.URL.Query(), corev1.SchemeGroupVersion, o); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	out := &wire.ExecOpen{Stdin: o.Stdin, Stdout: o.Stdout, Stderr: o.Stderr && !o.TTY, TTY: o.TTY}
	if kind == kindExec {
		out.Command = o.Command
		if len(o.Command) == 0 {
			return nil, apierrors.NewBadRequest("you must specify at least one command")
		}
	}
	if !out.Stdin && !out.Stdout && !out.Stderr {
		return nil, apierrors.NewBadRequest("you must specify at least 1 of stdin, stdout, stderr")
	}
	return out, nil
}

// negotiate takes the newest protocol that both know. Who names none gets the
// oldest.
func negotiate(r *http.Request, ws bool, forWS, forSPDY []string, oldest string) (string, error) {
	header, ours := "X-Stream-Protocol-Version", forSPDY
	if ws {
		header, ours = "Sec-WebSocket-Protocol", forWS
	}
	theirs := headerList(r, header)
	if len(theirs) == 0 {
		return oldest, nil
	}
	for _, p := range ours {
		if slices.Contains(theirs, p) {
			return p, nil
		}
	}
	e := apierrors.NewBadRequest(fmt.Sprintf("no protocol in common: the client offers %s, this server knows %s", strings.Join(theirs, ", "), strings.Join(ours, ", ")))
	e.ErrStatus.Code = http.StatusForbidden // which old clients fall back on
	return "", e
}

// headerList splits a header that may be repeated and may hold lists.
func headerList(r *http.Request, name string) (out []string) {
	for _, v := range r.Header.Values(name) {
		for p := range strings.SplitSeq(v, ",") {
			if p = strings.TrimSpace(p); p != "" {
				out = append(out, p)
			}
		}
	}
	return out
}

func headerHas(r *http.Request, name, value string) bool {
	return slices.ContainsFunc(headerList(r, name), func(v string) bool { return strings.EqualFold(v, value) })
}

// idleTimer fails m once it was not touched for the configured time.
func (s *Server) idleTimer(m *mux.Mux) (touch, stop func()) {
	t := time.AfterFunc(s.c.Idle, func() { m.Fail(errIdle(s.c.Idle)) })
	return func() { t.Reset(s.c.Idle) }, func() { t.Stop() }
}

// why says for the client why a session to a node ended.
func why(err error) string {
	var reset *mux.ResetError
	if errors.As(err, &reset) {
		return reset.Reason
	}
	var idle errIdle
	for _, told := range []error{errClosing, errStall, mux.ErrLost} {
		if errors.Is(err, told) {
			return told.Error()
		}
	}
	if errors.As(err, &idle) {
		return idle.Error()
	}
	return "the stream from the node broke (its agent or its network failed): " + err.Error()
}
