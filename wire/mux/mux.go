// Package mux carries many byte streams over one connection, each with
// back-pressure of its own: what a slow reader leaves waiting is bounded, and
// holds up nobody else.
//
// Owner and goroutines: a Mux has one, its reader, which ends with the
// connection. Readers and writers of streams run in their callers'. The reader
// never writes and never waits for a stream, so that two ends cannot wait for
// each other.
package mux

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// A frame is a header of 7 bytes and a payload:
//
//	byte 0     kind
//	bytes 1-4  stream, big endian; those of the end that dialled are odd
//	bytes 5-6  length of the payload, big endian
//
// A full frame fits one TLS record.
const (
	headerSize = 7
	maxPayload = 16384 - headerSize

	kindOpen   = 1 // payload: what the stream is for
	kindData   = 2
	kindCredit = 3 // payload: 4 bytes, by how much more may be sent
	kindFin    = 4 // no more data from here
	kindReset  = 5 // payload: why; on stream 0 the whole connection ends
)

// Window is how many bytes of one stream may be on their way or wait for its
// reader. Both ends know it, so it is for ever.
const Window = 128 << 10

// writeTimeout is how long the connection may take nothing at all. The reader
// at its other end waits for nobody, so it is gone by then.
const writeTimeout = 60 * time.Second

// closeTimeout is how long Close tries to say why.
const closeTimeout = time.Second

// maxReason bounds what a reset says, bytes.
const maxReason = 2048

// ResetError is why the other end gave up a stream, or all of them.
type ResetError struct{ Reason string }

// Error implements error.
func (e *ResetError) Error() string { return e.Reason }

// ErrClosed is what streams say after their Mux was closed here.
var ErrClosed = errors.New("mux: closed")

// ErrLost is what a Mux is failed with when the node's own connection ended,
// for whatever reason.
var ErrLost = errors.New("the connection to the node ended (the node, its agent or its network failed, or another server leads now): what was started in the container was ended; try again")

// Mux shares one connection between streams. Use New.
type Mux struct {
	conn net.Conn
	most int // streams that the other end may have open

	wmu     sync.Mutex // one frame at a time
	out     []byte
	closing atomic.Bool // nobody waits long for the connection any more

	mu      sync.Mutex
	streams map[uint32]*Stream
	next    uint32
	theirs  int // of streams: opened by the other end
	err     error
	done    chan struct{}
	accept  chan *Stream
}

// New shares conn. The end that opens streams first says dialled; the other
// end may have at most most streams open at once, one more ends everything.
// Close must be called.
func New(conn net.Conn, dialled bool, most int) *Mux {
	m := &Mux{conn: conn, most: most, streams: map[uint32]*Stream{}, next: 2, done: make(chan struct{}), accept: make(chan *Stream, most)}
	if dialled {
		m.next = 1
	}
	go m.read()
	return m
}

// Done is closed when the connection has ended.
func (m *Mux) Done() <-chan struct{} { return m.done }

// Err is why the connection ended; nil while it is there.
func (m *Mux) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// Open starts a stream; what says to the other end what it is for.
func (m *Mux) Open(what []byte) (*Stream, error) {
	if len(what) > maxPayload {
		return nil, fmt.Errorf("mux: %d bytes to open a stream, at most %d", len(what), maxPayload)
	}
	m.wmu.Lock() // streams are opened in the order of their numbers
	defer m.wmu.Unlock()
	m.mu.Lock()
	if m.err != nil {
		defer m.mu.Unlock()
		return nil, m.err
	}
	s := newStream(m, m.next, nil, false)
	m.next += 2
	m.streams[s.id] = s
	m.mu.Unlock()
	if err := m.frameLocked(kindOpen, s.id, what); err != nil {
		return nil, err
	}
	return s, nil
}

// Accept waits for a stream that the other end opens.
func (m *Mux) Accept() (*Stream, error) {
	select {
	case s := <-m.accept:
		return s, nil
	case <-m.done:
		return nil, m.Err()
	}
}

// Close ends all streams and the connection; the other end hears why, if it
// can. reason "" says nothing.
func (m *Mux) Close(reason string) {
	if reason != "" {
		m.mu.Lock()
		over := m.err != nil
		m.mu.Unlock()
		if !over {
			m.closing.Store(true)
			_ = m.conn.SetWriteDeadline(time.Now().Add(closeTimeout)) // for who writes now
			_ = m.frame(kindReset, 0, clip(reason))
		}
	}
	m.Fail(ErrClosed)
}

