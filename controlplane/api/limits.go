package api

import (
	"context"
	"errors"
	"math"
	"runtime"
	"slices"
	"sync"
)

// limiter bounds concurrent requests. A request that finds no slot waits in
// a queue of its identity; freed slots go round the identities in turn, and
// no identity holds more than its share, so one busy client cannot starve
// the others.
type limiter struct {
	short, long, large *slots
	// lists that are being made: that is work for the processors alone. One
	// identity's never take more than half of them, since what else arrives is
	// not even looked at while all are busy.
	lists *slots
	// watches that send: a write wakes all that see it, and as many as stood in
	// line for the processors before whatever arrives next.
	sends *slots
}

// maxLarge is how many large bodies are worked on at the same time.
const maxLarge = 4

func newLimiter(short, long int) *limiter {
	return &limiter{short: newSlots(short, 4*short), long: newSlots(long, 0), large: newSlots(maxLarge, short),
		lists: newLists(runtime.GOMAXPROCS(0)), sends: newSlots(sendsPerProc*runtime.GOMAXPROCS(0), math.MaxInt)}
}

// sendsPerProc is how many watches may send at once for each processor: most
// of the time of the slow ones, which are told by slowEvent, is none of it.
const sendsPerProc = 8

// newLists has a place for each processor, and half of them for one identity.
// What waits is bounded by the requests that run.
func newLists(procs int) *slots { return newSlots(max(2, procs), math.MaxInt) }

// errBusy says that there is neither a slot nor room in the queue.
var errBusy = errors.New("api: too many requests")

type slots struct {
	mu      sync.Mutex
	total   int // slots
	share   int // of one identity
	waiting int // room in all queues
	queued  int
	used    int
	by      map[string]*usage
	turns   []string // identities with a queue, in turn
}

type usage struct {
	used  int
	queue []chan struct{} // closed when the slot is given
}

func newSlots(total, waiting int) *slots {
	return &slots{total: total, share: max(1, total/2), waiting: waiting, by: map[string]*usage{}}
}

// acquire takes a slot for the identity, waiting until ctx ends if the queue
// has room. The returned function gives it back, once.
func (s *slots) acquire(ctx context.Context, identity string) (release func(), err error) {
	s.mu.Lock()
	u := s.by[identity]
	if u == nil {
		u = &usage{}
		s.by[identity] = u
	}
	if s.used < s.total && u.used < s.share && len(u.queue) == 0 {
		s.used++
		u.used++
		s.mu.Unlock()
		return s.releaser(identity), nil
	}
	// One identity may fill half of the queue.
	if s.queued >= s.waiting || len(u.queue) >= s.waiting/2 {
		s.forget(identity, u)
		s.mu.Unlock()
		return nil, errBusy
	}
	ch := make(chan struct{})
	u.queue = append(u.queue, ch)
	if len(u.queue) == 1 {
		s.turns = append(s.turns, identity)
	}
	s.queued++
	s.mu.Unlock()
	select {
	case <-ch:
		return s.releaser(identity), nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range u.queue {
		if c == ch {
			u.queue = append(u.queue[:i], u.queue[i+1:]...)
			s.queued--
			if len(u.queue) == 0 {
				s.turns = slices.DeleteFunc(s.turns, func(id string) bool { return id == identity })
			}
			s.forget(identity, u)
			return nil, ctx.Err()
		}
	}
	// The slot came in the same moment.
	s.giveBack(identity)
	return nil, ctx.Err()
}

func (s *slots) releaser(identity string) func() {
	var once sync.Once
	return func() {
		once.Do(func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.giveBack(identity)
		})
	}
}

// giveBack frees a slot and hands free ones to those who wait, in turn.
func (s *slots) giveBack(identity string) {
	u := s.by[identity]
	s.used--
	u.used--
	for tried := 0; s.used < s.total && tried < len(s.turns); {
		id := s.turns[0]
		s.turns = s.turns[1:]
		w := s.by[id]
		if w == nil || len(w.queue) == 0 {
			continue // all who waited left
		}
		if w.used >= s.share {
			s.turns = append(s.turns, id)
			tried++
			continue
		}
		ch := w.queue[0]
		w.queue = w.queue[1:]
		s.queued--
		s.used++
		w.used++
		if len(w.queue) > 0 {
			s.turns = append(s.turns, id)
		}
		close(ch)
	}
	s.forget(identity, u)
}

func (s *slots) forget(identity string, u *usage) {
	if u.used == 0 && len(u.queue) == 0 {
		delete(s.by, identity)
	}
}

// inUse counts the slots taken.
func (s *slots) inUse() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.used
}
