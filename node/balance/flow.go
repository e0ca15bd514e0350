package balance

import (
	"slices"
	"sync/atomic"
	"time"
)

const (
	// IdleFor is how long nothing has to pass through a connection to an
	// endpoint that terminates until it is closed, where nobody was asked.
	IdleFor = 5 * time.Second
	// AnsweredFor is that where the endpoint spoke last, to a client that had
	// asked: the connection may be between two requests, and the answer may not
	// be over.
	AnsweredFor = 15 * time.Second
)

// Who spoke last.
const (
	nobody   = iota // but maybe the endpoint, unasked
	client          // an answer is due, however long it takes
	endpoint        // to a client that had asked
)

// Flow is one connection of a client to a backend.
type Flow struct {
	Moved atomic.Int64 // Unix nanoseconds at which bytes last moved
	End   func()       // closes both sides
	// Silent, where it can be known, says whether a side has acknowledged nothing
	// for so long, though it was asked to.
	Silent func(time.Duration) bool
	// Pending, where it can be known, says whether bytes that were passed on are
	// not with who they are for.
	Pending func() bool

	held  atomic.Int32 // directions with bytes that were read and not passed on
	spoke atomic.Int32
	pause atomic.Int64 // the longest within this answer, in nanoseconds
}

// Hold says that bytes were read, from the client or from the endpoint, which
// are not passed on until Release.
func (f *Flow) Hold(fromClient bool) {
	f.held.Add(1)
	now := time.Now().UnixNano()
	moved := f.Moved.Swap(now)
	switch {
	case fromClient:
		f.spoke.Store(client)
		f.pause.Store(0)
	case f.spoke.CompareAndSwap(client, endpoint):
	case f.spoke.Load() == endpoint && now-moved > f.pause.Load():
		f.pause.Store(now - moved)
	}
}

// Release says that they were passed on.
func (f *Flow) Release() {
	f.Moved.Store(time.Now().UnixNano())
	f.held.Add(-1)
}

// idle says whether the connection is between two requests, as far as one can
// know who sees bytes alone.
func (f *Flow) idle(now time.Time) bool {
	if f.held.Load() > 0 || (f.Pending != nil && f.Pending()) {
		f.Moved.Store(now.UnixNano()) // what comes after them counts from there
		return false
	}
	still := time.Duration(now.UnixNano() - f.Moved.Load())
	switch f.spoke.Load() {
	case client:
		return false
	case endpoint:
		// An answer with pauses may have another one.
		return still > max(AnsweredFor, 2*time.Duration(f.pause.Load()))
	}
	return still > IdleFor
}

// Idle takes the connections that shall end: those of a backend that gets no
// new ones, through which nothing passed for a while, while nothing is on its
// way and no answer is due.
func (b *Backend) Idle(now time.Time) (out []*Flow) {
	b.mu.Lock()
	if b.draining {
		for f := range b.conns {
			out = append(out, f)
		}
	}
	b.mu.Unlock()
	return slices.DeleteFunc(out, func(f *Flow) bool { return !f.idle(now) })
}
