package state

import (
	"encoding/binary"
	"maps"
	"slices"
)

// shares has the headers of many records hold one copy of what they have in
// common: the replicas of a template have the same labels, owner and
// requests, and a new version of a record mostly differs in one field from
// the one before. Decoded apart these are half of what a pod takes in memory.
// It belongs to the goroutine that applies. Whatever is shared is immutable.
type shares struct {
	labels   pool[map[string]string]
	owners   pool[[]Owner]
	requests pool[[]Quantity]
}

func newShares() shares {
	return shares{
		labels:   pool[map[string]string]{m: map[string]*shared[map[string]string]{}, key: labelsKey},
		owners:   pool[[]Owner]{m: map[string]*shared[[]Owner]{}, key: ownersKey},
		requests: pool[[]Quantity]{m: map[string]*shared[[]Quantity]{}, key: requestsKey},
	}
}

// put has r's header share what it can, in place of old's (nil: a new
// record).
func (s *shares) put(r, old *Record) {
	h := &r.Header
	if old != nil {
		h.keep(&old.Header)
	}
	if h.Key.Kind != kindPod {
		return // few others are alike
	}
	var was Header
	if old != nil {
		was = old.Header
	}
	if old == nil || !maps.Equal(h.Labels, was.Labels) {
		h.Labels = s.labels.take(h.Labels)
		s.labels.drop(was.Labels)
	}
	if old == nil || !slices.Equal(h.Owners, was.Owners) {
		h.Owners = s.owners.take(h.Owners)
		s.owners.drop(was.Owners)
	}
	if old == nil || !slices.Equal(h.Requests, was.Requests) {
		h.Requests = s.requests.take(h.Requests)
		s.requests.drop(was.Requests)
	}
}

func (s *shares) remove(old *Record) {
	if old.Header.Key.Kind != kindPod {
		return
	}
	s.labels.drop(old.Header.Labels)
	s.owners.drop(old.Header.Owners)
	s.requests.drop(old.Header.Requests)
}

// keep takes from the version before whatever is equal.
func (h *Header) keep(old *Header) {
	if h.Key == old.Key {
		h.Key = old.Key
	}
	if h.UID == old.UID {
		h.UID = old.UID
	}
	if maps.Equal(h.Labels, old.Labels) {
		h.Labels = old.Labels
	}
	h.Owners, h.Finalizers = kept(h.Owners, old.Owners), kept(h.Finalizers, old.Finalizers)
	h.Requests, h.Allocatable = kept(h.Requests, old.Requests), kept(h.Allocatable, old.Allocatable)
	h.HostPorts, h.Claims = kept(h.HostPorts, old.HostPorts), kept(h.Claims, old.Claims)
}

func kept[T comparable](is, was []T) []T {
	if slices.Equal(is, was) {
		return was
	}
	return is
}

// pool holds values by what they contain, as long as a live record has them.
type pool[T any] struct {
	m   map[string]*shared[T]
	key func([]byte, T) []byte // appends; nothing is appended for an empty value
	buf []byte
}

type shared[T any] struct {
	value T
	refs  int
}

// take returns the copy that all share and counts one holder more.
func (p *pool[T]) take(v T) T {
	if p.buf = p.key(p.buf[:0], v); len(p.buf) == 0 {
		return v
	}
	s := p.m[string(p.buf)]
	if s == nil {
		s = &shared[T]{value: v}
		p.m[string(p.buf)] = s
	}
	s.refs++
	return s.value
}

// drop counts one holder less.
func (p *pool[T]) drop(v T) {
	if p.buf = p.key(p.buf[:0], v); len(p.buf) == 0 {
		return
	}
	if s := p.m[string(p.buf)]; s != nil {
		if s.refs--; s.refs == 0 {
			delete(p.m, string(p.buf))
		}
	}
}

func appendString(b []byte, s string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(s))), s...)
}

func labelsKey(b []byte, m map[string]string) []byte {
	var few [8]string
	names := few[:0]
	names = slices.AppendSeq(names, maps.Keys(m))
	slices.Sort(names) // the map's order must not matter
	for _, k := range names {
		b = appendString(appendString(b, k), m[k])
	}
	return b
}

func ownersKey(b []byte, list []Owner) []byte {
	for i := range list {
		o := &list[i]
		b = appendString(appendString(appendString(b, o.UID), o.Kind), o.Name)
		var flags byte
		if o.Controller {
			flags |= 1
		}
		if o.Block {
			flags |= 2
		}
		b = append(b, flags)
	}
	return b
}

func requestsKey(b []byte, list []Quantity) []byte {
	for i := range list {
		b = binary.AppendVarint(appendString(b, list[i].Name), list[i].Value)
	}
	return b
}
