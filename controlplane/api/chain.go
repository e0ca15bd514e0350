package api

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// request is one request on its way through the chain.
type request struct {
	*http.Request
	w        *response
	info     requestInfo
	user     *auth.User
	identity string // who counts for the limits: the user before it acts as another
	release  func() // gives back what a large body took; nil if nothing
	listed   *place // of a list that is made and sent; nil if it has none
	warnings []string
	kind     *manifests.Kind // nil for what is not stored
}

// response records what was answered. It passes Flush and deadlines through
// http.ResponseController.
type response struct {
	http.ResponseWriter
	code int
}

func (w *response) WriteHeader(code int) {
	if w.code == 0 && code >= http.StatusOK { // what comes before is no answer yet
		w.code = code
	}
	w.ResponseWriter.WriteHeader(code)
}

// Hijack serves http.ResponseController: whoever takes the connection over
// has answered.
func (w *response) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err == nil && w.code == 0 {
		w.code = http.StatusSwitchingProtocols
	}
	return c, rw, err
}

func (w *response) Write(b []byte) (int, error) {
	if w.code == 0 {
		w.code = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap serves http.ResponseController.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// ServeHTTP implements http.Handler: authenticate, authorize, limit, dispatch.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	rq := &request{Request: r, w: &response{ResponseWriter: w}, info: parseInfo(r)}
	if rq.info.resource {
		rq.kind = manifests.ByResource(rq.info.gvr)
	}
	defer func() {
		p := recover()
		if p != nil && p != http.ErrAbortHandler { //nolint:errorlint // the panic value itself, not an error chain
			s.metrics.panics.Inc()
			s.cfg.Log.Error("api request panicked", "method", r.Method, "path", r.URL.Path, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			if rq.w.code == 0 {
				s.fail(rq, apierrors.NewInternalError(errors.New("the request handler panicked; the server's log has the details")))
				p = nil
			} else {
				p = http.ErrAbortHandler // too late for an answer: cut the connection
			}
		}
		s.metrics.observe(&rq.info, rq.kind != nil, max(rq.w.code, http.StatusOK), time.Since(start))
		if p != nil {
			panic(p)
		}
	}()
	w.Header().Set("Cache-Control", "no-cache, private")
	if !rq.info.proxied() {
		d, err := s.timeout(rq)
		if err != nil {
			d = s.cfg.RequestTimeout
		}
		r.Body = inTime(w, r.Body, start.Add(d))
	}
	if err := s.serve(rq); err != nil {
		s.fail(rq, err)
	}
}

func (s *Server) serve(rq *request) error {
	switch rq.Method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
	default:
		if rq.Method == http.MethodOptions && rq.info.proxied() {
			break
		}
		rq.info.verb = "other"
		return methodNotAllowed(&rq.info)
	}
	if err := s.catchUp(rq); err != nil {
		return err
	}
	user, ok, err := s.cfg.Authenticator.Authenticate(rq.Request)
	if err != nil || !ok {
		if err != nil {
			s.cfg.Log.Debug("api request not authenticated", "remote", rq.RemoteAddr, "err", err)
		}
		return auth.Unauthorized()
	}
	rq.identity = user.Name
	defer func() {
		rq.listed.leave()
		if rq.release != nil {
			rq.release()
		}
	}()
	if rq.user, err = auth.Impersonate(rq.Context(), s.cfg.Authorizer, user, rq.Header); err != nil {
		return err
	}
	if rq.user != user {
		s.cfg.Log.Debug("api request as another user", "user", user.Name, "as", rq.user.Name, "verb", rq.info.verb, "path", rq.URL.Path)
	}
	a := rq.info.attributes(rq.user)
	if allowed, reason := s.cfg.Authorizer.Authorize(rq.Context(), a); !allowed {
		return auth.Forbidden(a, reason)
	}
	ctx := auth.WithUser(rq.Context(), rq.user)
	pool, kind := s.limiter.short, "request"
	if rq.info.long() {
		pool, kind = s.limiter.long, "watch"
		var cancel context.CancelFunc
		ctx, cancel = s.untilClosed(ctx)
		defer cancel()
	} else {
		d, err := s.timeout(rq)
		if err != nil {
			return err
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, d)
		defer cancel()
	}
	release, err := pool.acquire(ctx, rq.identity)
	if err != nil {
		s.metrics.rejected.WithLabelValues(kind).Inc()
		return apierrors.NewTooManyRequests("too many requests are running; please try again later", 1)
	}
	defer release()
	rq.Request = rq.WithContext(ctx)
	if rq.Body != nil && !rq.info.proxied() {
		rq.Body = http.MaxBytesReader(rq.w, rq.Body, MaxBody)
	}
	if s.elsewhere(rq) {
		return nil
	}
	if rq.info.resource {
		return s.serveResource(rq)
	}
	return s.serveOther(rq)
}

// untilClosed ends long requests when the server closes.
func (s *Server) untilClosed(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.closing, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// timeout honours the client's hint if it is shorter than ours.
func (s *Server) timeout(rq *request) (time.Duration, error) {
	v := rq.URL.Query().Get("timeout")
	if v == "" {
		return s.cfg.RequestTimeout, nil
	}
	d, err := time.ParseDuration(v)
	if err != nil {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("invalid timeout specified in the request URL - %v", err))
	}
	if d <= 0 || d > s.cfg.RequestTimeout {
		return s.cfg.RequestTimeout, nil
	}
	return d, nil
}

func (s *Server) serveOther(rq *request) error {
	path := rq.URL.Path
	switch {
	case isHealth(path):
		return s.health(rq)
	case strings.HasPrefix(path, "/openapi") && s.cfg.OpenAPI != nil:
		s.cfg.OpenAPI.ServeHTTP(rq.w, rq.Request)
	case (path == "/version" || path == "/version/" || path == "/api" || path == "/apis" || strings.HasPrefix(path, "/api/") || strings.HasPrefix(path, "/apis/")) && s.cfg.Discovery != nil:
		s.cfg.Discovery.ServeHTTP(rq.w, rq.Request)
	case s.cfg.Extra != nil:
		s.cfg.Extra.ServeHTTP(rq.w, rq.Request)
	default:
		return pathNotFound()
	}
	return nil
}

// ignoreWrite: a client that is gone needs no answer.
func ignoreWrite(error) error { return nil }

// fail answers with a Status. If the answer has begun there is nothing left
// to say: the connection is cut, so that a client sees it is incomplete.
func (s *Server) fail(rq *request, err error) {
	if rq.w.code != 0 {
		s.cfg.Log.Debug("api answer ended early", "path", rq.URL.Path, "err", err)
		panic(http.ErrAbortHandler)
	}
	status := statusOf(err)
	if status.Code == http.StatusInternalServerError {
		s.cfg.Log.Error("api request failed", "method", rq.Method, "path", rq.URL.Path, "err", err)
	}
	at, negErr := s.codecs.negotiate(rq.Request, false, false)
	if negErr != nil {
		at = answerType{info: s.codecs.infos[0], contentType: s.codecs.infos[0].MediaType}
	}
	if d := status.Details; d != nil && d.RetryAfterSeconds > 0 {
		rq.w.Header().Set("Retry-After", strconv.Itoa(int(d.RetryAfterSeconds)))
	}
	if status.Code == http.StatusUnauthorized {
		rq.w.Header().Set("WWW-Authenticate", `Bearer realm="dunlin"`)
	}
	s.write(rq, at, int(status.Code), &status)
}

// statusOf turns any error into what clients understand.
func statusOf(err error) metav1.Status {
	var st apierrors.APIStatus
	var tooLarge *http.MaxBytesError
	var body *bodyError
	var out metav1.Status
	switch {
	case errors.As(err, &st):
		out = st.Status()
	case errors.Is(err, state.ErrTooLarge):
		out = apierrors.NewRequestEntityTooLargeError(err.Error()).Status()
	case errors.As(err, &tooLarge):
		out = apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("limit is %d", tooLarge.Limit)).Status()
	case errors.As(err, &body) && errors.Is(err, os.ErrDeadlineExceeded):
		out = metav1.Status{Status: metav1.StatusFailure, Code: http.StatusRequestTimeout, Reason: metav1.StatusReasonTimeout, Message: "the request's body did not arrive in time"}
	case errors.As(err, &body):
		out = apierrors.NewBadRequest(body.Error()).Status()
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		out = apierrors.NewTimeoutError("request did not complete within the allotted timeout", 1).Status()
	default:
		out = metav1.Status{Status: metav1.StatusFailure, Code: http.StatusInternalServerError, Reason: metav1.StatusReasonInternalError, Message: err.Error()}
	}
	if out.Code == 0 {
		out.Code = http.StatusInternalServerError
	}
	out.Kind, out.APIVersion = "Status", "v1"
	return out
}

