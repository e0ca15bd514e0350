package api

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
)

// TestHealthAsUpstream: what stands here is what kube-apiserver says.
func TestHealthAsUpstream(t *testing.T) {
	broken := &atomic.Bool{}
	w := newWorld(t, func(c *Config) {
		c.Checks = []HealthCheck{{"disk", func(context.Context) error {
			if broken.Load() {
				return errors.New("it is full")
			}
			return nil
		}}}
	})
	w.cut.Store(true)
	says := func(path string, code int, want string) {
		t.Helper()
		r := w.do("GET", path, "")
		if r.code != code || string(r.body) != want || !strings.HasPrefix(r.header.Get("Content-Type"), "text/plain") {
			t.Errorf("%s: HTTP %d %q (%s), want %d %q", path, r.code, r.body, r.header.Get("Content-Type"), code, want)
		}
	}
	const withheld = " failed: reason withheld\n"
	says("/readyz", 500, "[+]ping ok\n[+]disk ok\n[-]state"+withheld+"readyz check failed\n")
	says("/livez", 200, "ok")
	if r := w.do("GET", "/readyz/state", ""); r.code != 500 || !strings.HasPrefix(string(r.body), "internal server error: the cluster's state has not been read yet: ") {
		t.Errorf("HTTP %d %s", r.code, r.body)
	}
	w.cut.Store(false)
	says("/readyz", 200, "ok")
	w.cut.Store(true) // what was read once is here
	says("/readyz?verbose", 200, "[+]ping ok\n[+]disk ok\n[+]state ok\nreadyz check passed\n")
	says("/healthz?verbose=1", 200, "[+]ping ok\n[+]disk ok\n[+]state ok\nhealthz check passed\n")
	says("/livez?verbose", 200, "[+]ping ok\nlivez check passed\n")
	says("/readyz/disk", 200, "ok")

	broken.Store(true)
	says("/readyz", 500, "[+]ping ok\n[-]disk"+withheld+"[+]state ok\nreadyz check failed\n")
	says("/readyz/disk", 500, "internal server error: it is full\n")
	says("/readyz/ping", 200, "ok")
	says("/livez", 200, "ok")
	says("/readyz?exclude=disk", 200, "ok")
	says("/readyz?verbose&exclude=disk&exclude=nothing", 200,
		"[+]ping ok\n[+]disk excluded: ok\n[+]state ok\nwarn: some health checks cannot be excluded: no matches for \"nothing\"\nreadyz check passed\n")
	for _, path := range []string{"/readyz/nothing", "/livez/disk", "/readyz/disk/more"} {
		w.want(404, "GET", path, "")
	}
}
