package api

import (
	"context"
	"io"
	"time"
)

// place is where a list is made and sent. Compressing and encrypting are work
// for the processors as well, so it is kept for them; while the reader takes
// nothing it is somebody else's, and before the work goes on it is taken anew.
// A nil place is of what needs none.
type place struct {
	ctx      context.Context // the request's: it waits no longer for its place
	slots    *slots
	identity string
	release  func() // may be called again
}

// Sizes of what is sent in one go, and how long that may take before the
// reader counts as slow. It is far more than the work of a piece takes, and
// little to whoever waits.
const (
	pieceSize = 32 << 10
	slowPiece = 20 * time.Millisecond
	// slowEvent is the same for what a watch sends. Thousands of them that do
	// not read take their turns before one of the same identity that does.
	slowEvent = 5 * time.Millisecond
)

// enter waits for a place of the identity.
func (s *slots) enter(ctx context.Context, identity string) (*place, error) {
	release, err := s.acquire(ctx, identity)
	if err != nil {
		return nil, err
	}
	return &place{ctx: ctx, slots: s, identity: identity, release: release}, nil
}

// leave gives the place back; it may be called again.
func (p *place) leave() {
	if p != nil {
		p.release()
	}
}

// unlessSlow runs f, which sends, and gives the place back for good when its
// reader is slow: what remains for it makes little work.
func (p *place) unlessSlow(f func() error) error {
	if p != nil {
		defer time.AfterFunc(slowEvent, p.release).Stop()
	}
	return f()
}

// through is a writer to w that gives the place back while w takes nothing.
func (p *place) through(w io.Writer) io.Writer {
	if p == nil {
		return w
	}
	return &throughPlace{w, p}
}

type throughPlace struct {
	w io.Writer
	p *place
}

// Write implements io.Writer.
func (t *throughPlace) Write(b []byte) (n int, err error) {
	for len(b) > 0 && err == nil {
		var sent int
		sent, err = t.piece(b[:min(len(b), pieceSize)])
		n, b = n+sent, b[sent:]
	}
	return n, err
}

func (t *throughPlace) piece(b []byte) (int, error) {
	lost := time.AfterFunc(slowPiece, t.p.release)
	n, err := t.w.Write(b)
	if lost.Stop() {
		return n, err
	}
	t.p.release() // the timer may be about to
	// Whoever gets no place in the middle of an answer, because the time of the
	// request is over, goes on without: a link that is as slow makes little work.
	if release, aerr := t.p.slots.acquire(t.p.ctx, t.p.identity); aerr == nil {
		t.p.release = release
	}
	return n, err
}
