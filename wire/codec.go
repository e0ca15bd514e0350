package wire

import (
	"errors"
	"fmt"
	"sync"

	"github.com/fxamacker/cbor/v2"
)

// ErrMalformed is in the chain of every decoding error.
var ErrMalformed = errors.New("wire: malformed message")

// modes are the one encoding and the one decoding: RFC 8949 core
// deterministic out; in, everything that is ambiguous or unbounded is
// refused. Unknown fields are ignored: they are a newer peer's additions.
var modes = sync.OnceValues(func() (cbor.EncMode, cbor.DecMode) {
	enc, err := cbor.CoreDetEncOptions().EncMode()
	if err != nil {
		panic(err) // constant options
	}
	dec, err := cbor.DecOptions{
		DupMapKey:        cbor.DupMapKeyEnforcedAPF,
		IndefLength:      cbor.IndefLengthForbidden,
		TagsMd:           cbor.TagsForbidden,
		MaxNestedLevels:  8,
		MaxArrayElements: 1 << 17,
		MaxMapPairs:      1 << 17,
		UTF8:             cbor.UTF8RejectInvalid,
	}.DecMode()
	if err != nil {
		panic(err)
	}
	return enc, dec
})

// Marshal encodes a message deterministically: equal messages give equal
// bytes.
func Marshal(m Message) ([]byte, error) {
	enc, _ := modes()
	b, err := enc.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("wire: encode %v: %w", m.WireType(), err)
	}
	return b, nil
}

// Unmarshal decodes exactly one message into the pointer m.
func Unmarshal(b []byte, m Message) error {
	if limit := m.WireType().MaxSize(); len(b) > limit {
		return fmt.Errorf("%w: %v of %d bytes, limit %d", ErrMalformed, m.WireType(), len(b), limit)
	}
	_, dec := modes()
	if err := dec.Unmarshal(b, m); err != nil {
		return fmt.Errorf("%w: %v: %w", ErrMalformed, m.WireType(), err)
	}
	return nil
}
