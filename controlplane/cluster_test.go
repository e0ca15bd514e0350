package controlplane

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/pki"
)

// testServer is a whole server on a real socket.
type testServer struct {
	*Server
	t     *testing.T
	dir   string
	admin *http.Client
	url   string
	stop  func()
	done  chan struct{}
	err   error // of Run, once done is closed
}

func startServer(t *testing.T, name, dir string, join *pki.JoinLine) *testServer {
	t.Helper()
	l := listenFor(t, name)
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("DUNLIN_TEST_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil)).With("on", name)
	}
	s, err := New(t.Context(), Config{
		StateDir: dir, Listener: l, Advertise: []string{l.Addr().String()}, Name: name, Join: join, Clock: clock.System, Log: log, Metrics: prometheus.NewRegistry(),
	})
	must(t, err)
	ts := &testServer{Server: s, t: t, dir: dir, url: "https://" + l.Addr().String(), done: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer close(ts.done)
		ts.err = s.Run(ctx)
	}()
	ts.stop = sync.OnceFunc(func() { cancel(); <-ts.done })
	t.Cleanup(ts.stop)
	ts.admin = ts.client("admin", pki.MastersGroup)
	return ts
}

// listenFor lets one of the servers have an IPv6 address, where the machine
// has them.
func listenFor(t *testing.T, name string) net.Listener {
	t.Helper()
	if name == "two" {
		l, err := net.Listen("tcp", "[::1]:0")
		if err == nil {
			return l
		}
		t.Logf("no IPv6 here: %v", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	return l
}

// client is an API client with a certificate.
func (s *testServer) client(user string, groups ...string) *http.Client {
	s.t.Helper()
	cert, key, err := s.ca.IssueUser(user, groups, time.Hour)
	must(s.t, err)
	return s.clientWith(tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key})
}

func (s *testServer) clientWith(c tls.Certificate) *http.Client {
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: s.ca.Pool(), Certificates: []tls.Certificate{c}, MinVersion: tls.VersionTLS13}}
	s.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func (s *testServer) do(c *http.Client, method, path string, body any, header ...string) (int, string, http.Header) {
	s.t.Helper()
	var b []byte
	if body != nil {
		var err error
		b, err = json.Marshal(body)
		must(s.t, err)
	}
	req, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, bytes.NewReader(b))
	must(s.t, err)
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	must(s.t, err)
	defer func() { _ = resp.Body.Close() }()
	out, err := io.ReadAll(resp.Body)
	must(s.t, err)
	return resp.StatusCode, string(out), resp.Header
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, f func() error) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited for: %s; last: %v", what, err)
		}
	}
}

// joinLine waits for the cluster's first moments to pass.
func (s *testServer) joinLine(server bool) *pki.JoinLine {
	s.t.Helper()
	var line pki.JoinLine
	eventually(s.t, "a join line", func() (err error) {
		line, err = s.JoinLine(s.t.Context(), nodeapi.TokenOptions{Server: server})
		return err
	})
	return &line
}

func (s *testServer) roles() (string, error) {
	list, err := s.listServers(s.t.Context())
	var out []string
	for _, i := range list.Items {
		out = append(out, i.Name+"="+i.Role)
	}
	return strings.Join(out, " "), err
}

func (s *testServer) waitRoles(want string) {
	s.t.Helper()
	eventually(s.t, want, func() error {
		got, err := s.roles()
		if err == nil && got != want {
			err = errors.New(got)
		}
		return err
	})
}

