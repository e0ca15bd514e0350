package ingress

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

func tlsOf(secret string, hosts ...string) func(*wire.Ingress) {
	return func(i *wire.Ingress) { i.TLS = append(i.TLS, wire.IngressTLS{Hosts: hosts, Secret: secret}) }
}

// Hosts and paths lead to their Services; what leads nowhere says so in one
// line without a word of what is behind.
func TestRequestsFindTheirService(t *testing.T) {
	w := newWorld(t)
	w.service("a", false, backend(t, says("a")))
	w.service("b", false, backend(t, says("b")))
	w.service("none", false)
	w.service("dead", false, unused.Port(t).String())
	w.service("rude", false, backend(t, func(rw http.ResponseWriter, _ *http.Request) {
		c, _, _ := http.NewResponseController(rw).Hijack()
		_ = c.Close()
	}))
	w.service("wide", false, backend(t, func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("X-Wide", strings.Repeat("x", 2*answerMost))
	}))
	w.service("slow", false, backend(t, func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	w.rule("a", "a.example", "/", "a")
	w.rule("b", "a.example", "/b", "b")
	for _, s := range []string{"none", "dead", "rude", "wide", "missing"} {
		w.rule(s, s+".example", "/", s)
	}
	w.rule("port", "port.example", "/", "a", func(i *wire.Ingress) { i.Rules[0].Paths[0].Backend.Port = 81 })
	w.rule("name", "name.example", "/", "a", func(i *wire.Ingress) {
		i.Rules[0].Paths[0].Backend = wire.IngressBackend{Service: "a", Name: "q"}
	})
	w.item(wire.ItemService+"d/ext", &wire.Service{ExternalName: "elsewhere.example"})
	w.rule("ext", "ext.example", "/", "ext")
	w.rule("bucket", "bucket.example", "/", "")
	w.rule("slow", "slow.example", "/", "slow", func(i *wire.Ingress) { i.Timeout = 1000 })
	w.publish()
	c := w.client()
	w.expect(c, "http://a.example/x", 200, "a")
	w.expect(c, "http://a.example/b/x", 200, "b")
	for u, want := range map[string]string{
		"http://other.example/":   "404: no rule for this host and path",
		"http://missing.example/": "503: this address leads to a service that does not exist",
		"http://port.example/":    "503: this address leads to a port that the service does not have",
		"http://name.example/":    "503: this address leads to a port that the service does not have",
		"http://ext.example/":     "503: this address leads to a service of type ExternalName, which the ingress does not serve",
		"http://bucket.example/":  "503: this address leads to something else than a service, which the ingress does not serve",
		"http://none.example/":    "503: no instance of the service is ready",
		"http://dead.example/":    "502: the service cannot be reached",
		"http://rude.example/":    "502: the service broke off before it answered",
		"http://wide.example/":    "502: the header of the service's answer is larger than 64 KiB",
		"http://slow.example/":    "504: the service did not answer within 1s",
	} {
		s, b, err := get(c, u)
		if err != nil || fmt.Sprint(s) != want[:3] || b != want {
			t.Errorf("%s: %d %q %v, want %q", u, s, b, err, want)
		}
	}
	st, err := Ask(w.dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []fault{faultRoute, faultEndpoint, faultDial, faultBackend, faultTimeout} {
		if st.Faults[faults[f]] == 0 {
			t.Errorf("%s is not counted: %v", faults[f], st.Faults)
		}
	}
	if st.Answers[2] < 2 || st.Answers[5] < 4 || st.Out == 0 || st.PID == 0 || st.Ingresses != 12 {
		t.Errorf("figures %+v", st)
	}
	// An endpoint that refuses is skipped: nothing was sent to it.
	w.service("dead", false, unused.Port(t).String(), backend(t, func(rw http.ResponseWriter, r *http.Request) { _, _ = io.Copy(rw, r.Body) }))
	w.publish()
	w.expect(c, "http://dead.example/", 200, "")
	for range 6 {
		r, err := c.Post("http://dead.example/", "text/plain", strings.NewReader("once"))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if r.StatusCode != 200 || string(b) != "once" {
			t.Fatalf("%d %q", r.StatusCode, b)
		}
	}
}

// What a backend is told of its client is what this node saw, not what the
// client says.
func TestForwardedHeaders(t *testing.T) {
	w := newWorld(t)
	w.service("echo", false, backend(t, func(rw http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(rw).Encode(map[string]any{"headers": r.Header, "host": r.Host, "uri": r.RequestURI})
	}))
	w.secret("cert", certificate(t, "a.example"))
	w.rule("echo", "a.example", "/", "echo", tlsOf("cert", "a.example"))
	w.publish()
	c := w.client()
	w.expect(c, "https://a.example/", 200, "")
	req, _ := http.NewRequest(http.MethodGet, "https://a.example/p%2Fq?x=%zz;y", nil)
	req.Header.Set("X-Forwarded-For", "203.0.113.9")
	req.Header.Set("X-Forwarded-Proto", "gopher")
	for _, k := range []string{"X-Real-IP", "True-Client-IP", "X-Forwarded-Prefix", "X_Forwarded_For", "x_real-ip", "Forwarded"} {
		req.Header[k] = []string{"evil"}
	}
	req.Header.Set("X_Other", "kept")
	r, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	var got struct {
		Headers   http.Header
		Host, URI string
	}
	if err := json.NewDecoder(r.Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if r.ProtoMajor != 2 || got.Host != "a.example" || got.URI != "/p%2Fq?x=%zz;y" {
		t.Errorf("%s, %+v", r.Proto, got)
	}
	for k, want := range map[string]string{"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "a.example", "X-Forwarded-Port": "443", "X-Real-Ip": "127.0.0.1", "X_other": "kept"} {
		if v := got.Headers.Get(k); v != want {
			t.Errorf("%s: %q, want %q", k, v, want)
		}
	}
	for k, v := range got.Headers {
		if slices.Contains(v, "evil") {
			t.Errorf("%s is the client's: %q", k, v)
		}
	}
	tunnel, _ := http.NewRequest(http.MethodConnect, "https://a.example", nil)
	r, err = c.Transport.RoundTrip(tunnel)
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Body.Close()
	if r.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("CONNECT: %s", r.Status)
	}
}

// Certificates are chosen by name; a name without one is refused, and a
// connection of one certificate is not used for another's host.
func TestCertificates(t *testing.T) {
	w := newWorld(t)
	w.service("a", false, backend(t, says("a")))
	w.secret("one", certificate(t, "a.example"))
	w.secret("wild", certificate(t, "*.b.example"))
	broken := certificate(t, "c.example")
	broken.Key = []byte("x")
	w.secret("broken", broken)
	w.rule("a", "a.example", "/", "a", tlsOf("one", "a.example"), func(i *wire.Ingress) { i.Redirect = true })
	w.rule("b", "*.b.example", "/", "a", tlsOf("wild", "*.b.example"))
	w.rule("c", "c.example", "/", "a", tlsOf("broken", "c.example"))
	w.rule("d", "d.example", "/", "a", tlsOf("nowhere", "d.example"))
	w.rule("acme", "a.example", acmePath+"token", "a")
	w.publish()
	c := w.client()
	w.expect(c, "https://a.example/", 200, "a")
	w.expect(c, "https://x.b.example/", 200, "a")
	for _, h := range []string{"c.example", "d.example", "x.y.b.example"} {
		if _, err := w.serialOf(h); err == nil || !strings.Contains(err.Error(), "unrecognized name") {
			t.Errorf("%s: %v", h, err)
		}
	}
	req, _ := http.NewRequest(http.MethodGet, "https://a.example/", nil)
	req.Host = "x.b.example"
	r, err := c.Do(req)
	if err != nil || r.StatusCode != http.StatusMisdirectedRequest {
		t.Errorf("%v %v", r, err)
	}
	_ = r.Body.Close()
	// HTTP is redirected where that is asked for, but never ACME's challenge.
	if r, err = c.Get("http://a.example/x?y"); err != nil || r.StatusCode != http.StatusPermanentRedirect {
		t.Fatal(r, err)
	}
	_ = r.Body.Close()
	_, port, _ := net.SplitHostPort(w.set.HTTPS)
	if to := r.Header.Get("Location"); to != "https://a.example:"+port+"/x?y" {
		t.Error(to)
	}
	w.expect(c, "http://a.example"+acmePath+"token", 200, "a")
	w.expect(c, "http://x.b.example/", 200, "a")
}

// A new certificate is shown to new connections, and cuts none; one that
// cannot be used does not replace the one before.
func TestCertificateChangesLive(t *testing.T) {
	w := newWorld(t)
	release := make(chan struct{})
	w.service("a", false, backend(t, func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(rw, "begin")
		_ = http.NewResponseController(rw).Flush()
		if r.URL.Path == "/wait" {
			<-release
		}
		_, _ = io.WriteString(rw, "end")
	}))
	w.secret("one", certificate(t, "a.example"))
	w.rule("a", "a.example", "/", "a", tlsOf("one", "a.example"))
	w.publish()
	c := w.client()
	w.expect(c, "https://a.example/", 200, "beginend")
	before, err := w.serialOf("a.example")
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Get("https://a.example/wait")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	w.secret("one", certificate(t, "a.example"))
	w.eventually("a new certificate", func() error {
		now, err := w.serialOf("a.example")
		if err == nil && now == before {
			err = errors.New("the old one")
		}
		before = max(before, now)
		return err
	})
	bad := certificate(t, "a.example")
	bad.Key = nil
	w.secret("one", bad)
	w.service("b", false)
	w.rule("mark", "mark.example", "/", "b")
	w.publish() // fed together with the bad one or after it
	w.expect(c, "http://mark.example/", 503, "no instance")
	if now, err := w.serialOf("a.example"); err != nil || now != before {
		t.Errorf("certificate %d, %v; want %d", now, err, before)
	}
	close(release)
	if b, err := io.ReadAll(r.Body); err != nil || string(b) != "beginend" {
		t.Fatalf("%q %v: the connection was cut", b, err)
	}
}

// h2c is a backend without TLS that speaks HTTP/2 and nothing else.
func h2c(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// What gRPC needs: HTTP/2 to the backend, both directions at once, trailers.
func TestStreamsAndTrailers(t *testing.T) {
	w := newWorld(t)
	w.service("g", true, h2c(t, func(rw http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 2 || r.Header.Get("Te") != "trailers" {
			http.Error(rw, r.Proto+" "+r.Header.Get("Te"), http.StatusTeapot)
			return
		}
		rw.Header().Set("Content-Type", "application/grpc")
		rw.Header().Set("Trailer", "Grpc-Status")
		rc := http.NewResponseController(rw)
		_ = rc.Flush()
		in := bufio.NewScanner(r.Body)
		for in.Scan() {
			_, _ = fmt.Fprintf(rw, "echo %s\n", in.Text())
			_ = rc.Flush()
		}
		rw.Header().Set("Grpc-Status", "0")
		rw.Header().Set(http.TrailerPrefix+"Grpc-Message", "done")
	}))
	w.secret("cert", certificate(t, "g.example"))
	w.rule("g", "g.example", "/", "g", tlsOf("cert", "g.example"))
	w.publish()
	c := w.client()
	w.expect(c, "https://g.example/", 418, "")
	pr, pw := io.Pipe()
	req, _ := http.NewRequest(http.MethodPost, "https://g.example/svc/Method", pr)
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("TE", "trailers")
	r, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Body.Close() }()
	out := bufio.NewReader(r.Body)
	for i := range 3 { // each answer comes before the next question is asked
		_, _ = fmt.Fprintf(pw, "%d\n", i)
		if line, err := out.ReadString('\n'); err != nil || line != fmt.Sprintf("echo %d\n", i) {
			t.Fatalf("%q %v", line, err)
		}
	}
	_ = pw.Close()
	if _, err := io.Copy(io.Discard, out); err != nil {
		t.Fatal(err)
	}
	if r.ProtoMajor != 2 || r.Trailer.Get("Grpc-Status") != "0" || r.Trailer.Get("Grpc-Message") != "done" {
		t.Errorf("%s, trailers %v", r.Proto, r.Trailer)
	}
}

func socket(t *testing.T) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		c, err := websocket.Accept(rw, r, nil)
		if err != nil {
			return
		}
		defer func() { _ = c.CloseNow() }()
		for {
			kind, b, err := c.Read(t.Context())
			if err != nil || c.Write(t.Context(), kind, b) != nil {
				return
			}
		}
	}
}

