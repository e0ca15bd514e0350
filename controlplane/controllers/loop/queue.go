package loop

import (
	"container/heap"
	"context"
	"math"
	"sync"
	"time"
)

// Backoff is a jittered exponential delay.
type Backoff struct {
	Base time.Duration // after the first failure; default 50 ms
	Max  time.Duration // default 60 s
	// Rand returns a number in [0,1); the delay is spread over ±20 %.
	Rand func() float64
}

// Delay before try number failures+1; failures counts from 1.
func (b Backoff) Delay(failures int) time.Duration {
	base, limit := b.Base, b.Max
	if base <= 0 {
		base = 50 * time.Millisecond
	}
	if limit <= 0 {
		limit = time.Minute
	}
	d := math.Min(float64(base)*math.Pow(2, float64(max(failures, 1)-1)), float64(limit))
	if b.Rand != nil {
		d *= 0.8 + 0.4*b.Rand()
	}
	return time.Duration(d)
}

// Queue is a bounded set of keys that wait for a worker: now, or at a later
// time. A key that is added while a worker holds it comes back when the
// worker is done. All methods are safe for concurrent use; time is the
// monotonic one of package time.
type Queue[K comparable] struct {
	backoff Backoff
	limit   int

	mu       sync.Mutex
	ready    []K // FIFO from head
	head     int
	queued   map[K]struct{}       // in ready
	running  map[K]bool           // held by a worker; true: add again on Done
	delayed  map[K]*delayedKey[K] // in later
	later    delayHeap[K]
	failures map[K]int
	overflow bool
	blocked  int // callers of AddWait that wait for room
	closed   bool
	wake     chan struct{} // closed and replaced when a waiter should look again
}

// NewQueue makes a queue of at most limit different keys (0: 1<<20). Adding
// more sets the overflow mark instead, see Overflowed.
func NewQueue[K comparable](limit int, b Backoff) *Queue[K] {
	if limit <= 0 {
		limit = 1 << 20
	}
	return &Queue[K]{
		backoff: b, limit: limit, wake: make(chan struct{}),
		queued: map[K]struct{}{}, running: map[K]bool{}, delayed: map[K]*delayedKey[K]{}, failures: map[K]int{},
	}
}

// Add queues the key now.
func (q *Queue[K]) Add(k K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.add(k)
}

func (q *Queue[K]) add(k K) {
	if q.closed {
		return
	}
	if _, ok := q.queued[k]; ok {
		return
	}
	if d, ok := q.delayed[k]; ok {
		heap.Remove(&q.later, d.index)
		delete(q.delayed, k)
	}
	if _, ok := q.running[k]; ok {
		q.running[k] = true
		return
	}
	if q.full() {
		q.overflow = true
		return
	}
	q.queued[k] = struct{}{}
	q.ready = append(q.ready, k)
	q.signal()
}

func (q *Queue[K]) full() bool { return len(q.queued)+len(q.delayed) >= q.limit }

// AddAfter queues the key in d, unless it is due earlier anyway.
func (q *Queue[K]) AddAfter(k K, d time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.addAfter(k, d)
}

func (q *Queue[K]) addAfter(k K, d time.Duration) {
	if d <= 0 {
		q.add(k)
		return
	}
	if _, ok := q.queued[k]; ok || q.closed {
		return
	}
	at := time.Now().Add(d)
	if e, ok := q.delayed[k]; ok {
		if at.Before(e.at) {
			e.at = at
			heap.Fix(&q.later, e.index)
			q.signal()
		}
		return
	}
	if q.full() {
		q.overflow = true
		return
	}
	e := &delayedKey[K]{key: k, at: at}
	q.delayed[k] = e
	heap.Push(&q.later, e)
	q.signal()
}

// AddWait is AddAfter that waits for room instead of setting the overflow
// mark, until ctx ends.
func (q *Queue[K]) AddWait(ctx context.Context, k K, d time.Duration) {
	for {
		q.mu.Lock()
		if !q.full() || q.closed || q.known(k) {
			q.addAfter(k, d)
			q.mu.Unlock()
			return
		}
		q.blocked++
		wake := q.wake
		q.mu.Unlock()
		ok := sleep(ctx, -1, wake)
		q.mu.Lock()
		q.blocked--
		q.mu.Unlock()
		if !ok {
			return
		}
	}
}

