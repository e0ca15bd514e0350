// Package services keeps the node's copy of the service table: what the
// proxy and DNS go by. It is pulled as deltas apart from the assignment, lives
// in memory, and is saved now and then for a boot without a network.
//
// Owner and goroutines: Puller.Run owns pulling and saving, one goroutine; a
// Table may be read by any number.
package services

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/dunlin-project/dunlin/wire"
)

// maxBytes bounds the table: at some 60 bytes an endpoint, half a million.
const maxBytes = 64 << 20

// Errors a caller decides on.
var (
	// ErrDiverged: what is held is not what the server has; ask for all.
	ErrDiverged = errors.New("the service table differs from the server's")
	// ErrTooLarge: the table is larger than a node takes.
	ErrTooLarge = fmt.Errorf("the service table has more than %d MiB", maxBytes>>20)
)

// Table is the service table, by keys as in package wire.
type Table struct {
	mu      sync.Mutex
	items   map[string][]byte
	gen     uint64
	digest  uint64
	size    int
	staging *Table            // a full table on its way
	fresh   bool              // a server said that this is all
	local   map[string][]byte // what this node knows better, for itself; no part of digest, pages or the file
	subs    []*Subscription
}

// NewTable makes an empty one.
func NewTable() *Table { return &Table{items: map[string][]byte{}} }

// Request is what to ask the server next.
func (t *Table) Request() wire.ServicesRequest {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.staging; s != nil {
		return wire.ServicesRequest{Generation: s.gen, Filling: true}
	}
	return wire.ServicesRequest{Generation: t.gen, Digest: t.digest}
}

// Generation of what is held; 0 is nothing.
func (t *Table) Generation() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.gen
}

// Fresh says whether a server has told, since the start, that this is what
// there is; else it is what was saved, and may be old.
func (t *Table) Fresh() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.fresh
}

// confirm wakes those that wait for the first word of a server; t.mu is held.
func (t *Table) confirm() {
	if !t.fresh {
		t.fresh = true
		for _, s := range t.subs {
			s.wake()
		}
	}
}

// Reset makes the next request one for everything. What is held stays in use
// until that is here.
func (t *Table) Reset() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.staging, t.gen = nil, 0
}

// Apply takes a page; more says that there is another one to ask for.
func (t *Table) Apply(r *wire.ServicesReply) (more bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.Unchanged {
		t.staging, t.gen = nil, r.Generation
		t.confirm()
		return false, nil
	}
	into := t
	switch {
	case r.Full:
		t.staging = NewTable()
		into = t.staging
	case t.staging != nil:
		into = t.staging
	}
	into.take(r)
	if into.size > maxBytes {
		t.staging = nil
		return false, ErrTooLarge
	}
	if r.More {
		return true, nil
	}
	if into.digest != r.Digest {
		t.staging, t.gen = nil, 0
		return false, ErrDiverged
	}
	if into != t {
		t.swap(into)
	}
	t.confirm()
	return false, nil
}

// take puts a page's content in; t.mu is held, or t is nobody else's.
func (t *Table) take(r *wire.ServicesReply) {
	for _, it := range r.Items {
		t.set(it.Key, it.Data)
	}
	for _, k := range r.Gone {
		t.set(k, nil)
	}
	t.gen = r.Generation
	for _, s := range t.subs {
		s.wake()
	}
}

func (t *Table) set(key string, data []byte) {
	delete(t.local, key) // the server's word is newer
	if old, ok := t.items[key]; ok {
		t.digest -= wire.ItemDigest(key, old)
		t.size -= len(key) + len(old)
		delete(t.items, key)
	}
	if data != nil {
		t.items[key] = data
		t.digest += wire.ItemDigest(key, data)
		t.size += len(key) + len(data)
	}
	for _, s := range t.subs {
		s.dirty[key] = struct{}{}
	}
}