func (w *world) dialSocket(url string) (*websocket.Conn, error) {
	c, r, err := websocket.Dial(w.t.Context(), url, &websocket.DialOptions{HTTPClient: w.client()})
	if r != nil && r.Body != nil {
		_ = r.Body.Close()
	}
	return c, err
}

func echo(t *testing.T, c *websocket.Conn, text string) error {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := c.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
		return err
	}
	_, b, err := c.Read(ctx)
	if err == nil && string(b) != text {
		err = errors.New(string(b))
	}
	return err
}

// WebSockets pass, with TLS and without; they live on without an agent and
// with a successor of the process, which has the listeners; the old process
// ends with its last connection. One to an endpoint that ends is closed once
// it is idle.
func TestWebSocketsAndSuccessors(t *testing.T) {
	w := newWorld(t)
	addr := backend(t, socket(t))
	w.service("ws", false, addr)
	w.secret("cert", certificate(t, "ws.example"))
	w.rule("ws", "ws.example", "/", "ws", tlsOf("cert", "ws.example"))
	w.publish()
	w.expect(w.client(), "https://ws.example/", 426, "")
	var conns []*websocket.Conn
	for _, u := range []string{"ws://ws.example/", "wss://ws.example/"} {
		c, err := w.dialSocket(u)
		if err != nil {
			t.Fatal(u, err)
		}
		defer func() { _ = c.CloseNow() }()
		conns = append(conns, c)
	}
	alive := func(when string) {
		t.Helper()
		for _, c := range conns {
			if err := echo(t, c, when); err != nil {
				t.Fatalf("%s: %v", when, err)
			}
		}
	}
	alive("at first")
	first, err := Ask(w.dir)
	if err != nil || first.Upgraded != 2 {
		t.Fatalf("%+v %v", first, err)
	}
	w.stop()
	alive("without an agent")
	w.expect(w.client(), "https://ws.example/", 426, "")
	w.supervise()
	w.rule("more", "more.example", "/", "ws")
	w.publish()
	w.expect(w.client(), "http://more.example/", 426, "")
	if st, err := Ask(w.dir); err != nil || st.PID != first.PID {
		t.Fatal("an agent that came back started another process", st, err)
	}
	w.stop()
	w.tag = "-next"
	w.supervise()
	w.eventually("a successor", func() error {
		st, err := Ask(w.dir)
		if err == nil && st.PID == first.PID {
			err = errors.New("the first process")
		}
		return err
	})
	w.expect(w.client(), "https://ws.example/", 426, "")
	alive("with a successor")
	old := filepath.Join("/proc", fmt.Sprint(first.PID), "cmdline")
	running := func() error {
		if b, _ := os.ReadFile(old); strings.Contains(string(b), w.dir) {
			return errThere
		}
		return nil
	}
	if running() == nil {
		t.Fatal("the old process is gone before its connections")
	}
	for _, c := range conns {
		_ = c.CloseNow()
	}
	w.eventually("the old process ends after its last connection", running)

	c, err := w.dialSocket("ws://ws.example/")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.CloseNow() }()
	if err := echo(t, c, "x"); err != nil {
		t.Fatal(err)
	}
	w.service("ws", false, "ending "+addr, backend(t, socket(t)))
	w.publish()
	if _, _, err := c.Read(t.Context()); err == nil {
		t.Fatal("a message from nowhere")
	}
}

