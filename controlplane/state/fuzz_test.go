package state

import (
	"bytes"
	"errors"
	"testing"
)

// FuzzDecodeEntry: any bytes are an entry, or refused; what is accepted can
// be applied without a panic and encodes to an entry that means the same.
func FuzzDecodeEntry(f *testing.F) {
	for _, ops := range [][]Op{
		nil,
		{{Type: OpCreate, Record: full()}, {Type: OpRecover}, {Type: OpBootstrap, ClusterID: "c", Feature: 1}},
		{{Type: OpBind, Key: &Key{"Pod", "a", "b"}, UID: "u", Node: "n", NodeUID: "v"}, {Type: OpDelete, Key: &Key{"Pod", "a", "b"}, UID: "u"}},
	} {
		b, err := EncodeEntry(ops)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte{0xa2, 0x01, 0x02, 0x02, 0x80})       // a newer format
	f.Add([]byte{0xa1, 0x01, 0x01})                   // no ops
	f.Add([]byte{0xbf, 0x01, 0x01, 0xff})             // indefinite length
	f.Add([]byte{0xa2, 0x01, 0x01, 0x02, 0x9b, 0xff}) // a huge array
	f.Fuzz(func(t *testing.T, b []byte) {
		ops, err := DecodeEntry(b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrUnknownOp) {
				t.Errorf("untyped error %v", err)
			}
			return
		}
		m, twin := NewMachine(Options{}), NewMachine(Options{})
		if _, err := m.Apply(1, b); err != nil {
			t.Fatal(err)
		}
		again, err := EncodeEntry(ops)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := twin.Apply(1, again); err != nil {
			t.Fatal(err)
		}
		x, err := m.Hash()
		if err != nil {
			t.Fatal(err)
		}
		if y, _ := twin.Hash(); x != y {
			t.Error("the entry means another thing once encoded again")
		}
	})
}

// FuzzDecodeRecord: what is accepted encodes to the same bytes each time.
func FuzzDecodeRecord(f *testing.F) {
	b, err := EncodeRecord(full())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:len(b)/2])
	f.Add([]byte{0xa1, 0x01, 0xa0})
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeRecord(b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrNewerFormat) {
				t.Errorf("untyped error %v", err)
			}
			return
		}
		once, err := EncodeRecord(r)
		if err != nil {
			t.Fatal(err)
		}
		r2, err := DecodeRecord(once)
		if err != nil {
			t.Fatal(err)
		}
		if twice, _ := EncodeRecord(r2); !bytes.Equal(once, twice) {
			t.Errorf("%x, then %x", once, twice)
		}
	})
}
