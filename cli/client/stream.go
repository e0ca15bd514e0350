package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/gorilla/websocket"
)

// streamProtocol is Kubernetes' framing of streams into pods: the first byte
// of a message is its channel. Version 5 is the first that can end one channel.
const streamProtocol = "v5.channel.k8s.io"

// Channels of a stream. A port-forward's are its data and its errors.
const (
	chStdin  = 0
	chStdout = 1
	chStderr = 2
	chError  = 3
	chResize = 4
	chClose  = 255 // the payload is the channel that ends

	chForward      = 0
	chForwardError = 1
)

// streamBuffer is of one direction, bytes: with its header a piece fits one
// TLS record.
const streamBuffer = 16<<10 - 64

// stream is an open connection into a pod. One goroutine reads, any may write.
type stream struct {
	ctx  context.Context
	stop func() bool
	ws   *websocket.Conn
	mu   sync.Mutex
	out  []byte
}

// stream opens a sub-resource of a pod; the end of ctx ends it.
func (c *Client) stream(ctx context.Context, path string, q url.Values) (*stream, error) {
	d := websocket.Dialer{
		NetDialContext:   (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
		TLSClientConfig:  c.tls,
		HandshakeTimeout: 30 * time.Second, // the server asks the node first
		ReadBufferSize:   16 << 10, WriteBufferSize: 16 << 10,
		Subprotocols: []string{streamProtocol},
	}
	h := http.Header{"User-Agent": {c.userAgent}}
	if c.token != "" {
		h.Set("Authorization", "Bearer "+c.token)
	}
	ws, resp, err := d.DialContext(ctx, "ws"+strings.TrimPrefix(c.base, "http")+path+"?"+q.Encode(), h)
	switch {
	case err == nil:
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case errors.Is(err, websocket.ErrBadHandshake) && resp != nil:
		return nil, refusal(resp)
	default:
		return nil, &UnreachableError{Server: c.base, Err: err}
	}
	if ws.Subprotocol() != streamProtocol {
		_ = ws.Close()
		return nil, fmt.Errorf("the server %s does not know %s, which streams into pods need", c.base, streamProtocol)
	}
	return &stream{ctx: ctx, ws: ws, stop: context.AfterFunc(ctx, func() { _ = ws.Close() })}, nil
}

func (s *stream) close() {
	s.stop()
	_ = s.ws.Close()
}

func (s *stream) write(channel byte, p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out = append(append(s.out[:0], channel), p...)
	return s.ws.WriteMessage(websocket.BinaryMessage, s.out)
}

// send writes what r gives, and then that the channel ends. It returns the
// error of r; one of the connection is told by read.
func (s *stream) send(channel byte, r io.Reader) error {
	buf := make([]byte, streamBuffer)
	for {
		n, err := r.Read(buf)
		if n > 0 && s.write(channel, buf[:n]) != nil {
			return nil
		}
		if err != nil {
			_ = s.write(chClose, []byte{channel})
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return err
		}
	}
}

// read hands on what comes, piece by piece, until the server ends the stream
// in order (nil). p is used again.
func (s *stream) read(take func(channel byte, p []byte) error) error {
	buf := make([]byte, streamBuffer)
	for {
		_, r, err := s.ws.NextReader()
		if err != nil {
			return s.broke(err)
		}
		var channel [1]byte
		if _, err := io.ReadFull(r, channel[:]); errors.Is(err, io.EOF) {
			continue // an empty message means nothing
		} else if err != nil {
			return s.broke(err)
		}
		for {
			n, err := r.Read(buf)
			if n > 0 {
				if err := take(channel[0], buf[:n]); err != nil {
					return err
				}
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return s.broke(err)
			}
		}
	}
}

func (s *stream) broke(err error) error {
	switch {
	case websocket.IsCloseError(err, websocket.CloseNormalClosure):
		return nil
	case s.ctx.Err() != nil:
		return context.Cause(s.ctx)
	}
	return fmt.Errorf("the connection to the server broke: %w", root(err))
}