func (q *Queue[K]) known(k K) bool {
	_, queued := q.queued[k]
	_, delayed := q.delayed[k]
	_, running := q.running[k]
	return queued || delayed || running
}

// AddFailed queues the key after its next back-off delay, which it returns.
func (q *Queue[K]) AddFailed(k K) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.failures[k]++
	d := q.backoff.Delay(q.failures[k])
	q.addAfter(k, d)
	return d
}

// Forget resets the key's back-off.
func (q *Queue[K]) Forget(k K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.failures, k)
}

// Get waits for a key. ok is false when ctx ended or the queue was closed.
// The caller must call Done for it.
func (q *Queue[K]) Get(ctx context.Context) (k K, ok bool) {
	for {
		q.mu.Lock()
		wait := q.promote()
		if k, ok = q.pop(); ok || q.closed || ctx.Err() != nil {
			q.mu.Unlock()
			return k, ok
		}
		wake := q.wake
		q.mu.Unlock()
		if !sleep(ctx, wait, wake) {
			return k, false
		}
	}
}

// TryGet is Get without waiting.
func (q *Queue[K]) TryGet() (k K, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.promote()
	return q.pop()
}

func (q *Queue[K]) pop() (k K, ok bool) {
	if q.head == len(q.ready) {
		return k, false
	}
	k = q.ready[q.head]
	var zero K
	q.ready[q.head] = zero
	q.head++
	if q.head == len(q.ready) {
		q.ready, q.head = q.ready[:0], 0
	} else if q.head > 1024 && q.head > len(q.ready)/2 {
		q.ready = append(q.ready[:0], q.ready[q.head:]...)
		q.head = 0
	}
	delete(q.queued, k)
	q.running[k] = false
	if q.blocked > 0 {
		q.signal()
	}
	return k, true
}

// promote moves due keys to ready, and returns how long until the next is
// due (negative: none waits).
func (q *Queue[K]) promote() time.Duration {
	now := time.Now()
	for q.later.Len() > 0 {
		e := q.later[0]
		if d := e.at.Sub(now); d > 0 {
			return d
		}
		heap.Pop(&q.later)
		delete(q.delayed, e.key)
		if _, held := q.running[e.key]; held {
			q.running[e.key] = true
			continue
		}
		q.queued[e.key] = struct{}{}
		q.ready = append(q.ready, e.key)
	}
	return -1
}

func sleep(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	var due <-chan time.Time
	if d >= 0 {
		t := time.NewTimer(d)
		defer t.Stop()
		due = t.C
	}
	select {
	case <-ctx.Done():
		return false
	case <-wake:
	case <-due:
	}
	return true
}

// Done ends the worker's hold on a key.
func (q *Queue[K]) Done(k K) {
	q.mu.Lock()
	defer q.mu.Unlock()
	again := q.running[k]
	delete(q.running, k)
	if again {
		q.add(k)
	}
}

// Len counts the keys that wait, due or not.
func (q *Queue[K]) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.queued) + len(q.delayed)
}

// Waiting counts the keys that wait for a worker, and those that are due
// later.
func (q *Queue[K]) Waiting() (ready, later int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.promote()
	return len(q.queued), len(q.delayed)
}

// Overflowed says, once, that keys were refused since the last call and the
// queue has room again: whoever feeds it must list everything anew.
func (q *Queue[K]) Overflowed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.overflow || len(q.queued)+len(q.delayed) > q.limit/2 {
		return false
	}
	q.overflow = false
	return true
}

// Close makes every Get return and every Add do nothing.
func (q *Queue[K]) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.signal()
}

func (q *Queue[K]) signal() {
	close(q.wake)
	q.wake = make(chan struct{})
}

type delayedKey[K comparable] struct {
	key   K
	at    time.Time
	index int
}

type delayHeap[K comparable] []*delayedKey[K]

func (h delayHeap[K]) Len() int           { return len(h) }
func (h delayHeap[K]) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h delayHeap[K]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}
func (h *delayHeap[K]) Push(x any) {
	e := x.(*delayedKey[K])
	e.index = len(*h)
	*h = append(*h, e)
}
func (h *delayHeap[K]) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return e
}
