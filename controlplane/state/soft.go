package state

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/tidwall/btree"
)

// Soft is an in-memory store for what may be lost with its leader: Events,
// node Leases. Nothing of it reaches Raft or a disk. It has its own version
// space, which starts higher in every term, so that a watch or list of an
// earlier leadership is answered with ErrTooOld. Safe for concurrent use.
type Soft struct {
	o SoftOptions

	mu   sync.Mutex
	t    *tables
	ages map[string]*kindAges
	rv   uint64
	ring *ring
	cur  atomic.Pointer[view]
}

var _ Reader = (*Soft)(nil)

// Limit bounds what a Soft holds of one kind; the oldest is dropped first,
// by its last write.
type Limit struct {
	Count int
	Bytes int64
}

// SoftOptions of a Soft; zero values are the defaults.
type SoftOptions struct {
	Limits    map[string]Limit // by kind
	Default   Limit            // of other kinds: 10,000 records, 16 MiB
	RingBytes int64            // of the watch ring: 8 MiB
}

type kindAges struct {
	byVersion *btree.Map[uint64, *Record]
	bytes     int64
}

// NewSoft returns an empty soft store for one leadership.
func NewSoft(term uint64, o SoftOptions) *Soft {
	if o.RingBytes == 0 {
		o.RingBytes = 8 << 20
	}
	if o.Default.Count == 0 {
		o.Default.Count = 10_000
	}
	if o.Default.Bytes == 0 {
		o.Default.Bytes = 16 << 20
	}
	s := &Soft{o: o}
	s.Reset(term)
	return s
}

// Reset empties the store for another leadership; watches end with ErrTooOld.
func (s *Soft) Reset(term uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.t, s.ages = newTables(), map[string]*kindAges{}
	s.rv = max(s.rv+1, term<<32)
	v := newView(s.t)
	v.rv = s.rv
	s.cur.Store(v)
	if s.ring == nil {
		s.ring = newRing(s.o.RingBytes, s.rv)
		return
	}
	s.ring.reset(s.rv)
}

// Snapshot implements Reader.
func (s *Soft) Snapshot() Snapshot { return s.cur.Load() }

// Watch implements Reader.
func (s *Soft) Watch(kind, namespace string, after uint64) (Watcher, error) {
	w, err := s.ring.watch(kind, namespace, after)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Put stores a record unconditionally. The record is copied shallowly and
// given its version.
func (s *Soft) Put(r *Record) Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.put(r, s.t.get(r.Header.Key))
}

// PutIf stores a record if nothing changed in between. uid "" creates: the
// key must be free. Otherwise the object under the key must have the uid and,
// unless rv is 0, the version.
func (s *Soft) PutIf(r *Record, uid string, rv uint64) Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := r.Header.Key
	old := s.t.get(k)
	if uid == "" {
		if old != nil {
			return refuse(ReasonExists, old, "%s %q exists", k.Kind, k.Name)
		}
		return s.put(r, nil)
	}
	if res, ok := matches(old, k, uid, rv); !ok {
		return res
	}
	return s.put(r, old)
}

// Delete removes the record under the key; uid "" and rv 0 match any.
func (s *Soft) Delete(k Key, uid string, rv uint64) Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.t.get(k)
	if res, ok := matches(old, k, uid, rv); !ok {
		return res
	}
	e := s.remove(old)
	s.publish([]Event{e})
	return Result{ResourceVersion: e.ResourceVersion}
}

func matches(old *Record, k Key, uid string, rv uint64) (Result, bool) {
	switch {
	case old == nil:
		return refuse(ReasonNotFound, nil, "%s %q not found", k.Kind, k.Name), false
	case uid != "" && old.Header.UID != uid:
		return refuse(ReasonUID, old, "uid is %s, not %s", old.Header.UID, uid), false
	case rv != 0 && old.Header.ResourceVersion != rv:
		return refuse(ReasonConflict, old, "version is %d, not %d", old.Header.ResourceVersion, rv), false
	}
	return Result{}, true
}

func (s *Soft) put(r, old *Record) Result {
	c := *r
	if c.Header.Key.Kind == "" || c.Header.Key.Name == "" || c.Header.UID == "" {
		return invalid("record without kind, name or uid")
	}
	if other := s.t.byUID(c.Header.UID); other != nil && other.Header.Key != c.Header.Key {
		return invalid("uid %s belongs to %s %q", c.Header.UID, other.Header.Key.Kind, other.Header.Key.Name)
	}
	var events []Event
	if old != nil && old.Header.UID != c.Header.UID {
		events = append(events, s.remove(old))
		old = nil
	}
	s.rv++
	c.Header.ResourceVersion = s.rv
	e := Event{Type: Added, ResourceVersion: s.rv, Record: &c, Prev: old}
	ages := s.agesOf(c.Header.Key.Kind)
	if old != nil {
		e.Type = Modified
		ages.byVersion.Delete(old.Header.ResourceVersion)
		ages.bytes -= recordBytes(old)
	}
	s.t.put(&c, old)
	ages.byVersion.Set(s.rv, &c)
	ages.bytes += recordBytes(&c)
	events = append(events, e)
	limit, ok := s.o.Limits[c.Header.Key.Kind]
	if !ok {
		limit = s.o.Default
	}
	for ages.byVersion.Len() > 1 && (ages.byVersion.Len() > limit.Count || ages.bytes > limit.Bytes) {
		_, oldest, _ := ages.byVersion.Min()
		events = append(events, s.remove(oldest))
	}
	s.publish(events)
	return Result{ResourceVersion: c.Header.ResourceVersion, Record: &c}
}

func (s *Soft) agesOf(kind string) *kindAges {
	a := s.ages[kind]
	if a == nil {
		a = &kindAges{byVersion: btree.NewMap[uint64, *Record](0)}
		s.ages[kind] = a
	}
	return a
}

func (s *Soft) remove(old *Record) Event {
	s.rv++
	s.t.remove(old)
	a := s.agesOf(old.Header.Key.Kind)
	a.byVersion.Delete(old.Header.ResourceVersion)
	a.bytes -= recordBytes(old)
	return Event{Type: Deleted, ResourceVersion: s.rv, Record: old, Prev: old}
}

func (s *Soft) publish(events []Event) {
	v := s.t.publish(s.cur.Load())
	v.rv = s.rv
	s.cur.Store(v)
	s.ring.append(events, s.rv)
}

// String names the store in logs.
func (s *Soft) String() string {
	return fmt.Sprintf("soft store at version %d", s.cur.Load().rv)
}
