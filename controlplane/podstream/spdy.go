package podstream

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/moby/spdystream/spdy"
)

// Bounds of what a client may send by SPDY. Data frames are passed on piece
// by piece, so they may be of any size; the rest is small.
const (
	spdyStreams      = 2*forwardsMost + 16
	spdyControlFrame = 16 << 10
	spdyHeaderField  = 4 << 10
	spdyHeaders      = 32
)

// sink takes what comes on one stream. It is called by the connection's
// reader and may wait: SPDY as these clients speak it has no flow control but
// the connection's.
type sink interface {
	data(p []byte)
	fin()   // the client sends no more
	reset() // the client gave it up
}

// spdyConn is the server's end of a SPDY/3.1 connection, of which it knows as
// much as kubectl and client-go use: streams that the client opens.
type spdyConn struct {
	conn io.ReadWriteCloser
	br   *bufio.Reader
	fr   *spdy.Framer

	wmu  sync.Mutex
	out  bytes.Buffer // control frames
	data []byte

	mu      sync.Mutex // guards what follows, and the ends of streams
	streams map[uint32]*spdyStream
}

// spdyStream is one of its streams.
type spdyStream struct {
	c       *spdyConn
	id      uint32
	headers http.Header
	sink    sink // nil: dropped; the reader's alone

	inEnd, outEnd bool // neither can send any more: it is forgotten
}

var errStreamGone = errors.New("spdy: the stream has ended")

// hijackSPDY answers the upgrade and takes the connection over. After an
// error the client has an answer, or is gone.
func hijackSPDY(w http.ResponseWriter, proto string) (*spdyConn, error) {
	h, ok := w.(http.Hijacker)
	if !ok {
		http.Error(w, "this connection cannot be upgraded: use HTTP/1.1", http.StatusInternalServerError)
		return nil, fmt.Errorf("%T cannot be taken over", w)
	}
	head := w.Header()
	head.Set("Connection", "Upgrade")
	head.Set("Upgrade", "SPDY/3.1")
	if proto != "" {
		head.Set("X-Stream-Protocol-Version", proto)
	}
	w.WriteHeader(http.StatusSwitchingProtocols)
	conn, rw, err := h.Hijack()
	if err != nil {
		return nil, fmt.Errorf("take over the connection: %w", err)
	}
	_ = conn.SetDeadline(time.Time{})
	c, err := newSPDY(conn, rw.Reader)
	if err != nil {
		_ = conn.Close()
	}
	return c, err
}

func newSPDY(conn io.ReadWriteCloser, br *bufio.Reader) (*spdyConn, error) {
	c := &spdyConn{conn: conn, br: br, streams: map[uint32]*spdyStream{}}
	var err error
	c.fr, err = spdy.NewFramerWithOptions(&c.out, c.br,
		spdy.WithMaxControlFramePayloadSize(spdyControlFrame), spdy.WithMaxHeaderFieldSize(spdyHeaderField), spdy.WithMaxHeaderCount(spdyHeaders))
	if err != nil {
		return nil, fmt.Errorf("spdy: %w", err)
	}
	return c, nil
}

// errGoAway is a client that leaves in order.
var errGoAway = errors.New("spdy: the client leaves")

// serve reads until the connection ends, which it always does. opened gives a
// new stream its sink, or refuses it.
func (c *spdyConn) serve(opened func(*spdyStream) error) error {
	defer func() {
		c.mu.Lock()
		all := c.streams
		c.streams = map[uint32]*spdyStream{}
		c.mu.Unlock()
		for _, st := range all {
			st.gone()
		}
	}()
	buf := make([]byte, copyBuffer)
	for {
		head, err := c.br.Peek(8)
		if err != nil {
			return err
		}
		if head[0]&0x80 == 0 {
			err = c.takeData(head, buf)
		} else {
			err = c.takeControl(opened)
		}
		if err != nil {
			return err
		}
	}
}

// gone ends a stream that the client gave up, or left behind.
func (st *spdyStream) gone() {
	if inEnded, _ := st.half(true, true); !inEnded && st.sink != nil {
		st.sink.reset()
	}
}

