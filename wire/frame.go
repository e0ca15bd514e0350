package wire

import (
	"encoding/binary"
	"fmt"
	"io"
)

// A frame is a header of 7 bytes and one chunk of a message:
//
//	byte 0     type; the top bit says that more chunks follow
//	bytes 1-4  request id, big endian; 0 for one-way messages
//	bytes 5-6  length of the chunk, big endian
//
// A message longer than a chunk is cut up, so that a lease can pass a large
// assignment that is on its way over a slow link. A full frame fits one TLS
// record.
const (
	headerSize = 7
	maxChunk   = 16384 - headerSize
	moreBit    = 0x80
)

type header struct {
	typ  Type
	more bool
	id   uint32
	size int
}

func putHeader(b []byte, h header) {
	b[0] = byte(h.typ)
	if h.more {
		b[0] |= moreBit
	}
	binary.BigEndian.PutUint32(b[1:5], h.id)
	binary.BigEndian.PutUint16(b[5:7], uint16(h.size))
}

func parseHeader(b []byte) (header, error) {
	h := header{
		typ:  Type(b[0] &^ moreBit),
		more: b[0]&moreBit != 0,
		id:   binary.BigEndian.Uint32(b[1:5]),
		size: int(binary.BigEndian.Uint16(b[5:7])),
	}
	if h.size > maxChunk {
		return h, fmt.Errorf("%w: chunk of %d bytes, limit %d", ErrMalformed, h.size, maxChunk)
	}
	if h.more && h.size == 0 {
		return h, fmt.Errorf("%w: empty chunk with more to follow", ErrMalformed)
	}
	return h, nil
}

// WriteMessage writes one whole message with id 0, for connections that
// carry one exchange only (join, stream headers).
func WriteMessage(w io.Writer, m Message) error {
	body, err := Marshal(m)
	if err != nil {
		return err
	}
	if limit := m.WireType().MaxSize(); len(body) > limit {
		return fmt.Errorf("wire: %v of %d bytes is over its limit of %d", m.WireType(), len(body), limit)
	}
	return eachFrame(m.WireType(), 0, body, func(frame []byte) error {
		_, err := w.Write(frame)
		return err
	})
}

// eachFrame cuts body into frames and calls write for each. The buffer is
// reused between calls.
func eachFrame(t Type, id uint32, body []byte, write func([]byte) error) error {
	buf := make([]byte, 0, headerSize+min(len(body), maxChunk))
	for first := true; first || len(body) > 0; first = false {
		n := min(len(body), maxChunk)
		buf = buf[:headerSize]
		putHeader(buf, header{typ: t, more: n < len(body), id: id, size: n})
		buf = append(buf, body[:n]...)
		body = body[n:]
		if err := write(buf); err != nil {
			return err
		}
	}
	return nil
}

// ReadMessage reads one whole message of the expected type into m and not a
// byte more, so that raw bytes may follow it. A Fault in its place is
// returned as the error.
func ReadMessage(r io.Reader, m Message) error {
	body, t, err := readWhole(r, m.WireType())
	if err != nil {
		return err
	}
	if t == TypeFault {
		f := new(Fault)
		if err := Unmarshal(body, f); err != nil {
			return err
		}
		return f
	}
	return Unmarshal(body, m)
}

func readWhole(r io.Reader, want Type) ([]byte, Type, error) {
	var body []byte
	var hb [headerSize]byte
	var first Type
	for {
		if _, err := io.ReadFull(r, hb[:]); err != nil {
			return nil, 0, err
		}
		h, err := parseHeader(hb[:])
		if err != nil {
			return nil, 0, err
		}
		switch {
		case first == 0 && h.typ != want && h.typ != TypeFault:
			return nil, 0, fmt.Errorf("%w: got %v, want %v", ErrMalformed, h.typ, want)
		case first != 0 && h.typ != first:
			return nil, 0, fmt.Errorf("%w: %v inside %v", ErrMalformed, h.typ, first)
		case len(body)+h.size > h.typ.MaxSize():
			return nil, 0, fmt.Errorf("%w: %v over its limit of %d bytes", ErrMalformed, h.typ, h.typ.MaxSize())
		}
		first = h.typ
		at := len(body)
		body = append(body, make([]byte, h.size)...)
		if _, err := io.ReadFull(r, body[at:]); err != nil {
			return nil, 0, err
		}
		if !h.more {
			return body, first, nil
		}
	}
}
