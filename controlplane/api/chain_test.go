package api

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/api/auth/reviews"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
)

func TestLimiterIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSlots(4, 8)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var held []func()
		for range 2 {
			r, err := s.acquire(ctx, "greedy")
			if err != nil {
				t.Fatal(err)
			}
			held = append(held, r)
		}
		// The third must wait although slots are free.
		var wg sync.WaitGroup
		got := make(chan string, 8)
		wait := func(id string) {
			wg.Go(func() {
				r, err := s.acquire(ctx, id)
				if err != nil {
					got <- id + ": " + err.Error()
					return
				}
				got <- id
				r()
			})
		}
		wait("greedy")
		synctest.Wait()
		if len(got) != 0 {
			t.Fatalf("one identity took more than its half: %s", <-got)
		}
		r, err := s.acquire(ctx, "modest")
		if err != nil {
			t.Fatal(err)
		}
		r()
		if len(got) != 0 {
			t.Fatal("a slot of another identity went over the share")
		}
		held[0]()
		synctest.Wait()
		if id := <-got; id != "greedy" {
			t.Fatal(id)
		}
		// A full queue refuses at once; a waiter whose time is up leaves.
		again, err := s.acquire(ctx, "greedy")
		if err != nil {
			t.Fatal(err)
		}
		short, stop := context.WithTimeout(ctx, time.Second)
		defer stop()
		if _, err := s.acquire(short, "greedy"); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("waited out: %v", err)
		}
		for range 4 {
			wait("greedy")
		}
		synctest.Wait()
		if _, err := s.acquire(ctx, "greedy"); !errors.Is(err, errBusy) {
			t.Errorf("full queue: %v", err)
		}
		again()
		held[1]()
		wg.Wait()
		if s.inUse() != 0 || s.queued != 0 || len(s.by) != 0 || len(s.turns) != 0 {
			t.Errorf("left over: used %d queued %d identities %d turns %v", s.inUse(), s.queued, len(s.by), s.turns)
		}
	})
}

func TestTooManyRequests(t *testing.T) {
	enter, leave := make(chan struct{}), make(chan struct{})
	w := newWorld(t, func(c *Config) {
		c.MaxInFlight = 2
		c.Extra = http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
			enter <- struct{}{}
			<-leave
			rw.WriteHeader(http.StatusNoContent)
		})
	})
	var wg sync.WaitGroup
	for range 1 {
		wg.Go(func() { w.do("GET", "/extra", "") })
	}
	<-enter
	r := w.do("GET", pods+"?timeout=50ms", "")
	if r.code != http.StatusTooManyRequests || r.header.Get("Retry-After") != "1" || at(r.json(t), "reason") != "TooManyRequests" {
		t.Errorf("HTTP %d %v %s", r.code, r.header, r.body)
	}
	close(leave)
	wg.Wait()
	w.want(200, "GET", pods, "")
}

func TestPanicIsAnAnswer(t *testing.T) {
	reg := prometheus.NewRegistry()
	w := newWorld(t, func(c *Config) {
		c.Metrics = reg
		c.Extra = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("boom") })
	})
	if m := w.want(500, "GET", "/boom", ""); at(m, "reason") != "InternalError" || strings.Contains(fmt.Sprint(m), "boom") {
		t.Errorf("answer %v", m)
	}
	w.want(200, "GET", pods, "")
	fams, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range fams {
		seen[f.GetName()] = true
	}
	for _, name := range []string{"dunlin_api_requests_total", "dunlin_api_request_duration_seconds", "dunlin_api_panics_total", "dunlin_api_inflight"} {
		if !seen[name] {
			t.Errorf("no metric %s", name)
		}
	}
}

// cutOff is a proposer whose leader is out of reach.
type cutOff struct {
	state.Proposer
	cut *atomic.Bool
}

func (c cutOff) Barrier(ctx context.Context) error {
	if c.cut.Load() {
		return state.ErrNoQuorum
	}
	return c.Proposer.Barrier(ctx)
}