// swap replaces everything by what was staged.
func (t *Table) swap(s *Table) {
	for k, v := range s.items {
		if old, ok := t.items[k]; !ok || string(old) != string(v) {
			t.set(k, v)
		}
	}
	for k := range t.items {
		if _, ok := s.items[k]; !ok {
			t.set(k, nil)
		}
	}
	t.gen, t.staging = s.gen, nil
	for _, sub := range t.subs {
		sub.wake()
	}
}

// Get returns an item; nil if there is none.
func (t *Table) Get(key string) []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.get(key)
}

// get finds what the node knows better, or what a server gave; t.mu is held.
func (t *Table) get(key string) []byte {
	if data, ok := t.local[key]; ok {
		return data
	}
	return t.items[key]
}

// Served calls f for every item with the prefix as a server gave it, in no
// order.
func (t *Table) Served(prefix string, f func(key string, data []byte)) {
	t.mu.Lock()
	items := maps.Clone(t.items)
	t.mu.Unlock()
	for k, data := range items {
		if strings.HasPrefix(k, prefix) {
			f(k, data)
		}
	}
}

// SetLocal replaces what this node knows for itself alone: items of its own,
// and others in place of the server's, until the server has news of those. The
// map is the table's.
func (t *Table) SetLocal(items map[string][]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	old := t.local
	t.local = items
	for k := range old {
		if _, ok := items[k]; !ok {
			t.dirty(k)
		}
	}
	for k, data := range items {
		if was, ok := old[k]; !ok || string(was) != string(data) {
			t.dirty(k)
		}
	}
}

// dirty makes an item news for everybody; t.mu is held.
func (t *Table) dirty(key string) {
	for _, s := range t.subs {
		s.dirty[key] = struct{}{}
		s.wake()
	}
}

// Range calls f for every item with the prefix, in the order of keys.
func (t *Table) Range(prefix string, f func(key string, data []byte)) {
	t.mu.Lock()
	items := maps.Clone(t.items)
	maps.Copy(items, t.local)
	t.mu.Unlock()
	for _, k := range slices.Sorted(maps.Keys(items)) {
		if strings.HasPrefix(k, prefix) {
			f(k, items[k])
		}
	}
}

// Any says whether an item's key begins so.
func (t *Table) Any(prefix string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for k := range t.items {
		if strings.HasPrefix(k, prefix) {
			return true
		}
	}
	return false
}

// Subscription gives what changed since it was last asked.
type Subscription struct {
	t     *Table
	dirty map[string]struct{}
	news  chan struct{}
}

// Subscribe begins with everything.
func (t *Table) Subscribe() *Subscription {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := &Subscription{t: t, dirty: make(map[string]struct{}, len(t.items)), news: make(chan struct{}, 1)}
	for k := range t.items {
		s.dirty[k] = struct{}{}
	}
	for k := range t.local {
		s.dirty[k] = struct{}{}
	}
	t.subs = append(t.subs, s)
	s.wake()
	return s
}

// News is signalled when Take may have something.
func (s *Subscription) News() <-chan struct{} { return s.news }

func (s *Subscription) wake() {
	select {
	case s.news <- struct{}{}:
	default:
	}
}

// Take returns what changed, at most about limit bytes of it, and whether
// there is more.
func (s *Subscription) Take(limit int) (items []wire.ServiceItem, gone []string, more bool) {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	size := 0
	for k := range s.dirty {
		if size >= limit {
			return items, gone, true
		}
		delete(s.dirty, k)
		size += len(k)
		if data := s.t.get(k); data != nil {
			items = append(items, wire.ServiceItem{Key: k, Data: data})
			size += len(data)
		} else {
			gone = append(gone, k)
		}
	}
	return items, gone, false
}

// Close ends the subscription.
func (s *Subscription) Close() {
	s.t.mu.Lock()
	defer s.t.mu.Unlock()
	s.t.subs = slices.DeleteFunc(s.t.subs, func(o *Subscription) bool { return o == s })
}
