package mux

import (
	"encoding/binary"
	"fmt"
	"io"
	"sync"
)

// Stream is one of a Mux's: bytes in both directions, each of which ends by
// itself. One goroutine may read and another write.
type Stream struct {
	m      *Mux
	id     uint32
	what   []byte
	remote bool // opened by the other end

	mu     sync.Mutex
	cond   sync.Cond
	in     []byte // a ring of what waits to be read
	at, n  int    // where it begins, and how much it is
	owed   int    // read, and not yet given back as credit
	credit int    // how much may still be sent
	inEnd  bool   // the other end sends no more
	outEnd bool   // we do not
	err    error
}

func newStream(m *Mux, id uint32, what []byte, remote bool) *Stream {
	s := &Stream{m: m, id: id, what: what, remote: remote, credit: Window}
	s.cond.L = &s.mu
	return s
}

// What the opener said that the stream is for.
func (s *Stream) What() []byte { return s.what }

// Read implements io.Reader. io.EOF is the other end's CloseWrite; any other
// end is an error, a *ResetError where the other end said why.
func (s *Stream) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	s.mu.Lock()
	for s.n == 0 && !s.inEnd && s.err == nil {
		s.cond.Wait()
	}
	if s.n == 0 {
		defer s.mu.Unlock()
		if s.err != nil && !s.inEnd {
			return 0, s.err
		}
		return 0, io.EOF
	}
	n := copy(p, s.in[s.at:min(s.at+s.n, len(s.in))])
	s.at, s.n = (s.at+n)%len(s.in), s.n-n
	if s.n == 0 {
		s.at = 0
	}
	s.owed += n
	give := 0
	if s.owed >= Window/4 && !s.inEnd && s.err == nil {
		give, s.owed = s.owed, 0
	}
	s.mu.Unlock()
	if give > 0 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(give))
		_ = s.m.frame(kindCredit, s.id, b[:]) // an error ends the stream: the next Read says it
	}
	return n, nil
}

// Write implements io.Writer: it waits until the other end has room.
func (s *Stream) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		s.mu.Lock()
		for s.credit == 0 && s.err == nil && !s.outEnd {
			s.cond.Wait()
		}
		if s.err != nil || s.outEnd {
			err := s.err
			s.mu.Unlock()
			if err == nil {
				err = io.ErrClosedPipe
			}
			return done, err
		}
		n := min(len(p)-done, s.credit, maxPayload)
		s.credit -= n
		s.mu.Unlock()
		if err := s.m.frame(kindData, s.id, p[done:done+n]); err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

// CloseWrite says that no more will be written; reading goes on.
func (s *Stream) CloseWrite() error {
	s.mu.Lock()
	if s.outEnd || s.err != nil {
		defer s.mu.Unlock()
		return s.err
	}
	s.outEnd = true
	over := s.inEnd
	s.cond.Broadcast()
	s.mu.Unlock()
	err := s.m.frame(kindFin, s.id, nil)
	if over {
		s.m.forget(s)
	}
	return err
}

// Reset gives the stream up in both directions; the other end hears why. It
// does nothing when both directions have ended.
func (s *Stream) Reset(reason string) { s.reset(ErrClosed, reason) }

// ResetAs is Reset with an error that is also said here.
func (s *Stream) ResetAs(err error) { s.reset(err, err.Error()) }

func (s *Stream) reset(err error, reason string) {
	s.mu.Lock()
	over := s.err != nil || s.inEnd && s.outEnd
	s.mu.Unlock()
	s.m.forget(s)
	s.end(err)
	if !over {
		_ = s.m.frame(kindReset, s.id, clip(reason)) // an error ended the connection, and with it the stream
	}
}

// Close implements io.Closer: it gives up what has not ended by itself.
func (s *Stream) Close() error {
	s.Reset("closed")
	return nil
}

// end wakes whoever waits, with an error.
func (s *Stream) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
	s.cond.Broadcast()
}

func (s *Stream) arrived(p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.err != nil:
		return nil
	case s.inEnd:
		return fmt.Errorf("data after the end of stream %d", s.id)
	case s.n+s.owed+len(p) > Window:
		return fmt.Errorf("stream %d exceeds its window", s.id)
	}
	s.grow(s.n + len(p))
	end := (s.at + s.n) % max(len(s.in), 1)
	k := copy(s.in[end:], p)
	copy(s.in, p[k:])
	s.n += len(p)
	s.cond.Broadcast()
	return nil
}

// grow makes room for n bytes.
func (s *Stream) grow(n int) {
	if n <= len(s.in) {
		return
	}
	size := max(len(s.in), 1<<10)
	for size < n {
		size *= 2
	}
	ring := make([]byte, min(size, Window))
	first := copy(ring, s.in[s.at:min(s.at+s.n, len(s.in))])
	copy(ring[first:], s.in[:s.n-first])
	s.in, s.at = ring, 0
}

func (s *Stream) credited(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// More than a window can only be a mistake of the other end; it is the one
	// that would have to keep it.
	s.credit = min(s.credit+max(n, 0), Window)
	s.cond.Broadcast()
}

func (s *Stream) finished() {
	s.mu.Lock()
	s.inEnd = true
	over := s.outEnd
	s.cond.Broadcast()
	s.mu.Unlock()
	if over {
		s.m.forget(s)
	}
}
