package gossip

import (
	"maps"
	"slices"
	"sync"

	"github.com/fxamacker/cbor/v2"
)

// kindServer is the message that carries the newest word of one server; it is
// not one of wire's kinds, which are counted from 1.
const kindServer = 255

// ServerBook is where the servers of the cluster are, as members of this site
// tell each other: the way to a server whose address changed together with
// all others that could have told it. In memory only; the zero value is empty.
// Safe for concurrent use.
type ServerBook struct {
	mu   sync.Mutex
	self string // the server of this process, "" is none
	list map[string]place
}

// place is a server's word of where it is; the highest count is the newest. No
// addresses are others' word that it is no server any more.
type place struct {
	Addresses []string `cbor:"1,keyasint"`
	Count     uint64   `cbor:"2,keyasint"`
}

// Bounds of what members may tell.
const (
	maxServers   = 32
	maxAddresses = 8
	maxAddress   = 300
)

// set says where the own server is. It returns what to tell the others; nil is
// nothing new.
func (b *ServerBook) set(id string, addrs []string) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	old := b.list[id]
	if b.self == id && slices.Equal(old.Addresses, addrs) {
		return nil
	}
	b.self = id
	b.put(id, place{Addresses: slices.Clone(addrs), Count: old.Count + 1})
	return encodePlaces(map[string]place{id: b.list[id]})
}

// forget notes that a server is none any more. It returns what to tell the
// others; nil is nothing new.
func (b *ServerBook) forget(id string) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	old := b.list[id]
	if id == b.self || len(old.Addresses) == 0 {
		return nil
	}
	b.put(id, place{Count: old.Count + 1})
	return encodePlaces(map[string]place{id: b.list[id]})
}

func (b *ServerBook) put(id string, p place) {
	if b.list == nil {
		b.list = map[string]place{}
	}
	b.list[id] = p
}

// All are the known addresses, by server id.
func (b *ServerBook) All() map[string][]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make(map[string][]string, len(b.list))
	for id, p := range b.list {
		if len(p.Addresses) > 0 {
			out[id] = slices.Clone(p.Addresses)
		}
	}
	return out
}

// room makes place for one more server where only what was forgotten fills
// the book.
func (b *ServerBook) room() bool {
	if len(b.list) < maxServers {
		return true
	}
	for _, id := range slices.Sorted(maps.Keys(b.list)) {
		if len(b.list[id].Addresses) == 0 {
			delete(b.list, id)
			return true
		}
	}
	return false
}

func (b *ServerBook) encode() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.list) == 0 {
		return nil
	}
	return encodePlaces(b.list)
}

func encodePlaces(m map[string]place) []byte {
	out, err := cbor.Marshal(m)
	if err != nil {
		return nil // strings and numbers cannot fail
	}
	return out
}

// merge takes what another member knows, and returns what was new in it, to
// be told on: an encoded record for each server. What it says of the own
// server is outdated, however high its count is: the own word is then counted
// beyond, and is news to the others.
func (b *ServerBook) merge(data []byte) (news map[string][]byte) {
	var m map[string]place
	if err := cbor.Unmarshal(data, &m); err != nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	news = map[string][]byte{}
	for _, id := range slices.Sorted(maps.Keys(m)) {
		p := m[id]
		old, known := b.list[id]
		switch {
		case id == "" || len(id) > 64 || len(p.Addresses) > maxAddresses || slices.ContainsFunc(p.Addresses, func(a string) bool { return len(a) > maxAddress }):
		case id == b.self:
			if p.Count > old.Count || (p.Count == old.Count && !slices.Equal(p.Addresses, old.Addresses)) {
				b.put(id, place{Addresses: old.Addresses, Count: p.Count + 1})
				news[id] = nil
			}
		case !known && len(p.Addresses) == 0: // nobody asks for it here
		case p.Count > old.Count && (known || b.room()):
			b.put(id, p)
			news[id] = nil
		}
	}
	for id := range news {
		news[id] = encodePlaces(map[string]place{id: b.list[id]})
	}
	return news
}