// A cluster grows from one server to three and back; every server takes
// every request, as the user who made it.
func TestGrowServeShrink(t *testing.T) {
	one := startServer(t, "one", t.TempDir(), nil)
	two := startServer(t, "two", t.TempDir(), one.joinLine(true))
	one.waitRoles("one=leader two=non-voter")
	if list, err := two.listServers(t.Context()); err != nil || !strings.Contains(list.Items[1].Reason, "2 voters would tolerate no more failures than 1") {
		t.Errorf("why the second has no vote: %+v, %v", list, err)
	}
	three := startServer(t, "three", t.TempDir(), two.joinLine(true)) // by way of a follower
	one.waitRoles("one=leader three=voter two=voter")

	t.Run("keys", func(t *testing.T) {
		for _, f := range []string{"pki/ca.key", "pki/seal.key", "pki/service-account.key"} {
			want, err := os.ReadFile(filepath.Join(one.dir, f))
			must(t, err)
			for _, s := range []*testServer{two, three} {
				if got, err := os.ReadFile(filepath.Join(s.dir, f)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s of %s: %v", f, s.cfg.Name, err)
				}
				if st, err := os.Stat(filepath.Join(s.dir, f)); err != nil || st.Mode().Perm() != 0o600 {
					t.Errorf("%s of %s: %v %v", f, s.cfg.Name, st.Mode(), err)
				}
			}
		}
	})
	t.Run("every server answers", func(t *testing.T) {
		for i, s := range []*testServer{one, two, three} {
			name := fmt.Sprintf("c%d", i)
			code, body, _ := s.do(s.admin, "POST", "/api/v1/namespaces/default/secrets", map[string]any{
				"metadata": map[string]any{"name": name}, "stringData": map[string]string{"k": "v" + name}})
			if code != http.StatusCreated {
				t.Fatalf("create on %s: %d %s", s.cfg.Name, code, body)
			}
			for _, other := range []*testServer{one, two, three} {
				code, body, h := other.do(other.admin, "GET", "/api/v1/namespaces/default/secrets/"+name, nil)
				if code != http.StatusOK || !strings.Contains(body, `"k":"`) || h.Get("Warning") != "" {
					t.Errorf("read on %s: %d %s %v", other.cfg.Name, code, body, h)
				}
			}
			// Events are in the leader's memory.
			code, body, _ = s.do(s.admin, "POST", "/api/v1/namespaces/default/events", map[string]any{
				"metadata": map[string]any{"name": name, "namespace": "default"}, "involvedObject": map[string]any{"kind": "Secret", "name": name, "namespace": "default"},
				"reason": "Made", "type": "Normal"})
			if code != http.StatusCreated {
				t.Fatalf("event on %s: %d %s", s.cfg.Name, code, body)
			}
			for _, other := range []*testServer{one, two, three} {
				code, body, _ := other.do(other.admin, "GET", "/apis/events.k8s.io/v1/namespaces/default/events", nil)
				if code != http.StatusOK || !strings.Contains(body, `"name":"`+name+`"`) {
					t.Errorf("events on %s: %d %s", other.cfg.Name, code, body)
				}
			}
		}
	})
	t.Run("users stay who they are", func(t *testing.T) {
		nobody := two.client("nobody")
		if code, body, _ := two.do(nobody, "GET", "/api/v1/namespaces/default/events", nil); code != http.StatusForbidden || !strings.Contains(body, `\"nobody\"`) {
			t.Errorf("a user without rights, on a follower: %d %s", code, body)
		}
		forged := `{"Name":"root","Groups":["system:masters"]}`
		for _, s := range []*testServer{one, two} {
			h := []string{forwardedUser, b64(forged), forwardedBy, two.raft.ServerID()}
			if code, body, _ := s.do(s.client("nobody"), "GET", "/api/v1/namespaces/default/secrets", nil, h...); code != http.StatusForbidden {
				t.Errorf("a forged user on %s: %d %s", s.cfg.Name, code, body)
			}
			anon := s.clientWith(tls.Certificate{})
			if code, body, _ := s.do(anon, "GET", "/api/v1/namespaces/default/secrets", nil, h...); code != http.StatusForbidden && code != http.StatusUnauthorized {
				t.Errorf("a forged user without a certificate on %s: %d %s", s.cfg.Name, code, body)
			}
		}
		// A server may speak for others, and the leader looks at what they may.
		c, err := two.cert.GetClientCertificate(nil)
		must(t, err)
		as := func(user string) int {
			code, _, _ := one.do(one.clientWith(*c), "GET", "/api/v1/namespaces/default/secrets", nil, forwardedUser, b64(user), forwardedBy, two.raft.ServerID())
			return code
		}
		if got := as(forged); got != http.StatusOK {
			t.Errorf("passed on by a server: %d", got)
		}
		if got := as(`{"Name":"nobody"}`); got != http.StatusForbidden {
			t.Errorf("passed on by a server for nobody: %d", got)
		}
	})
	t.Run("wrong lines", func(t *testing.T) {
		for name, c := range map[string]struct {
			line *pki.JoinLine
			want string
		}{
			"a node's line":       {one.joinLine(false), "dunlin token create --server"},
			"another cluster's":   {&pki.JoinLine{ID: one.joinLine(true).ID, Secret: "x", Pin: "wrong", Servers: one.cfg.Advertise}, "not the one that the join line names"},
			"a wrong secret":      {&pki.JoinLine{ID: one.joinLine(true).ID, Secret: "x", Pin: one.ca.Pin(), Servers: one.cfg.Advertise}, "secret is wrong"},
			"a line that is used": {usedLine(t, one), "was used already"},
		} {
			dir := t.TempDir()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			must(t, err)
			_, err = New(t.Context(), Config{StateDir: dir, Listener: l, Advertise: []string{l.Addr().String()}, Join: c.line, Metrics: prometheus.NewRegistry(), Clock: clock.System, Log: slog.New(slog.DiscardHandler)})
			_ = l.Close()
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v", name, err)
			}
			if have, _ := hasIdentity(dir); have {
				t.Errorf("%s: the folder is a server's now", name)
			}
		}
	})
	t.Run("remove", func(t *testing.T) {
		code, body, _ := two.do(two.admin, "POST", RemoveServerPath, RemoveServerRequest{Server: "nonesuch"})
		if code != http.StatusNotFound {
			t.Errorf("%d %s", code, body)
		}
		code, body, _ = two.do(two.admin, "POST", RemoveServerPath, RemoveServerRequest{Server: "three"})
		if code != http.StatusOK {
			t.Fatalf("%d %s", code, body)
		}
		one.waitRoles("one=leader two=non-voter")
		<-three.done
		if three.err == nil || !strings.Contains(three.err.Error(), "was removed from the cluster") {
			t.Errorf("the removed server ended with: %v", three.err)
		}
		code, body, _ = one.do(one.admin, "POST", RemoveServerPath, RemoveServerRequest{Server: "one"})
		if code != http.StatusBadRequest || !strings.Contains(body, "only one that votes") {
			t.Errorf("the last voter: %d %s", code, body)
		}
	})
}