// half ends directions of the stream, and says which had ended before.
func (st *spdyStream) half(in, out bool) (inEnded, outEnded bool) {
	st.c.mu.Lock()
	defer st.c.mu.Unlock()
	inEnded, outEnded = st.inEnd, st.outEnd
	st.inEnd, st.outEnd = in || inEnded, out || outEnded
	if st.inEnd && st.outEnd && st.c.streams[st.id] == st {
		delete(st.c.streams, st.id)
	}
	return inEnded, outEnded
}

func (c *spdyConn) stream(id uint32) *spdyStream {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.streams[id]
}

// takeData passes a data frame on.
func (c *spdyConn) takeData(head, buf []byte) error {
	id := binary.BigEndian.Uint32(head)
	fin := spdy.DataFlags(head[4])&spdy.DataFlagFin != 0
	left := int(binary.BigEndian.Uint32(head[4:]) & 0xffffff)
	if _, err := c.br.Discard(8); err != nil {
		return err
	}
	st := c.stream(id)
	if st != nil {
		if ended, _ := st.half(false, false); ended {
			st = nil // against the rules: dropped
		}
	}
	for left > 0 {
		n, err := c.br.Read(buf[:min(left, len(buf))])
		if n > 0 && st != nil && st.sink != nil {
			st.sink.data(buf[:n])
		}
		if left -= n; err != nil {
			return err
		}
	}
	if st != nil && fin {
		st.half(true, false)
		if st.sink != nil {
			st.sink.fin()
		}
	}
	return nil
}

func (c *spdyConn) takeControl(opened func(*spdyStream) error) error {
	f, err := c.fr.ReadFrame()
	if err != nil {
		return fmt.Errorf("spdy: %w", err)
	}
	switch f := f.(type) {
	case *spdy.SynStreamFrame:
		return c.takeSyn(f, opened)
	case *spdy.RstStreamFrame:
		if st := c.stream(uint32(f.StreamId)); st != nil {
			st.gone()
		}
	case *spdy.PingFrame:
		if f.Id%2 == 1 { // a client's; even ones answer ours
			return c.control(&spdy.PingFrame{Id: f.Id})
		}
	case *spdy.GoAwayFrame:
		return errGoAway
	}
	return nil // settings, headers and windows change nothing here
}

func (c *spdyConn) takeSyn(f *spdy.SynStreamFrame, opened func(*spdyStream) error) error {
	id := uint32(f.StreamId)
	st := &spdyStream{c: c, id: id, headers: f.Headers, inEnd: f.CFHeader.Flags&spdy.ControlFlagFin != 0}
	c.mu.Lock()
	twice, many := c.streams[id] != nil, len(c.streams) >= spdyStreams
	if !twice && !many {
		c.streams[id] = st
	}
	c.mu.Unlock()
	if id%2 == 0 || twice {
		return fmt.Errorf("spdy: the client opens stream %d", id)
	}
	refused := &spdy.RstStreamFrame{StreamId: f.StreamId, Status: spdy.RefusedStream}
	if many {
		return c.control(refused)
	}
	if err := c.control(&spdy.SynReplyFrame{StreamId: f.StreamId}); err != nil {
		return err
	}
	if err := opened(st); err != nil {
		st.half(true, true)
		return c.control(refused)
	}
	return nil
}

func (c *spdyConn) control(f spdy.Frame) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.out.Reset()
	if err := c.fr.WriteFrame(f); err != nil {
		return fmt.Errorf("spdy: %w", err)
	}
	_, err := c.conn.Write(c.out.Bytes())
	return err
}

// ping writes something that means nothing. It may wait for a client that
// does not read.
func (c *spdyConn) ping() error { return c.control(&spdy.PingFrame{Id: 2}) }

func (c *spdyConn) close() { _ = c.conn.Close() }

// write sends data; with fin it is the last. It waits for a client that does
// not read, as long as that is there.
func (st *spdyStream) write(p []byte, fin bool) error {
	c := st.c
	if _, ended := st.half(false, fin); ended {
		return errStreamGone
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	for first := true; first || len(p) > 0; first = false {
		n := min(len(p), copyBuffer)
		word := uint32(n)
		if fin && n == len(p) {
			word |= uint32(spdy.DataFlagFin) << 24
		}
		c.data = binary.BigEndian.AppendUint32(c.data[:0], st.id)
		c.data = binary.BigEndian.AppendUint32(c.data, word)
		c.data = append(c.data, p[:n]...)
		if _, err := c.conn.Write(c.data); err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}
