package podproxy

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// node serves port-forwards as a node does, to this machine's own ports.
type node struct {
	wg       sync.WaitGroup
	sessions atomic.Int32
	open     atomic.Int32
	err      error
}

// Session implements Nodes.
func (n *node) Session(_ context.Context, _ *corev1.Pod, _, _ string) (*mux.Mux, error) {
	if n.err != nil {
		return nil, n.err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }()
	here, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	there, err := l.Accept()
	if err != nil {
		return nil, err
	}
	n.sessions.Add(1)
	n.open.Add(1)
	m := mux.New(there, false, 128)
	n.wg.Go(func() {
		defer n.open.Add(-1)
		defer m.Close("")
		for {
			st, err := m.Accept()
			if err != nil {
				return
			}
			n.wg.Go(func() { serve(st) })
		}
	})
	return mux.New(here, true, 0), nil
}

func serve(st *mux.Stream) {
	d := new(wire.DialRequest)
	err := wire.Unmarshal(st.What(), d)
	var c net.Conn
	if err == nil && !d.Address {
		err = fmt.Errorf("not to the pod's address")
	}
	if err == nil {
		c, err = net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", d.Port))
	}
	reply := &wire.DialReply{}
	if err != nil {
		reply.Error = err.Error()
	}
	if wire.WriteMessage(st, reply) != nil || err != nil {
		_ = st.CloseWrite()
		return
	}
	go func() {
		_, _ = io.Copy(c, st)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(st, c)
	_ = st.Close()
	_ = c.Close()
}

// world is a proxy before one pod.
type world struct {
	node  *node
	proxy *Server
	front *httptest.Server
	pod   *corev1.Pod
}

const prefix = "/api/v1/namespaces/n/pods/http:p:80/proxy"

func newWorld(t *testing.T, https bool, pod http.HandlerFunc) *world {
	t.Helper()
	back := httptest.NewUnstartedServer(pod)
	scheme := "http"
	if https {
		back.StartTLS()
		scheme = "https"
	} else {
		back.Start()
	}
	t.Cleanup(back.Close)
	w := &world{node: &node{}, pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "n", UID: types.UID("u-1")}}}
	var err error
	if w.proxy, err = New(Config{Nodes: w.node}); err != nil {
		t.Fatal(err)
	}
	host := back.Listener.Addr().String()
	w.front = httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Cache-Control", "no-cache, private")
		raw := strings.TrimPrefix(r.URL.EscapedPath(), prefix)
		p, _ := url.PathUnescape(raw)
		if err := w.proxy.ServeProxy(rw, r, w.pod, &url.URL{Scheme: scheme, Host: host, Path: p, RawPath: raw, RawQuery: r.URL.RawQuery}, prefix); err != nil {
			code := http.StatusInternalServerError
			if st, ok := err.(apierrors.APIStatus); ok {
				code = int(st.Status().Code)
			}
			http.Error(rw, err.Error(), code)
		}
	}))
	t.Cleanup(func() {
		w.front.Close()
		_ = w.proxy.Close()
		w.node.wg.Wait() // no session stays open
	})
	return w
}

func (w *world) do(t *testing.T, method, path string, body io.Reader, header ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, w.front.URL+prefix+path, body)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	c := &http.Client{Transport: &http.Transport{DisableCompression: true}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	defer c.CloseIdleConnections()
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(b)
}