// usedLine is a line that another key has used.
func usedLine(t *testing.T, s *testServer) *pki.JoinLine {
	t.Helper()
	line := s.joinLine(true)
	must(t, join(t.Context(), Config{StateDir: t.TempDir(), Join: line, Clock: clock.System, Log: slog.New(slog.DiscardHandler)}))
	return line
}

func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

// Two of three servers stop. A write is answered with a reason and a time to
// come back, a read with a warning, and neither takes long.
func TestAnswersWithoutQuorum(t *testing.T) {
	one := startServer(t, "one", t.TempDir(), nil)
	two := startServer(t, "two", t.TempDir(), one.joinLine(true))
	three := startServer(t, "three", t.TempDir(), one.joinLine(true))
	one.waitRoles("one=leader three=voter two=voter")
	two.stop()
	three.stop()
	eventually(t, "nobody leads", func() error {
		if id, _ := one.raft.Leader(); id != "" {
			return fmt.Errorf("%s", id)
		}
		return nil
	})
	object := map[string]any{"metadata": map[string]any{"name": "x"}, "data": map[string]string{"a": "b"}}
	code, body, h := one.do(one.admin, "POST", "/api/v1/namespaces/default/configmaps", object)
	if code != http.StatusServiceUnavailable || h.Get("Retry-After") == "" || !strings.Contains(body, "no quorum of servers") || !strings.Contains(body, `"kind":"Status"`) {
		t.Errorf("write: %d %v %s", code, h, body)
	}
	code, body, h = one.do(one.admin, "GET", "/api/v1/namespaces", nil)
	if code != http.StatusOK || !strings.Contains(h.Get("Warning"), "may be out of date: no quorum of servers") || !strings.Contains(body, `"name":"default"`) {
		t.Errorf("read: %d %v", code, h)
	}
	code, body, h = one.do(one.admin, "GET", "/api/v1/events", nil)
	if code != http.StatusServiceUnavailable || h.Get("Retry-After") == "" {
		t.Errorf("what only a leader has: %d %v %s", code, h, body)
	}
	code, body, _ = one.do(one.admin, "GET", "/readyz?verbose", nil)
	if code != http.StatusInternalServerError || body != "[+]ping ok\n[+]consensus ok\n[+]disk ok\n[-]leader failed: reason withheld\n[+]state ok\nreadyz check failed\n" {
		t.Errorf("ready: %d %s", code, body)
	}
	if code, body, _ = one.do(one.admin, "GET", "/readyz/leader", nil); code != http.StatusInternalServerError || !strings.Contains(body, "no leader yet") {
		t.Errorf("leader: %d %s", code, body)
	}
	if code, _, _ := one.do(one.admin, "GET", "/livez", nil); code != http.StatusOK {
		t.Errorf("alive: %d", code)
	}
}
