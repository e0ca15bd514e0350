package podstream

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/gorilla/websocket"
	"github.com/moby/spdystream"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/wire/mux"
)

// heard is what a client gets.
type heard struct {
	out, errs bytes.Buffer
	end       []byte // of the error channel
}

// code is the exit code that a status of version 4 tells; -1 is none.
func (h *heard) code(t testing.TB) string {
	t.Helper()
	st := new(metav1.Status)
	if err := json.Unmarshal(h.end, st); err != nil {
		t.Fatalf("status %q: %v", h.end, err)
	}
	if st.Status == metav1.StatusSuccess {
		return "0"
	}
	if st.Reason == "NonZeroExitCode" && st.Details.Causes[0].Type == "ExitCode" {
		return st.Details.Causes[0].Message
	}
	return st.Message
}

func query(path string, kv ...string) string {
	q := url.Values{}
	for i := 0; i < len(kv); i += 2 {
		q.Add(kv[i], kv[i+1])
	}
	return path + "?" + q.Encode()
}

func dialWS(t testing.TB, f *front, path string, protos ...string) *websocket.Conn {
	t.Helper()
	d := websocket.Dialer{Subprotocols: protos}
	c, resp, err := d.Dial("ws://"+f.addr()+path, nil)
	if err != nil {
		t.Fatalf("%v: %+v", err, resp)
	}
	_ = resp.Body.Close()
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func sendWS(t testing.TB, c *websocket.Conn, ch byte, p []byte) {
	t.Helper()
	kind, msg := websocket.BinaryMessage, append([]byte{ch}, p...)
	if strings.Contains(c.Subprotocol(), "base64") {
		kind, msg = websocket.TextMessage, append([]byte{'0' + ch}, base64.StdEncoding.EncodeToString(p)...)
	}
	if err := c.WriteMessage(kind, msg); err != nil {
		t.Error(err)
	}
}

func hearWS(t testing.TB, c *websocket.Conn) *heard {
	t.Helper()
	h := &heard{}
	for {
		_, b, err := c.ReadMessage()
		if err != nil {
			if !websocket.IsCloseError(err, websocket.CloseNormalClosure) {
				t.Errorf("it ended with %v", err)
			}
			_ = c.Close()
			return h
		}
		ch, p := b[0], b[1:]
		if strings.Contains(c.Subprotocol(), "base64") {
			ch -= '0'
			if p, err = base64.StdEncoding.DecodeString(string(p)); err != nil {
				t.Fatal(err)
			}
		}
		switch ch {
		case chStdout:
			h.out.Write(p)
		case chStderr:
			h.errs.Write(p)
		case chError:
			h.end = append(h.end, p...)
		default:
			t.Errorf("channel %d", ch)
		}
	}
}

// TestExecOverWebSocket: every version, with and without a terminal.
func TestExecOverWebSocket(t *testing.T) {
	f := newFront(t, 0)
	for _, proto := range []string{v5Channel, v4Channel, v4Base64, v1Channel, v1Base64, ""} {
		for _, tty := range []string{"false", "true"} {
			t.Run(proto+"/"+tty, func(t *testing.T) {
				var protos []string
				if proto != "" {
					protos = []string{"x", proto}
				}
				c := dialWS(t, f, query("/exec", "command", "echo", "stdin", "1", "stdout", "1", "stderr", "1", "tty", tty), protos...)
				if c.Subprotocol() != proto {
					t.Errorf("protocol %q", c.Subprotocol())
				}
				want := "hello"
				if tty == "true" {
					sendWS(t, c, chResize, []byte(`{"Width":80,`))
					sendWS(t, c, chResize, []byte(`"Height":24}`))
					want = "80x24 hello"
				}
				sendWS(t, c, chStdin, []byte("he"))
				sendWS(t, c, chStdin, []byte("llo"))
				h := hearWS(t, c)
				if h.out.String() != want || (tty == "false" && h.errs.String() != "oops") {
					t.Errorf("%q, %q", h.out.String(), h.errs.String())
				}
				switch proto {
				case v1Channel, v1Base64, "":
					if !strings.Contains(string(h.end), "exit status 3") || json.Valid(h.end) {
						t.Errorf("%v: %q", errText, h.end)
					}
				default:
					if got := h.code(t); got != "3" {
						t.Errorf("code %q", got)
					}
				}
			})
		}
	}
}

// TestInputEnds: version 5 can end its input, and one large message is passed
// on without being kept.
func TestInputEnds(t *testing.T) {
	f := newFront(t, 0)
	c := dialWS(t, f, query("/exec", "command", "count", "stdin", "1", "stdout", "1"), v5Channel)
	sendWS(t, c, chStdin, make([]byte, 5<<20))
	if err := c.WriteMessage(websocket.BinaryMessage, nil); err != nil { // means nothing
		t.Fatal(err)
	}
	sendWS(t, c, chClose, []byte{chStdin})
	if h := hearWS(t, c); h.out.String() != "5242880 <nil>" || h.code(t) != "0" {
		t.Errorf("%q, %q", h.out.String(), h.end)
	}
}

// A command that does not read ends all the same, and its end arrives.
func TestUnreadInput(t *testing.T) {
	f := newFront(t, 0)
	c := dialWS(t, f, query("/exec", "command", "ignore", "stdin", "1", "stdout", "1"), v5Channel)
	go func() {
		for range 50 {
			if c.WriteMessage(websocket.BinaryMessage, make([]byte, 64<<10)) != nil {
				return
			}
		}
	}()
	if h := hearWS(t, c); h.code(t) != "4" {
		t.Errorf("%q", h.end)
	}
}

type spdyClient struct {
	*spdystream.Connection
	conn net.Conn
}

func dialSPDY(t testing.TB, f *front, path string, protos ...string) (*spdyClient, string) {
	t.Helper()
	conn, err := net.Dial("tcp", f.addr())
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequest(http.MethodPost, f.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "SPDY/3.1")
	for _, p := range protos {
		req.Header.Add("X-Stream-Protocol-Version", p)
	}
	if err := req.Write(conn); err != nil {
		t.Fatal(err)
	}
	head := readHead(t, conn)
	if !strings.HasPrefix(head, "HTTP/1.1 101 ") {
		t.Fatalf("%s", head)
	}
	sc, err := spdystream.NewConnection(conn, false)
	if err != nil {
		t.Fatal(err)
	}
	go sc.Serve(spdystream.NoOpStreamHandler)
	t.Cleanup(func() { _ = conn.Close() })
	_, proto, _ := strings.Cut(head, "X-Stream-Protocol-Version: ")
	proto, _, _ = strings.Cut(proto, "\r\n")
	return &spdyClient{sc, conn}, proto
}

// readHead reads no byte more than the head of an answer.
func readHead(t testing.TB, c net.Conn) string {
	t.Helper()
	var b [1]byte
	var head []byte
	for !bytes.HasSuffix(head, []byte("\r\n\r\n")) {
		if _, err := c.Read(b[:]); err != nil {
			t.Fatalf("%q: %v", head, err)
		}
		head = append(head, b[0])
	}
	return string(head)
}

func (c *spdyClient) stream(t testing.TB, h map[string]string) *spdystream.Stream {
	t.Helper()
	head := http.Header{}
	for k, v := range h {
		head.Set(k, v)
	}
	st, err := c.CreateStream(head, nil, false)
	if err == nil {
		err = st.Wait()
	}
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// TestExecOverSPDY: every version, with the library that client-go uses.
func TestExecOverSPDY(t *testing.T) {
	f := newFront(t, 0)
	for _, proto := range []string{v4Channel, v3Channel, v2Channel, v1Channel} {
		for _, tty := range []string{"false", "true"} {
			if tty == "true" && (proto == v1Channel || proto == v2Channel) {
				continue // they cannot tell sizes
			}
			t.Run(proto+"/"+tty, func(t *testing.T) {
				c, got := dialSPDY(t, f, query("/exec", "command", "echo", "stdin", "1", "stdout", "1", "stderr", "1", "tty", tty), "new.channel.k8s.io", proto)
				if got != proto {
					t.Fatalf("protocol %q", got)
				}
				ends := map[string]*spdystream.Stream{}
				for _, name := range []string{"error", "stdin", "stdout", "stderr", "resize"} {
					if (name == "stderr" && tty == "true") || (name == "resize" && tty == "false") {
						continue
					}
					ends[name] = c.stream(t, map[string]string{"streamtype": name})
				}
				want := "hello"
				if tty == "true" {
					want = "80x24 hello"
					if _, err := ends["resize"].Write([]byte(`{"Width":80,"Height":24}`)); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := ends["stdin"].Write([]byte("hello")); err != nil {
					t.Fatal(err)
				}
				out, err := io.ReadAll(ends["stdout"])
				if err != nil || string(out) != want {
					t.Errorf("%q, %v", out, err)
				}
				h := &heard{}
				if h.end, err = io.ReadAll(ends["error"]); err != nil {
					t.Error(err)
				}
				if proto == v4Channel {
					if got := h.code(t); got != "3" {
						t.Errorf("code %q", got)
					}
				} else if !strings.Contains(string(h.end), "exit status 3") {
					t.Errorf("%q", h.end)
				}
				if d, err := c.Ping(); err != nil {
					t.Errorf("ping: %v, %v", d, err)
				}
				_ = c.Connection.Close()
			})
		}
	}
}

// TestSlowClient: one that does not read holds back the program; what waits
// is bounded, and another client goes on.
func TestSlowClient(t *testing.T) {
	f := newFront(t, 0)
	slow := dialWS(t, f, query("/exec", "command", "flood", "stdout", "1"), v5Channel)
	// What a window, the buffers of four sockets and of copying may hold.
	const most = 32 << 20
	quick := dialWS(t, f, query("/exec", "command", "flood", "stdout", "1"), v5Channel)
	for total := 0; total < 2*most; {
		_, b, err := quick.ReadMessage()
		if err != nil {
			t.Fatal(err)
		}
		total += len(b)
	}
	_ = quick.Close()
	// The quick one's share is known within its own bound.
	if n := f.node.written.Load(); n > 4*most {
		t.Errorf("%d bytes were taken", n)
	}
	_ = slow.Close()
}

// TestEndsWithEitherSide: the client hears of the node's end and why; the
// node of the client's.
func TestEndsWithEitherSide(t *testing.T) {
	f := newFront(t, 0)
	for name, c := range map[string]struct {
		end  func(m *mux.Mux)
		want string
	}{
		"reason": {func(m *mux.Mux) { m.Close("the container has ended") }, "the container has ended"},
		"cut":    {func(m *mux.Mux) { m.Fail(errors.New("x")) }, "broke"},
	} {
		t.Run(name, func(t *testing.T) {
			ws := dialWS(t, f, query("/exec", "command", "wait", "stdout", "1"), v5Channel)
			m := f.node.node()
			c.end(m)
			if h := hearWS(t, ws); !strings.Contains(h.code(t), c.want) {
				t.Errorf("%q", h.end)
			}
		})
	}
	for _, sub := range []string{"wait", "flood"} {
		ws := dialWS(t, f, query("/exec", "command", sub, "stdin", "1", "stdout", "1"), v5Channel)
		m := f.node.node()
		_ = ws.Close()
		<-m.Done()
	}
	sc, _ := dialSPDY(t, f, query("/exec", "command", "wait", "stdout", "1"), v4Channel)
	m := f.node.node()
	_ = sc.conn.Close()
	<-m.Done()
}

func TestIdle(t *testing.T) {
	f := newFront(t, 1)
	ws := dialWS(t, f, query("/exec", "command", "wait", "stdout", "1"), v5Channel)
	if h := hearWS(t, ws); !strings.Contains(h.code(t), "nothing went over the stream") {
		t.Errorf("%q", h.end)
	}
}

func TestRefusals(t *testing.T) {
	f := newFront(t, 0)
	for path, want := range map[string]string{
		query("/exec", "command", "x"):                                "at least 1 of stdin",
		query("/exec", "stdout", "1"):                                 "at least one command",
		query("/portforward"):                                         "1 to 64 ports",
		query("/portforward", "ports", "0"):                           "not a port",
		query("/portforward", "ports", "x"):                           "invalid syntax",
		query("/exec", "command", "x", "stdout", "1", "proto", "new"): "no protocol in common",
	} {
		d := websocket.Dialer{Subprotocols: []string{v4Channel}}
		if strings.Contains(path, "proto=new") {
			d.Subprotocols = []string{"v9.channel.k8s.io"}
		}
		c, resp, err := d.Dial("ws://"+f.addr()+path, nil)
		if err == nil {
			_ = c.Close()
			t.Fatalf("%s: accepted", path)
		}
		b, _ := io.ReadAll(resp.Body)
		if !strings.Contains(string(b), want) {
			t.Errorf("%s: %s", path, b)
		}
	}
	resp, err := http.Get(f.URL + query("/exec", "command", "x", "stdout", "1"))
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if !strings.Contains(string(b), "Upgrade request required") {
		t.Errorf("%s", b)
	}
}
