package gossip

import (
	"encoding/binary"
	"slices"
	"sync"

	"github.com/hashicorp/memberlist"
)

// A message is direct (0, kind, body) or spread (1, id of 8 bytes, length of
// the subject, subject, kind, body). Memberlist repeats a broadcast only
// from where it began, so members pass spread messages on, once each, which
// they know by the id.
const (
	formDirect = 0
	formSpread = 1

	maxSubject    = 64
	maxBroadcasts = 1024
)

func encodeDirect(kind byte, b []byte) []byte {
	return append([]byte{formDirect, kind}, b...)
}

func encodeSpread(id uint64, subject string, kind byte, b []byte) []byte {
	out := make([]byte, 0, 11+len(subject)+len(b))
	out = append(out, formSpread)
	out = binary.BigEndian.AppendUint64(out, id)
	out = append(out, byte(len(subject)))
	out = append(out, subject...)
	out = append(out, kind)
	return append(out, b...)
}

// message is what decode makes of a packet.
type message struct {
	spread  bool
	subject string
	kind    byte
	body    []byte
}

func decode(b []byte) (message, bool) {
	if len(b) < 2 || len(b) > MaxMessage+maxSubject+11 {
		return message{}, false
	}
	switch b[0] {
	case formDirect:
		return message{kind: b[1], body: b[2:]}, true
	case formSpread:
		if len(b) < 11 {
			return message{}, false
		}
		n := int(b[9])
		if n > maxSubject || len(b) < 11+n {
			return message{}, false
		}
		return message{spread: true, subject: string(b[10 : 10+n]), kind: b[10+n], body: b[11+n:]}, true
	}
	return message{}, false
}

func (p *Pool) receive(b []byte) {
	m, ok := decode(b)
	if !ok {
		return
	}
	if m.spread {
		if !p.seen.first(b) {
			return
		}
		p.spread(m.subject, slices.Clone(b)) // memberlist reuses b
	}
	switch {
	case m.spread:
	case m.kind == kindAsk:
		p.asked(m.body)
		return
	case m.kind == kindAnswer:
		p.answered(m.body)
		return
	}
	if p.c.Message != nil {
		p.c.Message(m.kind, m.body)
	}
}

func (p *Pool) spread(subject string, msg []byte) {
	p.queue.QueueBroadcast(&broadcast{subject: subject, msg: msg})
	p.queue.Prune(maxBroadcasts)
}

type broadcast struct {
	subject string
	msg     []byte
}

// Invalidates implements memberlist.Broadcast.
func (b *broadcast) Invalidates(o memberlist.Broadcast) bool {
	other, ok := o.(*broadcast)
	return ok && other.subject == b.subject
}

// Name implements memberlist.NamedBroadcast.
func (b *broadcast) Name() string { return b.subject }

// Message implements memberlist.Broadcast.
func (b *broadcast) Message() []byte { return b.msg }

// Finished implements memberlist.Broadcast.
func (b *broadcast) Finished() {}

// seenMessages remembers the ids of spread messages: two generations of at
// most maxSeen each.
type seenMessages struct {
	mu       sync.Mutex
	cur, old map[uint64]struct{}
}

const maxSeen = 4096

func (s *seenMessages) first(msg []byte) bool {
	id := binary.BigEndian.Uint64(msg[1:9])
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.cur[id]; ok {
		return false
	}
	if _, ok := s.old[id]; ok {
		return false
	}
	if s.cur == nil || len(s.cur) >= maxSeen {
		s.cur, s.old = map[uint64]struct{}{}, s.cur
	}
	s.cur[id] = struct{}{}
	return true
}
