package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// HealthCheck is one thing that /readyz and /healthz look at.
type HealthCheck struct {
	Name  string
	Check func(ctx context.Context) error
}

// healthTimeout bounds all checks of a request together.
const healthTimeout = 5 * time.Second

func isHealth(path string) bool {
	for _, p := range []string{"/healthz", "/livez", "/readyz"} {
		if path == p || strings.HasPrefix(path, p+"/") {
			return true
		}
	}
	return false
}

// checks are those of an endpoint ("readyz"). A process that answers lives:
// nothing else that may fail gets better by starting it again, which is what
// a failing livez is for.
func (s *Server) checks(endpoint string) []HealthCheck {
	list := []HealthCheck{{"ping", func(context.Context) error { return nil }}}
	if endpoint == "livez" {
		return list
	}
	return append(append(list, s.cfg.Checks...), HealthCheck{"state", s.stateCheck})
}

// stateCheck fails while this server has not read the cluster's state since it
// was started, which requests for objects wait for.
func (s *Server) stateCheck(ctx context.Context) error {
	if err := s.readState(ctx); err != nil {
		return fmt.Errorf("the cluster's state has not been read yet: %w", err)
	}
	return nil
}

// health answers in upstream's form: "ok", or with ?verbose and when
// something failed a line for each check. Reasons are told by the paths of
// single checks, which not everybody may read.
func (s *Server) health(rq *request) error {
	ctx, cancel := context.WithTimeout(rq.Context(), healthTimeout)
	defer cancel()
	endpoint, single, _ := strings.Cut(strings.TrimPrefix(rq.URL.Path, "/"), "/")
	checks := s.checks(endpoint)
	if single != "" {
		i := slices.IndexFunc(checks, func(c HealthCheck) bool { return c.Name == single })
		if i < 0 {
			return pathNotFound()
		}
		if err := checks[i].Check(ctx); err != nil {
			return sayHealth(rq, http.StatusInternalServerError, fmt.Sprintf("internal server error: %v\n", err))
		}
		return sayHealth(rq, http.StatusOK, "ok")
	}
	query := rq.URL.Query()
	out, err := runChecks(ctx, endpoint, checks, query["exclude"])
	if err != nil {
		s.cfg.Log.Debug("a health check failed", "path", rq.URL.Path, "err", err)
		return sayHealth(rq, http.StatusInternalServerError, out)
	}
	if _, verbose := query["verbose"]; !verbose {
		out = "ok"
	}
	return sayHealth(rq, http.StatusOK, out)
}

// runChecks words the result of an endpoint's checks as upstream does.
func runChecks(ctx context.Context, endpoint string, checks []HealthCheck, exclude []string) (string, error) {
	var out strings.Builder
	var errs []error
	unmatched := slices.DeleteFunc(slices.Clone(exclude), func(x string) bool {
		return slices.ContainsFunc(checks, func(c HealthCheck) bool { return c.Name == x })
	})
	for _, c := range checks {
		if slices.Contains(exclude, c.Name) {
			fmt.Fprintf(&out, "[+]%s excluded: ok\n", c.Name)
		} else if err := c.Check(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", c.Name, err))
			fmt.Fprintf(&out, "[-]%s failed: reason withheld\n", c.Name)
		} else {
			fmt.Fprintf(&out, "[+]%s ok\n", c.Name)
		}
	}
	if len(unmatched) > 0 {
		slices.Sort(unmatched)
		for i, x := range unmatched {
			unmatched[i] = strconv.Quote(x)
		}
		fmt.Fprintf(&out, "warn: some health checks cannot be excluded: no matches for %s\n", strings.Join(slices.Compact(unmatched), ","))
	}
	word := "passed"
	if len(errs) > 0 {
		word = "failed"
	}
	fmt.Fprintf(&out, "%s check %s\n", endpoint, word)
	return out.String(), errors.Join(errs...)
}

func sayHealth(rq *request, code int, text string) error {
	h := rq.w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	rq.w.WriteHeader(code)
	_, err := rq.w.Write([]byte(text))
	return ignoreWrite(err)
}
