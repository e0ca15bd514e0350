package podstream

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/gorilla/websocket"
	"github.com/moby/spdystream"
)

// TestForwardOverSPDY: plainly, and inside a WebSocket as kubectl does now.
func TestForwardOverSPDY(t *testing.T) {
	f := newFront(t, 0)
	for _, how := range []string{"spdy", "tunnelled"} {
		t.Run(how, func(t *testing.T) {
			var c *spdyClient
			if how == "spdy" {
				var proto string
				if c, proto = dialSPDY(t, f, "/portforward", forwardSPDY); proto != forwardSPDY {
					t.Fatalf("protocol %q", proto)
				}
			} else {
				c = tunnel(t, dialWS(t, f, "/portforward", tunnelled))
			}
			var wg sync.WaitGroup
			for i := range 10 {
				wg.Go(func() {
					data, errs := forwardPair(t, c, i, 7)
					text := bytes.Repeat([]byte(fmt.Sprintf("%d,", i)), 50_000)
					wg.Go(func() { _, _ = data.Write(text); _ = data.Close() })
					got, err := io.ReadAll(data)
					if err != nil || string(got) != string(text)+"bye" {
						t.Errorf("%d bytes of %d, %v", len(got), len(text), err)
					}
					if b, err := io.ReadAll(errs); err != nil || len(b) > 0 {
						t.Errorf("error %q, %v", b, err)
					}
				})
			}
			wg.Wait()
			data, errs := forwardPair(t, c, 100, 9)
			if b, err := io.ReadAll(errs); err != nil || !strings.Contains(string(b), "connection refused") {
				t.Errorf("error %q, %v", b, err)
			}
			if b, err := io.ReadAll(data); err != nil || len(b) > 0 {
				t.Errorf("data %q, %v", b, err)
			}
			// One that is given up makes room for another.
			for i := range 3 * forwardsMost {
				data, _ := forwardPair(t, c, 1000+i, 8)
				_ = data.Reset()
			}
			m := f.node.node()
			_ = c.conn.Close()
			<-m.Done()
		})
	}
}

func forwardPair(t testing.TB, c *spdyClient, id, port int) (data, errs *spdystream.Stream) {
	t.Helper()
	h := map[string]string{"streamtype": "error", "port": fmt.Sprint(port), "requestid": fmt.Sprint(id)}
	errs = c.stream(t, h)
	_ = errs.Close()
	h["streamtype"] = "data"
	return c.stream(t, h), errs
}

// wsNet is a WebSocket's binary messages as a connection.
type wsNet struct {
	wsBytes
	net.Conn
}

func (c *wsNet) Read(p []byte) (int, error)  { return c.wsBytes.Read(p) }
func (c *wsNet) Write(p []byte) (int, error) { return c.wsBytes.Write(p) }
func (c *wsNet) Close() error                { return c.Conn.Close() }

func tunnel(t testing.TB, ws *websocket.Conn) *spdyClient {
	t.Helper()
	conn := &wsNet{wsBytes{ws: ws}, ws.NetConn()}
	sc, err := spdystream.NewConnection(conn, false)
	if err != nil {
		t.Fatal(err)
	}
	go sc.Serve(spdystream.NoOpStreamHandler)
	return &spdyClient{sc, conn}
}

// TestForwardOverChannels: two channels a port.
func TestForwardOverChannels(t *testing.T) {
	f := newFront(t, 0)
	c := dialWS(t, f, query("/portforward", "ports", "7", "ports", "9"), v5Channel)
	sendWS(t, c, 0, []byte("hello"))
	sendWS(t, c, chClose, []byte{0})
	got := map[byte]string{}
	for {
		_, b, err := c.ReadMessage()
		if err != nil {
			if !websocket.IsCloseError(err, websocket.CloseNormalClosure) {
				t.Errorf("ended with %v", err)
			}
			break
		}
		got[b[0]] += string(b[1:])
	}
	for ch, want := range map[byte]string{0: "\x07\x00hellobye", 1: "\x07\x00", 2: "\x09\x00"} {
		if got[ch] != want {
			t.Errorf("channel %d: %q", ch, got[ch])
		}
	}
	if !strings.HasPrefix(got[3], "\x09\x00error forwarding port 9") || !strings.Contains(got[3], "connection refused") {
		t.Errorf("errors: %q", got[3])
	}
}

type pipeEnd struct {
	io.Reader
	io.Writer
}

func (pipeEnd) Close() error { return nil }

type countSink struct{ n int }

func (s *countSink) data(p []byte) { s.n += len(p) }
func (s *countSink) fin()          {}
func (s *countSink) reset()        {}

// FuzzSPDY: nothing that a client sends makes the server panic, or keep more
// than its bounds.
func FuzzSPDY(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 1, 0, 0, 2, 'h', 'i'})
	f.Add([]byte{0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1})
	f.Add([]byte{0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := bytes.NewReader(raw)
		c, err := newSPDY(pipeEnd{r, io.Discard}, bufio.NewReader(r))
		if err != nil {
			t.Fatal(err)
		}
		s := &countSink{}
		_ = c.serve(func(st *spdyStream) error { st.sink = s; return nil })
		if s.n > len(raw) || len(c.streams) > spdyStreams {
			t.Errorf("%d bytes of %d, %d streams", s.n, len(raw), len(c.streams))
		}
	})
}