// A node that is not chosen has no process, and one that is no more loses it,
// after its connections.
func TestOnlyWhereChosenAndNeeded(t *testing.T) {
	w := newWorld(t)
	w.service("a", false, backend(t, says("a")))
	w.item(wire.ItemIngressNodes, &wire.IngressNodes{Nodes: []string{"other"}})
	w.rule("a", "a.example", "/", "a")
	w.publish()
	gone := func() error {
		if _, err := Ask(w.dir); err == nil {
			return errThere
		}
		if c, err := net.Dial("tcp", w.set.HTTP); err == nil {
			_ = c.Close()
			return errThere
		}
		return nil
	}
	if err := gone(); err != nil {
		t.Fatal(err)
	}
	w.item(wire.ItemIngressNodes, &wire.IngressNodes{Nodes: []string{"n"}})
	w.publish()
	w.expect(w.client(), "http://a.example/", 200, "a")
	if c, err := net.Dial("tcp", w.set.HTTPS); err == nil {
		_ = c.Close()
		t.Fatal("HTTPS is open without a certificate")
	}
	delete(w.items, wire.ItemIngress+"d/a")
	w.publish()
	w.eventually("no process without an Ingress", gone)
	w.rule("a", "a.example", "/", "a")
	w.publish()
	w.expect(w.client(), "http://a.example/", 200, "a")
	w.item(wire.ItemIngressNodes, &wire.IngressNodes{})
	w.publish()
	w.eventually("no process on a node that is not chosen", gone)
}