func (c cutOff) Leadership() (uint64, bool) {
	term, leads := c.Proposer.Leadership()
	return term, leads && !c.cut.Load()
}

func TestWithoutQuorum(t *testing.T) {
	w := newWorld(t)
	w.cut.Store(true)
	// Just started: what is here may be nothing, which nobody must believe.
	for _, path := range []string{pods, pods + "?resourceVersion=0", "/version"} {
		if m := w.want(503, "GET", path, ""); at(m, "details", "retryAfterSeconds") != 1.0 {
			t.Errorf("%s before the state is there: %v", path, m)
		}
	}
	if r := w.do("GET", "/livez", ""); r.code != 200 {
		t.Errorf("livez: HTTP %d", r.code)
	}
	w.cut.Store(false)
	w.want(200, "GET", pods, "")
	w.cut.Store(true)
	r := w.do("GET", pods, "")
	if r.code != 200 || !strings.Contains(r.header.Get("Warning"), "may be out of date: no quorum") {
		t.Errorf("HTTP %d, warning %q", r.code, r.header.Get("Warning"))
	}
	if r := w.do("GET", pods+"/nowhere", ""); r.code != 404 || !strings.Contains(r.header.Get("Warning"), "may be out of date") {
		t.Errorf("that there is none may be out of date, too: HTTP %d, warning %q", r.code, r.header.Get("Warning"))
	}
	if r := w.do("GET", pods+"?resourceVersion=0", ""); r.header.Get("Warning") != "" {
		t.Errorf("any version was asked, warning %q", r.header.Get("Warning"))
	}
	// What a write does not find may be there all the same.
	w.want(503, "DELETE", pods+"/nowhere", "")
	w.want(503, "DELETE", pods, "")
	w.want(503, "POST", pods+"/nowhere/eviction", `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"nowhere","namespace":"default"}}`)
	w.local.SetTerm(0)
	m := w.want(503, "POST", pods, podJSON("a"))
	if at(m, "reason") != "ServiceUnavailable" || at(m, "details", "retryAfterSeconds") != 1.0 {
		t.Errorf("write without a leader: %v", m)
	}
}

type fakeLogs struct{ err error }

func (f fakeLogs) Logs(_ context.Context, p *corev1.Pod, o *corev1.PodLogOptions, w io.Writer) error {
	if f.err != nil {
		return f.err
	}
	_, err := fmt.Fprintf(w, "%s/%s tail=%d\n", p.Name, o.Container, *o.TailLines)
	return err
}

func TestLogs(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Logs = fakeLogs{} })
	w.want(201, "POST", pods, podJSON("a"))
	if r := w.do("GET", pods+"/a/log?tailLines=3", ""); r.code != 200 || string(r.body) != "a/c tail=3\n" || r.header.Get("Content-Type") != "text/plain" {
		t.Errorf("HTTP %d %s %v", r.code, r.body, r.header)
	}
	w.want(400, "GET", pods+"/a/log?container=x", "")
	w.want(422, "GET", pods+"/a/log?tailLines=-1", "")
	w.want(404, "GET", pods+"/b/log", "")
	w = newWorld(t, func(c *Config) { c.Logs = fakeLogs{err: apierrors.NewBadRequest("container is waiting to start")} })
	w.want(201, "POST", pods, podJSON("a"))
	w.want(400, "GET", pods+"/a/log", "")
}

type fakeNodes struct{ breaks bool }

