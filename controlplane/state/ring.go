package state

import (
	"context"
	"sort"
	"sync"
)

// DefaultRingBytes bounds the memory of the watch ring.
const DefaultRingBytes = 32 << 20

// watchBatch bounds what one Next returns.
const watchBatch = 512

// ring holds the newest events, bounded by bytes. Watchers read it at their
// own pace; it holds nothing for any of them. One writer, many readers.
type ring struct {
	limit int64

	mu    sync.RWMutex
	bytes int64
	all   deque[Event]
	kinds map[string]*lane
	lanes []*lane // the values of kinds
	every lane    // the wake-up of watchers of every kind
	// floor is the version below which nothing is known at all, lost the
	// newest version that the ring has dropped.
	floor, lost uint64
	top         uint64 // version covered
}

// lane is the part of the ring that concerns one kind.
type lane struct {
	seqs deque[uint64] // positions in ring.all
	lost uint64        // newest version of the kind that was dropped
	wake chan struct{} // closed and replaced when the kind gets an event
}

func newRing(limit int64, rv uint64) *ring {
	return &ring{limit: limit, kinds: map[string]*lane{}, every: lane{wake: make(chan struct{})}, floor: rv, top: rv}
}

func (r *ring) lane(kind string) *lane {
	l := r.kinds[kind]
	if l == nil {
		l = &lane{wake: make(chan struct{})}
		r.kinds[kind] = l
		r.lanes = append(r.lanes, l)
	}
	return l
}

func eventBytes(e *Event) int64 {
	n := int64(headerBytes)
	if e.Prev == nil || e.Type == Deleted {
		return n + bodyBytes(e.Record.Meta) + bodyBytes(e.Record.Spec) + bodyBytes(e.Record.Status)
	}
	// Bodies that the change kept are shared with the version before.
	for _, p := range [...][2]*Body{{e.Record.Meta, e.Prev.Meta}, {e.Record.Spec, e.Prev.Spec}, {e.Record.Status, e.Prev.Status}} {
		if p[0] != p[1] {
			n += bodyBytes(p[0])
		}
	}
	return n
}

// append adds events and says that everything up to rv is covered.
func (r *ring) append(events []Event, rv uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.top = rv
	var woken []*lane
	for i := range events {
		e := &events[i]
		l := r.lane(e.Record.Header.Key.Kind)
		l.seqs.push(r.all.end())
		r.all.push(*e)
		r.bytes += eventBytes(e)
		woken = append(woken, l)
	}
	for r.bytes > r.limit && r.all.len() > 1 {
		r.drop()
	}
	if len(events) == 0 {
		return
	}
	for _, l := range append(woken, &r.every) {
		if l.wake != nil {
			close(l.wake)
			l.wake = nil
		}
	}
	for _, l := range append(woken, &r.every) {
		if l.wake == nil {
			l.wake = make(chan struct{})
		}
	}
}

func (r *ring) drop() {
	e := r.all.pop()
	r.bytes -= eventBytes(&e)
	l := r.kinds[e.Record.Header.Key.Kind]
	l.seqs.pop()
	l.lost, r.lost = e.ResourceVersion, e.ResourceVersion
}

// reset forgets everything: a restore or a recovery. Watchers wake and find
// themselves too old.
func (r *ring) reset(rv uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all.clear()
	r.bytes = 0
	r.floor, r.lost, r.top = rv, rv, rv
	for _, l := range append([]*lane{&r.every}, r.lanes...) {
		l.seqs.clear()
		l.lost = rv
		close(l.wake)
		l.wake = make(chan struct{})
	}
}

func (r *ring) watch(kind, namespace string, after uint64) (*watcher, error) {
	w := &watcher{r: r, kind: kind, namespace: namespace, after: after}
	r.mu.Lock()
	defer r.mu.Unlock()
	if kind != "" {
		r.lane(kind)
	}
	if r.tooOld(w) {
		return nil, ErrTooOld
	}
	return w, nil
}

func (r *ring) tooOld(w *watcher) bool {
	if w.kind == "" {
		return w.after < max(r.floor, r.lost)
	}
	return w.after < max(r.floor, r.kinds[w.kind].lost)
}

// watcher is a position in the ring.
type watcher struct {
	r               *ring
	kind, namespace string
	after           uint64
}

// Next implements Watcher. When it returns ctx's error, progressed is valid:
// an idle watch can still send a bookmark.
func (w *watcher) Next(ctx context.Context) ([]Event, uint64, error) {
	for {
		batch, more, wake, err := w.take()
		if err != nil || len(batch) > 0 {
			return batch, w.after, err
		}
		if more {
			continue
		}
		select {
		case <-wake:
		case <-ctx.Done():
			// The version may have risen; and events may have come in the same
			// moment, which must not be lost.
			batch, _, _, err := w.take()
			if err == nil && len(batch) == 0 {
				err = ctx.Err()
			}
			return batch, w.after, err
		}
	}
}

// take returns the matching events of the next stretch of the ring; more is
// true when there is another stretch.
func (w *watcher) take() (batch []Event, more bool, wake <-chan struct{}, err error) {
	r := w.r
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.tooOld(w) {
		return nil, false, nil, ErrTooOld
	}
	n, at, l := r.all.len(), func(i int) *Event { return r.all.at(r.all.start() + uint64(i)) }, &r.every
	if w.kind != "" {
		l = r.kinds[w.kind]
		n, at = l.seqs.len(), func(i int) *Event { return r.all.at(*l.seqs.at(l.seqs.start() + uint64(i))) }
	}
	i := sort.Search(n, func(i int) bool { return at(i).ResourceVersion > w.after })
	for ; i < n && len(batch) < watchBatch; i++ {
		e := at(i)
		w.after = e.ResourceVersion
		if w.namespace == "" || e.Record.Header.Key.Namespace == w.namespace {
			batch = append(batch, *e)
		}
	}
	if i < n {
		return batch, true, l.wake, nil
	}
	w.after = max(w.after, r.top)
	return batch, false, l.wake, nil
}

// deque is a growing circular buffer whose items keep their absolute position.
type deque[T any] struct {
	buf   []T
	first uint64
	n     int
}

func (d *deque[T]) len() int         { return d.n }
func (d *deque[T]) start() uint64    { return d.first }
func (d *deque[T]) end() uint64      { return d.first + uint64(d.n) }
func (d *deque[T]) at(pos uint64) *T { return &d.buf[pos&uint64(len(d.buf)-1)] }

func (d *deque[T]) push(v T) {
	if d.n == len(d.buf) {
		grown := make([]T, max(16, 2*len(d.buf)))
		for p := d.first; p < d.end(); p++ {
			grown[p&uint64(len(grown)-1)] = *d.at(p)
		}
		d.buf = grown
	}
	d.n++
	*d.at(d.end() - 1) = v
}

func (d *deque[T]) pop() T {
	var zero T
	v := *d.at(d.first)
	*d.at(d.first) = zero
	d.first++
	d.n--
	return v
}

// clear empties the deque; positions go on.
func (d *deque[T]) clear() {
	d.first, d.n, d.buf = d.end(), 0, nil
}