func pathNotFound() error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusNotFound, Reason: metav1.StatusReasonNotFound,
		Message: "the server could not find the requested resource", Details: &metav1.StatusDetails{},
	}}
}

func methodNotAllowed(in *requestInfo) error {
	e := apierrors.NewMethodNotSupported(in.gvr.GroupResource(), in.verb)
	e.ErrStatus.Message = "the server does not allow this method on the requested resource"
	return e
}

// warn queues a Warning header; what was already said is not said again.
func (rq *request) warn(text string) {
	const most = 64 // headers have limits; the rest would help nobody
	for _, w := range rq.warnings {
		if w == text {
			return
		}
	}
	if len(rq.warnings) < most {
		rq.warnings = append(rq.warnings, text)
	}
}

// writeWarnings sends what was queued: RFC 7234 section 5.5, code 299.
func (rq *request) writeWarnings() {
	for _, text := range rq.warnings {
		text = strings.Map(func(c rune) rune {
			if c < ' ' || c == 0x7f {
				return ' '
			}
			return c
		}, text)
		const longest = 1024
		if len(text) > longest {
			text = strings.ToValidUTF8(text[:longest], "") + "..."
		}
		rq.w.Header().Add("Warning", `299 - "`+strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(text)+`"`)
	}
	rq.warnings = nil
}