func (f fakeNodes) Metrics(_ context.Context, node string, w io.Writer) error {
	if node == "away" {
		return apierrors.NewServiceUnavailable("node away is not connected")
	}
	_, err := fmt.Fprintf(w, "of_node{name=%q} 1\n", node)
	if f.breaks && err == nil {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// TestNodeProxy: a node's figures are for administrators, as upstream's
// nodes/proxy is for who may get it, and nothing else is reached that way.
func TestNodeProxy(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Nodes = fakeNodes{} })
	const nodes = "/api/v1/nodes"
	for _, n := range []string{"n1", "away"} {
		w.want(201, "POST", nodes, `{"apiVersion":"v1","kind":"Node","metadata":{"name":"`+n+`"}}`)
	}
	if r := w.do("GET", nodes+"/n1/proxy/metrics", ""); r.code != 200 || string(r.body) != "of_node{name=\"n1\"} 1\n" || r.header.Get("Content-Type") != metricsText {
		t.Errorf("HTTP %d %s %v", r.code, r.body, r.header)
	}
	m := w.want(403, "GET", nodes+"/n1/proxy/metrics", "", "Authorization", "Bearer nobody")
	if msg, _ := at(m, "message").(string); !strings.Contains(msg, `cannot get resource "nodes/proxy" in API group ""`) {
		t.Errorf("refusal: %v", m)
	}
	w.want(401, "GET", nodes+"/n1/proxy/metrics", "", "Authorization", "Bearer wrong")
	if r := w.do("GET", nodes+"/n1:10250/proxy/healthz", ""); r.code != 200 || string(r.body) != "ok" {
		t.Errorf("healthz: HTTP %d %s", r.code, r.body)
	}
	w.want(503, "GET", nodes+"/away/proxy/healthz", "")
	w.want(400, "GET", nodes+"/n1:22/proxy/healthz", "")
	w.want(503, "GET", nodes+"/away/proxy/metrics", "")
	w.want(404, "GET", nodes+"/none/proxy/metrics", "")
	for _, path := range []string{"", "/", "/exec/default/p/c", "/metrics/cadvisor", "/../metrics"} {
		if r := w.do("GET", nodes+"/n1/proxy"+path, ""); r.code != 404 {
			t.Errorf("proxy%s: HTTP %d %s", path, r.code, r.body)
		}
	}
	w.want(405, "POST", nodes+"/n1/proxy/metrics", "{}")
	w.want(405, "DELETE", nodes+"/n1/proxy/metrics", "")
	w = newWorld(t, func(c *Config) { c.Nodes = fakeNodes{breaks: true} })
	w.want(201, "POST", nodes, `{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"}}`)
	req, err := http.NewRequestWithContext(t.Context(), "GET", w.http.URL+nodes+"/n1/proxy/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer admin")
	resp, err := w.http.Client().Do(req)
	if err == nil {
		_, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close()
	}
	if err == nil {
		t.Error("an answer that broke off looks whole")
	}
	w = newWorld(t)
	w.want(201, "POST", nodes, `{"apiVersion":"v1","kind":"Node","metadata":{"name":"n1"}}`)
	w.want(404, "GET", nodes+"/n1/proxy/metrics", "")
}

func TestReviewsAreServed(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		c.Reviews = reviews.All(reviews.Config{Authorizer: c.Authorizer, Tokens: auth.UnionTokens(), Objects: c.Registry, Clock: clock.System})
	})
	path := "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
	body := `{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectAccessReview","spec":{"resourceAttributes":{"verb":"create","resource":"pods"}}}`
	if m := w.want(201, "POST", path, body); at(m, "status", "allowed") != true {
		t.Errorf("%v", m)
	}
	w.want(406, "POST", path, body, "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
	w.want(405, "GET", path, "")
}

func TestApplyCBORAndOldEviction(t *testing.T) {
	w := newWorld(t)
	b, err := direct.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]any{"name": "c"}, "data": map[string]any{"a": "b"},
	})
	if err != nil {
		t.Fatal(err)
	}
	m := w.want(201, "PATCH", cms+"/c?fieldManager=x", string(b), "Content-Type", "application/apply-patch+cbor")
	if at(m, "data", "a") != "b" {
		t.Errorf("%v", m)
	}
	w.want(201, "POST", pods, podJSON("a"))
	w.want(201, "POST", pods+"/a/eviction", `{"apiVersion":"policy/v1beta1","kind":"Eviction","metadata":{"name":"a","namespace":"default"}}`)
	w.want(404, "GET", pods+"/a", "")
}