// A table that was saved some time ago does not take away what a living
// process knows; without a process it is better than nothing.
func TestSavedTable(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(t.TempDir(), "table")
	w.service("a", false, backend(t, says("a")))
	w.publish()
	saved := func() *services.Table {
		p := &services.Puller{Table: services.NewTable(), Path: path, Log: slog.New(slog.DiscardHandler)}
		p.Load()
		return p.Table
	}
	save := func() {
		t.Helper()
		if err := (&services.Puller{Table: w.table, Path: path}).Save(); err != nil {
			t.Fatal(err)
		}
	}
	save()
	w.rule("a", "a.example", "/", "a")
	w.publish()
	w.expect(w.client(), "http://a.example/", 200, "a")
	first, err := Ask(w.dir)
	if err != nil {
		t.Fatal(err)
	}
	w.stop()
	w.table = saved() // without the Ingress
	w.supervise()
	w.publish() // heard of after all
	w.expect(w.client(), "http://a.example/", 200, "a")
	if st, err := Ask(w.dir); err != nil || st.PID != first.PID {
		t.Fatalf("%v %v, was process %d", st, err, first.PID)
	}
	save()
	w.stop()
	if err := Stop(t.Context(), w.dir); err != nil {
		t.Fatal(err)
	}
	w.table = saved()
	w.supervise()
	w.expect(w.client(), "http://a.example/", 200, "a")
}