// TestRequestAsItCame: every verb, the path with its escapes, query, body and
// headers, but nothing that the client proved itself with.
func TestRequestAsItCame(t *testing.T) {
	for _, https := range []bool{false, true} {
		w := newWorld(t, https, func(rw http.ResponseWriter, r *http.Request) {
			b, _ := io.ReadAll(r.Body)
			for name := range r.Header {
				if forServer(name) || name == "User-Agent" && r.UserAgent() == "" {
					t.Errorf("the pod saw %s", name)
				}
			}
			rw.Header().Set("X-Seen", r.Method+" "+r.RequestURI+" "+r.Header.Get("X-Forwarded-Uri")+" "+r.Header.Get("X-Mine"))
			rw.Header().Set("Access-Control-Allow-Origin", "*")
			rw.Header().Set("Cache-Control", "public")
			rw.WriteHeader(http.StatusTeapot)
			_, _ = rw.Write(b)
		})
		for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
			resp, body := w.do(t, method, "/a%2Fb/c%20d/?q=1&timeout=2", strings.NewReader("body of "+method),
				"Authorization", "Bearer secret", "Impersonate-User", "x", "Dunlin-Forwarded-User", "y", "X-Mine", "z")
			want := method + " /a%2Fb/c%20d/?q=1&timeout=2 " + prefix + "/a%2Fb/c%20d/ z"
			if got := resp.Header.Get("X-Seen"); got != want || resp.StatusCode != http.StatusTeapot {
				t.Errorf("HTTP %d, the pod saw %q, want %q", resp.StatusCode, got, want)
			}
			if method != "HEAD" && body != "body of "+method {
				t.Errorf("%s: %q", method, body)
			}
			if resp.Header.Get("Access-Control-Allow-Origin") != "" || len(resp.Header["Cache-Control"]) != 1 || resp.Header.Get("Cache-Control") != "public" {
				t.Errorf("%v", resp.Header)
			}
		}
		// A connection is free again a moment after its answer was read: the next
		// request may come before.
		if n := w.node.sessions.Load(); n > 3 {
			t.Errorf("%d sessions for seven requests one after the other", n)
		}
	}
}

// TestRewriting: addresses in answers lead through the proxy again.
func TestRewriting(t *testing.T) {
	const page = `<!doctype html><p title="/no">x < y</p><a href="/x?a=1&amp;b=2">t</a><A HREF='y'>r</A><img src="/i.png"/><a href="http://other/z">o</a><script>if (a</b) {"<a href='/s'>"}</script><form action="/f/">`
	want := strings.NewReplacer(`href="/x?a=1&amp;b=2"`, `href="`+prefix+`/x?a=1&amp;b=2"`, `"/i.png"`, `"`+prefix+`/i.png"`, `"/f/"`, `"`+prefix+`/f/"`).Replace(page)
	huge := strings.Repeat("x", 2*tokenMost)
	w := newWorld(t, false, func(rw http.ResponseWriter, r *http.Request) {
		h := rw.Header()
		switch r.URL.Path {
		case "/to":
			h.Set("Location", r.URL.Query().Get("l"))
			rw.WriteHeader(http.StatusFound)
		case "/huge":
			h.Set("Content-Type", "text/html")
			_, _ = io.WriteString(rw, `<a href="/1">`+huge+`<a href="/2">`)
		case "/zip":
			h.Set("Content-Type", "text/html; charset=utf-8")
			h.Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(rw)
			_, _ = io.WriteString(z, page)
			_ = z.Close()
		case "/br":
			h.Set("Content-Type", "text/html")
			h.Set("Content-Encoding", "br")
			_, _ = io.WriteString(rw, page)
		case "/plain":
			h.Set("Content-Type", "text/plain")
			_, _ = io.WriteString(rw, page)
		default:
			h.Set("Content-Type", "text/html")
			h.Set("Content-Length", fmt.Sprint(len(page)))
			_, _ = io.WriteString(rw, page)
		}
	})
	for path, text := range map[string]string{"/": want, "/zip": want, "/br": page, "/plain": page, "/huge": `<a href="` + prefix + `/1">` + huge + `<a href="/2">`} {
		if _, body := w.do(t, "GET", path, nil); body != text {
			t.Errorf("%s: got %.600s\nwant %.600s", path, body, text)
		}
	}
	if resp, _ := w.do(t, "HEAD", "/", nil); resp.ContentLength != int64(len(page)) {
		t.Errorf("HEAD: %d bytes", resp.ContentLength)
	}
	own := strings.TrimPrefix(w.front.URL, "http://")
	for l, to := range map[string]string{
		"/a/b/?q": prefix + "/a/b/?q", "rel": "rel", "http://elsewhere/x": "http://elsewhere/x", "http://" + own + "/y": prefix + "/y",
		prefix + "/z": prefix + "/z",
	} {
		if resp, _ := w.do(t, "GET", "/to?l="+url.QueryEscape(l), nil); resp.Header.Get("Location") != to || resp.StatusCode != http.StatusFound {
			t.Errorf("Location %q became %q, want %q", l, resp.Header.Get("Location"), to)
		}
	}
}