func TestPutCreatesWhereUpstreamDoes(t *testing.T) {
	w := newWorld(t)
	leases := "/apis/coordination.k8s.io/v1/namespaces/default/leases"
	lease := `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"l"},"spec":{"holderIdentity":"a"}}`
	w.want(201, "PUT", leases+"/l", lease)
	w.want(422, "PUT", leases+"/l", lease) // no version
	w.want(404, "PUT", cms+"/none", cmJSON("none", "v"))
	w.want(400, "PUT", cms+"/other", cmJSON("none", "v"))
	w.want(405, "DELETE", "/api/v1/pods", "")
	w.want(400, "POST", cms, `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"x"}}`)
	w.want(400, "POST", cms, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"x","namespace":"elsewhere"}}`)
	w.want(400, "POST", cms, `{`)
}

func TestParseInfo(t *testing.T) {
	for _, c := range []struct {
		method, target            string
		verb, resource, sub, name string
		namespace                 string
		isResource                bool
	}{
		{"GET", "/api/v1/pods", "list", "pods", "", "", "", true},
		{"GET", "/api/v1/namespaces/n/pods/p/log", "get", "pods", "log", "p", "n", true},
		{"GET", "/apis/apps/v1/namespaces/n/deployments?watch=1", "watch", "deployments", "", "", "n", true},
		{"GET", "/apis/apps/v1/namespaces/n/deployments?watch=false", "list", "deployments", "", "", "n", true},
		{"GET", "/api/v1/watch/namespaces/n/pods", "watch", "pods", "", "", "n", true},
		{"GET", "/api/v1/namespaces/n", "get", "namespaces", "", "n", "", true},
		{"PUT", "/api/v1/namespaces/n/finalize", "update", "namespaces", "finalize", "n", "", true},
		{"PATCH", "/api/v1/namespaces/n/status", "patch", "namespaces", "status", "n", "", true},
		{"DELETE", "/api/v1/namespaces/n/pods", "deletecollection", "pods", "", "", "n", true},
		{"GET", "/api/v1/pods?fieldSelector=metadata.name%3Dp", "list", "pods", "", "p", "", true},
		{"GET", "/apis/apps/v1", "get", "", "", "", "", false},
		{"GET", "/api/v1", "get", "", "", "", "", false},
		{"GET", "/api/v1/namespaces//pods", "get", "", "", "", "", false},
		{"GET", "/", "get", "", "", "", "", false},
	} {
		in := parseInfo(httptest.NewRequest(c.method, c.target, nil))
		if in.verb != c.verb || in.resource != c.isResource || (c.isResource && (in.gvr.Resource != c.resource || in.subresource != c.sub || in.name != c.name || in.namespace != c.namespace)) {
			t.Errorf("%s %s: %+v", c.method, c.target, in)
		}
	}
}

func FuzzContinueToken(f *testing.F) {
	f.Add(continueToken{RV: 5, Namespace: "n", Name: "a", Sent: 3}.encode())
	f.Add("e30")
	f.Fuzz(func(t *testing.T, s string) {
		tok, err := decodeToken(s)
		if err != nil {
			if !apierrors.IsBadRequest(err) {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		again, err := decodeToken(tok.encode())
		if err != nil || again != tok {
			t.Errorf("%+v became %+v, %v", tok, again, err)
		}
	})
}

func FuzzAccept(f *testing.F) {
	f.Add("application/json;as=Table;v=v1;g=meta.k8s.io,application/json;q=0.5,*/*")
	f.Fuzz(func(_ *testing.T, s string) {
		c := newCodecs()
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header["Accept"] = []string{s}
		_, _ = c.negotiate(r, true, true) // must not panic
	})
}