func clip(reason string) []byte { return []byte(reason[:min(len(reason), maxReason)]) }

// Fail ends everything at once with an error, which streams here then say.
func (m *Mux) Fail(err error) {
	m.mu.Lock()
	if m.err != nil {
		m.mu.Unlock()
		return
	}
	m.err = err
	all := m.streams
	m.streams = map[uint32]*Stream{}
	close(m.done)
	m.mu.Unlock()
	_ = m.conn.Close()
	for _, s := range all {
		s.end(err)
	}
}

func (m *Mux) frame(kind byte, id uint32, payload []byte) error {
	m.wmu.Lock()
	defer m.wmu.Unlock()
	return m.frameLocked(kind, id, payload)
}

// frameLocked writes one frame; the caller holds wmu.
func (m *Mux) frameLocked(kind byte, id uint32, payload []byte) error {
	d := writeTimeout
	if m.closing.Load() {
		d = closeTimeout
	}
	_ = m.conn.SetWriteDeadline(time.Now().Add(d))
	m.out = append(m.out[:0], kind, 0, 0, 0, 0, 0, 0)
	binary.BigEndian.PutUint32(m.out[1:], id)
	binary.BigEndian.PutUint16(m.out[5:], uint16(len(payload)))
	m.out = append(m.out, payload...)
	if _, err := m.conn.Write(m.out); err != nil {
		// The other end may have said why before it went: the reader knows it
		// in a moment.
		t := time.NewTimer(closeTimeout)
		defer t.Stop()
		select {
		case <-m.done:
		case <-t.C:
			m.Fail(fmt.Errorf("mux: %w", err))
		}
		return m.Err()
	}
	return nil
}

// read takes frames until the connection ends.
func (m *Mux) read() {
	buf := make([]byte, maxPayload)
	var head [headerSize]byte
	for {
		_, err := io.ReadFull(m.conn, head[:])
		size := int(binary.BigEndian.Uint16(head[5:]))
		if err == nil && size > maxPayload {
			err = fmt.Errorf("a frame of %d bytes", size)
		}
		if err == nil {
			_, err = io.ReadFull(m.conn, buf[:size])
		}
		if err == nil {
			err = m.take(head[0], binary.BigEndian.Uint32(head[1:]), buf[:size])
		}
		if err != nil {
			var r *ResetError
			if !errors.As(err, &r) {
				err = fmt.Errorf("mux: %w", err)
			}
			m.Fail(err)
			return
		}
	}
}

// take acts on one frame. What comes for a stream that is gone here was sent
// before the other end knew.
func (m *Mux) take(kind byte, id uint32, p []byte) error {
	if kind == kindOpen {
		return m.opened(id, p)
	}
	if kind == kindReset && id == 0 {
		return &ResetError{Reason: string(p)}
	}
	m.mu.Lock()
	s := m.streams[id]
	m.mu.Unlock()
	if s == nil {
		return nil
	}
	switch kind {
	case kindData:
		return s.arrived(p)
	case kindCredit:
		if len(p) != 4 {
			return errors.New("a credit of another size")
		}
		s.credited(int(binary.BigEndian.Uint32(p)))
	case kindFin:
		s.finished()
	case kindReset:
		m.forget(s)
		s.end(&ResetError{Reason: string(p)})
	}
	return nil
}

func (m *Mux) opened(id uint32, what []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return m.err
	}
	if id == 0 || id%2 == m.next%2 || m.streams[id] != nil {
		return fmt.Errorf("stream %d is opened by the wrong end, or twice", id)
	}
	if m.theirs >= m.most {
		return fmt.Errorf("more than %d streams", m.most)
	}
	s := newStream(m, id, append([]byte(nil), what...), true)
	select {
	case m.accept <- s:
	default:
		return fmt.Errorf("more than %d streams wait", m.most)
	}
	m.streams[id] = s
	m.theirs++
	return nil
}

func (m *Mux) forget(s *Stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.streams[s.id] != s {
		return
	}
	delete(m.streams, s.id)
	if s.remote {
		m.theirs--
	}
}
