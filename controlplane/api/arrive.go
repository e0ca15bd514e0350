package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// catchUp says whether this server has, once since its start, been as new as
// the leader. Before that its state is what the last snapshot held, or
// nothing: an empty list would be believed, and a token that is not there yet
// be refused for good. Afterwards an old answer is at least a true one.
func (s *Server) catchUp(rq *request) error {
	if s.caughtUp.Load() || isHealth(rq.URL.Path) || slices.Contains(s.cfg.EarlyPaths, rq.URL.Path) {
		return nil
	}
	ctx, cancel := context.WithTimeout(rq.Context(), 5*time.Second)
	defer cancel()
	if err := s.readState(ctx); err != nil {
		s.cfg.Log.Debug("api request before the state is there", "path", rq.URL.Path, "err", err)
		e := apierrors.NewServiceUnavailable("this server has just started and has not read the cluster's state yet: " + err.Error())
		e.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
		return e
	}
	return nil
}

// readState waits, once since the start, until all that the leader has
// committed is read.
func (s *Server) readState(ctx context.Context) error {
	if s.caughtUp.Load() {
		return nil
	}
	if err := s.cfg.Proposer.Barrier(ctx); err != nil {
		return err
	}
	s.caughtUp.Store(true)
	return nil
}

// CaughtUp tells the server that its state has been as new as the leader's,
// before a request had to find out.
func (s *Server) CaughtUp() { s.caughtUp.Store(true) }

// arriving is a request body that must be there in time: a client that sends
// it drop by drop would keep its connection, and its slot, for ever. The
// deadline ends with the body, since on HTTP/1.1 it would end a watch, too.
type arriving struct {
	io.ReadCloser
	rc *http.ResponseController
}

// inTime gives a body until at to arrive. w may be one that knows no
// deadlines, as in tests.
func inTime(w http.ResponseWriter, body io.ReadCloser, at time.Time) io.ReadCloser {
	if body == nil || body == http.NoBody {
		return body
	}
	a := &arriving{ReadCloser: body, rc: http.NewResponseController(w)}
	_ = a.rc.SetReadDeadline(at)
	return a
}

// Read implements io.Reader.
func (a *arriving) Read(p []byte) (int, error) {
	n, err := a.ReadCloser.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		_ = a.rc.SetReadDeadline(time.Time{})
	case err != nil:
		err = &bodyError{err}
	}
	return n, err
}

// bodyError says that a body did not come as announced: the client's fault,
// or its link's.
type bodyError struct{ err error }

func (e *bodyError) Error() string { return "read the request's body: " + e.err.Error() }
func (e *bodyError) Unwrap() error { return e.err }