// TestStreaming: both directions as they come, before either has ended.
func TestStreaming(t *testing.T) {
	w := newWorld(t, false, func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(rw, "<b>first</b>")
		_ = http.NewResponseController(rw).Flush()
		<-r.Context().Done() // the client went
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", w.front.URL+prefix+"/", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len("<b>first</b>"))
	if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != "<b>first</b>" {
		t.Errorf("%q, %v", b, err)
	}
	cancel()
	_ = resp.Body.Close()
}

// TestUpgrade: a WebSocket, or whatever both ends agree on.
func TestUpgrade(t *testing.T) {
	w := newWorld(t, false, func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/no" {
			http.Error(rw, "not here", http.StatusForbidden)
			return
		}
		c, brw, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = c.Close() }()
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		line, _ := brw.ReadString('\n')
		_, _ = io.WriteString(c, "you said "+line)
	})
	for path, want := range map[string]string{"/": "you said hello\n", "/no": "not here\n"} {
		c, err := net.Dial("tcp", strings.TrimPrefix(w.front.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "GET %s%s HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n", prefix, path)
		br := bufio.NewReader(c)
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		if resp.StatusCode == http.StatusSwitchingProtocols {
			fmt.Fprint(c, "hello\n")
			got, _ = br.ReadString('\n')
		} else {
			b, _ := io.ReadAll(resp.Body)
			got = string(b)
		}
		if got != want {
			t.Errorf("%s: HTTP %d %q", path, resp.StatusCode, got)
		}
		_ = c.Close()
	}
}

// TestUnreachable: what cannot be reached is a 503 in upstream's words; what
// the node says stays what it is.
func TestUnreachable(t *testing.T) {
	w := newWorld(t, true, func(http.ResponseWriter, *http.Request) {})
	w.proxy.tr.DialTLSContext = nil // plain TLS would look at the certificate
	if resp, body := w.do(t, "GET", "/", nil); resp.StatusCode != http.StatusServiceUnavailable || !strings.HasPrefix(body, "error trying to reach service: ") {
		t.Errorf("HTTP %d %s", resp.StatusCode, body)
	}
	w.node.err = apierrors.NewServiceUnavailable("node n is not connected")
	w.pod.UID = "u-2" // another pod, no connection of the first serves it
	if resp, body := w.do(t, "GET", "/", nil); resp.StatusCode != http.StatusServiceUnavailable || body != "node n is not connected\n" {
		t.Errorf("HTTP %d %s", resp.StatusCode, body)
	}
}

// TestConnectionsAreBounded: more requests than connections wait, and all are
// answered.
func TestConnectionsAreBounded(t *testing.T) {
	var now, most atomic.Int32
	gate, once := make(chan struct{}), sync.Once{}
	w := newWorld(t, false, func(rw http.ResponseWriter, _ *http.Request) {
		n := now.Add(1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		if n == connsPort {
			once.Do(func() { close(gate) }) // nothing more can come
		}
		<-gate
		now.Add(-1)
		_, _ = rw.Write(bytes.Repeat([]byte("x"), 100<<10))
	})
	var wg sync.WaitGroup
	for range 2 * connsPort {
		wg.Go(func() {
			if resp, body := w.do(t, "GET", "/", nil); resp.StatusCode != http.StatusOK || len(body) != 100<<10 {
				t.Errorf("HTTP %d, %d bytes", resp.StatusCode, len(body))
			}
		})
	}
	wg.Wait()
	if most.Load() > connsPort || w.node.sessions.Load() != 1 {
		t.Errorf("%d connections at once in %d sessions", most.Load(), w.node.sessions.Load())
	}
}
