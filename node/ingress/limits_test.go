package ingress

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// Clients cannot take more than there is: connections, requests, headers,
// time.
func TestLimits(t *testing.T) {
	w := newWorld(t)
	w.set.Connections = 8
	hold := make(chan struct{})
	release := sync.OnceFunc(func() { close(hold) })
	defer release()
	var got atomic.Int64
	w.service("a", false, backend(t, func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/hold":
			_, _ = io.WriteString(rw, "x")
			_ = http.NewResponseController(rw).Flush()
			<-hold
		case "/body":
			n, _ := io.Copy(io.Discard, r.Body)
			got.Store(n)
		}
	}))
	w.secret("cert", certificate(t, "a.example"))
	w.rule("a", "a.example", "/", "a", tlsOf("cert", "a.example"))
	w.publish()
	w.expect(w.client(), "https://a.example/", 200, "")

	// A header that is too long, and one that never ends.
	c := w.client()
	req, _ := http.NewRequest(http.MethodGet, "http://a.example/", nil)
	req.Header.Set("X", strings.Repeat("x", headerMost+8192))
	if r, err := c.Do(req); err != nil || r.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("a long header: %v %v", r, err)
	}
	slow, err := net.Dial("tcp", w.set.HTTP)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = slow.Close() }()
	_, _ = io.WriteString(slow, "GET / HTTP/1.1\r\nHost: a.exa")

	// A body larger than the process may be.
	const size = 300 << 20
	r, err := c.Post("http://a.example/body", "text/plain", io.LimitReader(zeros{}, size))
	if err != nil || r.StatusCode != 200 || got.Load() != size {
		t.Errorf("a large body: %v %v, %d bytes arrived", r, err, got.Load())
	}
	st, err := Ask(w.dir)
	if err != nil {
		t.Fatal(err)
	}
	if peak := peakOf(t, st.PID); peak > 64<<10 {
		t.Errorf("the process had %d KiB", peak)
	}

	// More requests than may be under way, on one connection of HTTP/2.
	h2 := w.client()
	for range 8 {
		r, err := h2.Get("https://a.example/hold")
		if err != nil || r.StatusCode != 200 {
			t.Fatal(r, err)
		}
		defer func() { _ = r.Body.Close() }()
	}
	if s, b, err := get(h2, "https://a.example/"); err != nil || s != 503 || !strings.Contains(b, "as many requests as it may") {
		t.Errorf("%d %q %v", s, b, err)
	}
	release()

	// More connections than may be open are reset.
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	w.eventually("connections are refused", func() error {
		c, err := net.Dial("tcp", w.set.HTTP)
		if err != nil {
			return err
		}
		open = append(open, c)
		st, err := Ask(w.dir)
		if err == nil && st.Faults[faults[faultConnections]] == 0 {
			err = fmt.Errorf("%d are open", st.Connections)
		}
		return err
	})
	_ = slow.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.Copy(io.Discard, slow); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a header that never ends keeps its connection")
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// peakOf is the most memory that a process had, in KiB.
func peakOf(t *testing.T, pid int) (kib int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &kib); err == nil {
			return kib
		}
	}
	t.Fatal("no VmHWM")
	return 0
}

// A client of HTTP/2 that asks for more at once than it may is told how many,
// and what is too much is refused without a word to a backend.
func TestStreamsOfAConnectionAreBounded(t *testing.T) {
	w := newWorld(t)
	hold := make(chan struct{})
	defer close(hold)
	var asked atomic.Int64
	w.service("a", false, backend(t, func(http.ResponseWriter, *http.Request) {
		asked.Add(1)
		<-hold
	}))
	w.service("b", false, backend(t, says("b")))
	w.secret("cert", certificate(t, "a.example"))
	w.rule("a", "a.example", "/", "a", tlsOf("cert", "a.example"))
	w.rule("b", "a.example", "/b", "b")
	w.publish()
	w.expect(w.client(), "https://a.example/b", 200, "b")
	c, err := tls.Dial("tcp", w.set.HTTPS, &tls.Config{RootCAs: pool, ServerName: "a.example", NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	f := http2.NewFramer(c, c)
	if err := f.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	var header bytes.Buffer
	e := hpack.NewEncoder(&header)
	for _, h := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "a.example"}, {":path", "/"}} {
		if err := e.WriteField(hpack.HeaderField{Name: h[0], Value: h[1], Sensitive: true}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range streamsMost + 1 {
		if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1), BlockFragment: header.Bytes(), EndStream: true, EndHeaders: true}); err != nil {
			t.Fatal(err)
		}
	}
	told := uint32(0)
	for {
		fr, err := f.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if s, ok := fr.(*http2.SettingsFrame); ok && !s.IsAck() {
			told, _ = s.Value(http2.SettingMaxConcurrentStreams)
		}
		if r, ok := fr.(*http2.RSTStreamFrame); ok {
			if r.StreamID != 2*streamsMost+1 {
				t.Errorf("stream %d of %d is refused: %v", r.StreamID/2+1, streamsMost, r.ErrCode)
			}
			break
		}
	}
	if told != streamsMost {
		t.Errorf("a client is told %d streams, the bound is %d", told, streamsMost)
	}
	w.eventually("all others are asked", func() error {
		if n := asked.Load(); n != streamsMost {
			return fmt.Errorf("%d are", n)
		}
		return nil
	})
}
