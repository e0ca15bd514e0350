package state

import "unsafe"

// bodies interns bodies by content: the replicas of one template share one
// spec. The count is of live records; snapshots and the ring keep what they
// point at through the garbage collector.
type bodies map[bodyKey]*sharedBody

type bodyKey struct {
	codec Codec
	data  string
}

type sharedBody struct {
	body *Body
	refs int
}

// keyOf makes the map key share the body's bytes, which are immutable.
func keyOf(b *Body) bodyKey {
	return bodyKey{codec: b.Codec, data: unsafe.String(unsafe.SliceData(b.Data), len(b.Data))}
}

func (m bodies) intern(r *Record) {
	r.Meta = m.one(r.Meta)
	r.Spec = m.one(r.Spec)
	r.Status = m.one(r.Status)
}

func (m bodies) one(b *Body) *Body {
	if b == nil {
		return nil
	}
	k := keyOf(b)
	s := m[k]
	if s == nil {
		s = &sharedBody{body: b}
		m[k] = s
	}
	s.refs++
	return s.body
}

func (m bodies) release(r *Record) {
	for _, b := range [...]*Body{r.Meta, r.Spec, r.Status} {
		if b == nil {
			continue
		}
		k := keyOf(b)
		if s := m[k]; s != nil {
			if s.refs--; s.refs == 0 {
				delete(m, k)
			}
		}
	}
}

// headerBytes is a rough size of a header in memory.
const headerBytes = 640

func bodyBytes(b *Body) int64 {
	if b == nil {
		return 0
	}
	return int64(len(b.Data))
}

// recordBytes estimates the encoded size of a record, bodies not shared, as
// it would stand in a snapshot.
func recordBytes(r *Record) int64 {
	return headerBytes + bodyBytes(r.Meta) + bodyBytes(r.Spec) + bodyBytes(r.Status)
}
