package listener

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/pki"
)

type port struct {
	*Listener
	addr    string
	roots   *x509.CertPool
	done    chan error
	handled atomic.Int64
	ended   atomic.Int64
	httpd   *http.Server
}

func open(t *testing.T, change func(*Config)) *port {
	t.Helper()
	ca, err := pki.NewCA("c", clock.System)
	if err != nil {
		t.Fatal(err)
	}
	serving, err := pki.NewServing(ca, "s", nil)
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &port{addr: tcp.Addr().String(), roots: ca.Pool(), done: make(chan error, 1)}
	c := Config{Listener: tcp, GetCertificate: serving.GetCertificate, Verifier: &pki.Verifier{Roots: []*x509.Certificate{ca.Cert}, Clock: clock.System},
		HandshakeTimeout: 500 * time.Millisecond,
		Handlers: map[string]Handler{"ours/1": func(ctx context.Context, c *Conn) {
			p.handled.Add(1)
			defer p.ended.Add(1)
			line, err := bufio.NewReader(c).ReadString('\n')
			if err != nil {
				return
			}
			_, _ = fmt.Fprintf(c, "you said %s", line)
			if strings.HasPrefix(line, "stay") {
				<-ctx.Done()
			}
		}}}
	if change != nil {
		change(&c)
	}
	if p.Listener, err = New(c); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(UpgradePath, p.Upgrade())
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.Proto) })
	p.httpd = &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	var wg sync.WaitGroup
	wg.Go(func() { p.done <- p.Run(t.Context()) })
	wg.Go(func() { _ = p.httpd.Serve(p.HTTP()) })
	t.Cleanup(func() { _ = p.Close(); _ = p.httpd.Close(); wg.Wait() })
	return p
}

func (p *port) dial(t *testing.T, protos ...string) *tls.Conn {
	t.Helper()
	c, err := tls.Dial("tcp", p.addr, &tls.Config{RootCAs: p.roots, ServerName: "localhost", NextProtos: protos})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func say(t *testing.T, c net.Conn, s string) string {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, s); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return line
}

func TestOnePortManyProtocols(t *testing.T) {
	p := open(t, nil)
	if got := say(t, p.dial(t, "ours/1"), "hello\n"); got != "you said hello\n" {
		t.Errorf("own protocol: %q", got)
	}
	for _, tc := range []struct {
		http2 bool
		want  string
	}{{true, "HTTP/2.0"}, {false, "HTTP/1.1"}} {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.roots, ServerName: "localhost"}, ForceAttemptHTTP2: tc.http2}
		r, err := (&http.Client{Transport: tr, Timeout: 10 * time.Second}).Get("https://" + p.addr + "/")
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(r.Body)
		_ = r.Body.Close()
		tr.CloseIdleConnections()
		if string(b) != tc.want {
			t.Errorf("got %s, want %s", b, tc.want)
		}
	}
	// No ALPN at all is HTTP/1.1.
	if got := say(t, p.dial(t), "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); !strings.HasPrefix(got, "HTTP/1.1 200") {
		t.Errorf("no ALPN: %q", got)
	}
	// A protocol nobody knows is refused in the handshake.
	if c, err := tls.Dial("tcp", p.addr, &tls.Config{RootCAs: p.roots, ServerName: "localhost", NextProtos: []string{"theirs/9"}}); err == nil {
		_ = c.Close()
		t.Error("unknown protocol accepted")
	}
}

func TestUpgrade(t *testing.T) {
	p := open(t, nil)
	c := p.dial(t)
	// What the client sends without waiting for the answer is not lost.
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.WriteString(c, "GET "+UpgradePath+" HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: ours/1\r\n\r\nearly\n"); err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(c)
	r, err := http.ReadResponse(br, nil)
	if err != nil || r.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%+v %v", r, err)
	}
	_ = r.Body.Close()
	if line, err := br.ReadString('\n'); err != nil || line != "you said early\n" {
		t.Fatalf("%q %v", line, err)
	}
	if got := say(t, p.dial(t), "GET "+UpgradePath+" HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: theirs/9\r\n\r\n"); !strings.Contains(got, "426") {
		t.Errorf("unknown protocol: %q", got)
	}
}

// Connections that never finish their handshake take nothing from others,
// and are closed at the deadline.
func TestSlowHandshakes(t *testing.T) {
	p := open(t, func(c *Config) { c.MaxHandshakes = 8; c.MaxPerSource = 4 })
	var slow []net.Conn
	for range 20 {
		c, err := net.Dial("tcp", p.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		slow = append(slow, c)
	}
	other := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}} // another source
	c, err := tls.DialWithDialer(&other, "tcp", p.addr, &tls.Config{RootCAs: p.roots, ServerName: "localhost", NextProtos: []string{"ours/1"}})
	if err != nil {
		t.Fatalf("shut out by somebody else's handshakes: %v", err)
	}
	defer func() { _ = c.Close() }()
	if got := say(t, c, "hello\n"); got != "you said hello\n" {
		t.Error(got)
	}
	for i, c := range slow {
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
			t.Fatalf("connection %d still open: %v", i, err)
		}
	}
}

func TestCloseWaits(t *testing.T) {
	p := open(t, nil)
	c := p.dial(t, "ours/1")
	if got := say(t, c, "stay\n"); got != "you said stay\n" {
		t.Fatal(got)
	}
	idle, err := net.Dial("tcp", p.addr) // in its handshake
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idle.Close() }()
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if p.handled.Load() != p.ended.Load() {
		t.Fatal("Close returned before a handler did")
	}
	if err := <-p.done; err != nil {
		t.Fatal(err)
	}
	if c, err := net.Dial("tcp", p.addr); err == nil {
		_ = c.Close()
		t.Fatal("still listening")
	}
}

// TestPlainHTTP: who forgot the s of https is told so, and so is not left to
// guess at a connection that ends. Anything else without TLS gets no answer.
func TestPlainHTTP(t *testing.T) {
	p := open(t, nil)
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions} {
		r, err := http.NewRequestWithContext(t.Context(), method, "http://"+p.addr+"/api", strings.NewReader(strings.Repeat("x", 8<<10)))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatalf("%s: %v", method, err)
		}
		b, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if want := "Client sent an HTTP request to an HTTPS server.\n"; resp.StatusCode != http.StatusBadRequest || method != http.MethodHead && string(b) != want {
			t.Errorf("%s: HTTP %d %q, %v", method, resp.StatusCode, b, err)
		}
	}
	c, err := net.Dial("tcp", p.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	_, _ = io.WriteString(c, "SSH-2.0-x\r\n")
	if b, _ := io.ReadAll(c); strings.Contains(string(b), "HTTP") {
		t.Errorf("answer %q", b)
	}
	if n := p.handled.Load(); n != 0 {
		t.Errorf("%d handlers", n)
	}
}
