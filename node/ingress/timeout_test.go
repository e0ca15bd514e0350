package ingress

import (
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// A backend that does not begin its answer is given up, with the status that
// says so; one that began and pauses is not.
func TestTimeouts(t *testing.T) {
	e := newEngine(slog.New(slog.DiscardHandler))
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	b := backend(t, func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/begun" {
			_, _ = io.WriteString(rw, "begun ")
			_ = http.NewResponseController(rw).Flush()
			<-time.After(300 * time.Millisecond)
			_, _ = io.WriteString(rw, "done")
			return
		}
		select {
		case <-over:
		case <-r.Context().Done():
		}
	})
	w := &world{t: t, items: map[string][]byte{}}
	w.service("a", false, b)
	w.rule("a", "", "/", "a", func(i *wire.Ingress) { i.Timeout = 100 })
	var items []wire.ServiceItem
	for k, v := range w.items {
		items = append(items, wire.ServiceItem{Key: k, Data: v})
	}
	e.Apply(items, nil, true)
	srv := httptest.NewServer(http.HandlerFunc(e.serve))
	defer srv.Close()
	if s, text, err := get(srv.Client(), srv.URL+"/never"); err != nil || s != http.StatusGatewayTimeout {
		t.Errorf("a backend that says nothing: %d %q %v", s, text, err)
	}
	if s, text, err := get(srv.Client(), srv.URL+"/begun"); err != nil || s != http.StatusOK || text != "begun done" {
		t.Errorf("a backend that pauses: %d %q %v", s, text, err)
	}
	if n := e.counters.faults[faultTimeout].Load(); n != 1 {
		t.Errorf("%d time-outs are counted", n)
	}
}

// An answer that pauses for longer than a client may take nothing ends whole,
// with HTTP/1.1 and HTTP/2, and so does the next one on its connection.
func TestAnswersMayPause(t *testing.T) {
	e := newEngine(slog.New(slog.DiscardHandler))
	e.patience.body = 20 * time.Millisecond
	b := backend(t, func(rw http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(rw, "begin ")
		_ = http.NewResponseController(rw).Flush()
		<-time.After(10 * e.patience.body)
		_, _ = io.WriteString(rw, "end")
		_ = http.NewResponseController(rw).Flush()
		<-time.After(10 * e.patience.body)
	})
	w := &world{t: t, items: map[string][]byte{}}
	w.service("a", false, b)
	w.rule("a", "", "/", "a")
	var items []wire.ServiceItem
	for k, v := range w.items {
		items = append(items, wire.ServiceItem{Key: k, Data: v})
	}
	e.Apply(items, nil, true)
	for _, h2 := range []bool{false, true} {
		srv := httptest.NewUnstartedServer(http.HandlerFunc(e.serve))
		srv.EnableHTTP2 = h2
		srv.StartTLS()
		c := srv.Client()
		for range 2 {
			r, err := c.Get(srv.URL)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(r.Body)
			_ = r.Body.Close()
			if err != nil || string(b) != "begin end" || (r.ProtoMajor == 2) != h2 {
				t.Errorf("%s: %q %v", r.Proto, b, err)
			}
		}
		srv.Close()
	}
}

// A request's body that stops is answered so, and a connection that is kept
// and not used is closed.
func TestSlowClients(t *testing.T) {
	e := newEngine(slog.New(slog.DiscardHandler))
	e.patience.idle, e.patience.body = 100*time.Millisecond, time.Second
	w := &world{t: t, items: map[string][]byte{}}
	w.service("a", false, backend(t, func(rw http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err == nil {
			_, _ = io.WriteString(rw, "a")
		}
	}))
	w.rule("a", "", "/a", "a")
	var items []wire.ServiceItem
	for k, v := range w.items {
		items = append(items, wire.ServiceItem{Key: k, Data: v})
	}
	e.Apply(items, nil, true)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := e.newServer(false)
	go func() { _ = srv.Serve(l) }()
	defer func() { _ = srv.Close() }()
	for what, send := range map[string]string{
		"200 OK":              "GET /a HTTP/1.1\r\nHost: a\r\n\r\n", // and then nothing
		"408 Request Timeout": "POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nbegun",
		"404 Not Found":       "POST /nobody HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nbegun",
	} {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		if _, err := io.WriteString(c, send); err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(c) // ends when the connection is closed
		if err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 "+what) {
			t.Errorf("%s is wanted: %q, %v", what, b, err)
		}
		_ = c.Close()
	}
	if n := e.counters.faults[faultBody].Load(); n != 1 {
		t.Errorf("%d slow bodies are counted", n)
	}
}
