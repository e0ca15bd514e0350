package api

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/api/auth/reviews"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// PodLogs streams a container's log. Errors before the first byte become the
// HTTP answer (use *apierrors.StatusError); after it, the connection ends.
// What is written is flushed to the client as it comes.
type PodLogs interface {
	Logs(ctx context.Context, pod *corev1.Pod, opts *corev1.PodLogOptions, w io.Writer) error
}

// NodeMetrics writes a node's figures as Prometheus text. Errors before the
// first byte become the HTTP answer.
type NodeMetrics interface {
	Metrics(ctx context.Context, node string, w io.Writer) error
}

// Streams serves exec, attach and port-forward of a pod, and what is logged
// to a WebSocket. An error becomes the HTTP answer; without one the connection
// was taken over, or answered. container is empty for port-forward.
type Streams interface {
	ServeLogs(w http.ResponseWriter, r *http.Request, logs func(ctx context.Context, w io.Writer) error) error
	ServeStream(w http.ResponseWriter, r *http.Request, pod *corev1.Pod, subresource, container string) error
}

// PodProxy passes a request on to a port of a pod. to is the pod's address,
// port, path and query, prefix what stands before the path in the client's
// address. An error comes before any answer.
type PodProxy interface {
	ServeProxy(w http.ResponseWriter, r *http.Request, pod *corev1.Pod, to *url.URL, prefix string) error
}

// Config of a Server. Registry, Proposer, Authenticator and Authorizer are
// required.
type Config struct {
	Registry      *registry.Registry
	Proposer      state.Proposer // for linearizable reads
	Authenticator auth.Authenticator
	Authorizer    auth.Authorizer

	Discovery http.Handler // /api, /apis and their group versions, /version
	OpenAPI   http.Handler // /openapi/
	// Types gives what server-side apply knows of types; it is asked on first
	// use and again, and remembers its answer. Nil leaves managedFields alone
	// and refuses apply patches.
	Types   func() (managedfields.TypeConverter, error)
	Reviews []reviews.Entry // kinds that are answered and never stored
	Logs    PodLogs         // nil: 501
	Nodes   NodeMetrics     // nil: nodes have no proxy (404)
	Usage   NodeUsage       // nil: there is no metrics.k8s.io
	Streams Streams         // nil: 404
	Proxy   PodProxy        // nil: pods and services have no proxy (404)
	// Placements explains where pods could run; nil: 404.
	Placements Placements
	// Checks are what /readyz and /healthz look at beside this server itself.
	Checks []HealthCheck
	// Elsewhere passes on what only the leader can answer; nil: all is answered
	// here.
	Elsewhere Elsewhere
	// EarlyPaths are paths of Extra that are answered also before the state is
	// there.
	EarlyPaths []string
	// LeaderPaths are paths of Extra that only the leader can answer.
	LeaderPaths []string
	// Extra serves authorized requests of any other path; nil is 404.
	Extra http.Handler

	Metrics prometheus.Registerer // nil: none
	Clock   clock.Clock           // nil is the machine's
	Log     *slog.Logger

	// MaxInFlight bounds ordinary requests that run at the same time
	// (default 256), MaxWatches long ones: watches, logs, streams (default
	// 10,000). One identity never gets more than half of either.
	MaxInFlight, MaxWatches int
	// RequestTimeout ends an ordinary request, default 60 s.
	RequestTimeout time.Duration
	// BookmarkInterval of watches that ask for bookmarks, default 1 minute.
	BookmarkInterval time.Duration
	// WriteDeadline cuts a watcher, or a reader of logs, that does not read
	// for so long, default 30 s.
	WriteDeadline time.Duration
	// PageTTL is how long a continue token stays consistent, default 5
	// minutes; MaxPages how many list versions are kept for that, default 32.
	PageTTL  time.Duration
	MaxPages int
}

// MaxBody is the largest request body, bytes: a Helm release with its
// history entry must fit.
const MaxBody = 3 << 20

type reviewKey struct {
	gvr schema.GroupVersionResource
	sub string
}

// Server is the API as an http.Handler.
type Server struct {
	cfg      Config
	codecs   codecs
	limiter  *limiter
	metrics  *metrics
	pages    *pages
	encoded  *encodings
	managers *managers
	reviews  map[reviewKey]reviews.Entry

	caughtUp atomic.Bool // see catchUp

	closing context.Context // ends at Close
	stop    context.CancelFunc
}

// New returns a Server.
func New(cfg Config) (*Server, error) {
	if cfg.Registry == nil || cfg.Proposer == nil || cfg.Authenticator == nil || cfg.Authorizer == nil {
		return nil, errors.New("api: registry, proposer, authenticator and authorizer are required")
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.System
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	setDefault(&cfg.MaxInFlight, 256)
	setDefault(&cfg.MaxWatches, 10_000)
	setDefault(&cfg.RequestTimeout, time.Minute)
	setDefault(&cfg.BookmarkInterval, time.Minute)
	setDefault(&cfg.WriteDeadline, 30*time.Second)
	setDefault(&cfg.PageTTL, 5*time.Minute)
	setDefault(&cfg.MaxPages, 32)
	s := &Server{
		cfg: cfg, codecs: newCodecs(), limiter: newLimiter(cfg.MaxInFlight, cfg.MaxWatches),
		pages: newPages(cfg.PageTTL, cfg.MaxPages), encoded: newEncodings(4 << 20),
		managers: newManagers(cfg.Types),
		reviews:  make(map[reviewKey]reviews.Entry, len(cfg.Reviews)),
	}
	for _, e := range cfg.Reviews {
		s.reviews[reviewKey{e.GVR, e.Subresource}] = e
	}
	s.closing, s.stop = context.WithCancel(context.Background())
	var err error
	if s.metrics, err = newMetrics(cfg.Metrics, s.limiter); err != nil {
		return nil, err
	}
	return s, nil
}

func setDefault[T ~int | ~int64](v *T, def T) {
	if *v == 0 {
		*v = def
	}
}

// Close ends every watch and frees what paginated lists hold. Requests that
// are running finish; their http.Server waits for them.
func (s *Server) Close() error {
	s.stop()
	s.pages.close()
	return nil
}
