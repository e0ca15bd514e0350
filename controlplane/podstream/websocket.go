package podstream

import (
	"context"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/gorilla/websocket"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// chClose says that a channel ends (version 5); its payload is the channel.
const chClose = 255

// Buffers of a WebSocket, bytes. Messages are passed on piece by piece, so
// they may be of any size.
const wsBuffer = 16 << 10

// upgrade answers a WebSocket handshake. After an error the client has an
// answer.
func upgrade(w http.ResponseWriter, r *http.Request, proto string) (*websocket.Conn, error) {
	u := websocket.Upgrader{ReadBufferSize: wsBuffer, WriteBufferSize: 1 << 10, HandshakeTimeout: openTimeout, CheckOrigin: ownOrigin}
	if len(headerList(r, "Sec-WebSocket-Protocol")) > 0 {
		u.Subprotocols = []string{proto}
	}
	return u.Upgrade(w, r, nil)
}

// ownOrigin: a browser attaches a client certificate for any page that asks,
// so only pages of this server and of the client's own machine may; programs
// send no Origin, or http://localhost as upstream's do.
func ownOrigin(r *http.Request) bool {
	origin := r.Header.Get("Origin")
	if origin == "" {
		return true
	}
	u, err := url.Parse(origin)
	if err != nil {
		return false
	}
	if strings.EqualFold(u.Host, r.Host) || strings.EqualFold(u.Hostname(), "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(u.Hostname())
	return err == nil && ip.IsLoopback()
}

// wsChannels sends and receives messages whose first byte is a channel.
type wsChannels struct {
	ws     *websocket.Conn
	proto  string
	base64 bool
	wmu    sync.Mutex
	out    []byte
}

func newWSChannels(w http.ResponseWriter, r *http.Request, proto string) (*wsChannels, error) {
	ws, err := upgrade(w, r, proto)
	if err != nil {
		return nil, err
	}
	c := &wsChannels{ws: ws, proto: proto, base64: proto == v1Base64 || proto == v4Base64}
	return c, nil
}

// write sends one message. It waits for a client that does not read, as long
// as that is there.
func (c *wsChannels) write(channel byte, p []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	kind := websocket.BinaryMessage
	if c.base64 {
		kind = websocket.TextMessage
		c.out = base64.StdEncoding.AppendEncode(append(c.out[:0], '0'+channel), p)
	} else {
		c.out = append(append(c.out[:0], channel), p...)
	}
	return c.ws.WriteMessage(kind, c.out)
}

// read calls take for every piece that comes, with buf that is used again.
func (c *wsChannels) read(take func(channel byte, p []byte)) error {
	buf := make([]byte, copyBuffer)
	for {
		_, r, err := c.ws.NextReader()
		if err != nil {
			return err
		}
		var head [1]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			if errors.Is(err, io.EOF) {
				continue // an empty message
			}
			return err
		}
		channel := head[0]
		if c.base64 {
			channel -= '0'
			r = base64.NewDecoder(base64.StdEncoding, r)
		}
		for {
			n, err := r.Read(buf)
			if n > 0 {
				take(channel, buf[:n]) // may take long
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
		}
	}
}

func (c *wsChannels) ping() error {
	err := c.ws.WriteControl(websocket.PingMessage, nil, time.Now().Add(pingInterval))
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return nil // it does not read at the moment
	}
	return err
}

// bye says that nothing follows.
func (c *wsChannels) bye() error {
	return c.ws.WriteControl(websocket.CloseMessage, websocket.FormatCloseMessage(websocket.CloseNormalClosure, ""), time.Now().Add(lingerTimeout))
}

func (c *wsChannels) close() { _ = c.ws.Close() }

// wsConsole is a console over WebSocket.
type wsConsole struct{ *wsChannels }

func newWSConsole(w http.ResponseWriter, r *http.Request, proto string) (console, error) {
	c, err := newWSChannels(w, r, proto)
	if err != nil {
		return nil, err
	}
	return &wsConsole{c}, nil
}

func (c *wsConsole) ready(context.Context) error { return nil } // channels need no opening

func (c *wsConsole) read(in *input) error {
	z := &sizes{in: in}
	return c.wsChannels.read(func(channel byte, p []byte) {
		switch channel {
		case chStdin:
			in.stdinWrite(p)
		case chResize:
			z.write(p)
		case chClose:
			if c.proto == v5Channel && p[0] == chStdin {
				in.stdinEnd()
			}
		}
	})
}

func (c *wsConsole) end(st *metav1.Status) error {
	if b := errorText(c.proto, st); len(b) > 0 {
		_ = c.ws.SetWriteDeadline(time.Now().Add(openTimeout))
		if err := c.write(chError, b); err != nil {
			return err
		}
	}
	return c.bye()
}

// wsBytes are the binary messages of a WebSocket as one stream of bytes.
type wsBytes struct {
	ws *websocket.Conn
	r  io.Reader
}

// Read implements io.Reader.
func (c *wsBytes) Read(p []byte) (int, error) {
	for {
		if c.r == nil {
			_, r, err := c.ws.NextReader()
			if err != nil {
				return 0, err
			}
			c.r = r
		}
		n, err := c.r.Read(p)
		if errors.Is(err, io.EOF) {
			c.r, err = nil, nil
			if n == 0 {
				continue
			}
		}
		return n, err
	}
}

// Write implements io.Writer.
func (c *wsBytes) Write(p []byte) (int, error) {
	if err := c.ws.WriteMessage(websocket.BinaryMessage, p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Close implements io.Closer.
func (c *wsBytes) Close() error { return c.ws.Close() }
