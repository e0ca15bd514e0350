package consensus

import (
	"bytes"
	"reflect"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
)

// TestEveryBitOfAnEntryCounts flips each bit of a stored entry: it is refused,
// or what is read is what was written.
func TestEveryBitOfAnEntryCounts(t *testing.T) {
	var codec wal.BinaryCodec
	want := raft.Log{Index: 70000, Term: 9, Type: raft.LogCommand, Data: []byte("some data")}
	written := want
	written.AppendedAt = time.Date(2026, 11, 30, 8, 0, 0, 123456789, time.UTC)
	var b bytes.Buffer
	if err := codec.Encode(seal(&written), &b); err != nil {
		t.Fatal(err)
	}
	read := func(b []byte) (e raft.Log, err error) {
		defer func() {
			if p := recover(); p != nil { // as in logStore.read
				err = ErrDamaged
			}
		}()
		if err := codec.Decode(b, &e); err != nil {
			return e, err
		}
		return e, unseal(want.Index, &e)
	}
	if e, err := read(b.Bytes()); err != nil || !reflect.DeepEqual(e, want) {
		t.Fatalf("%+v %v", e, err)
	}
	refused := 0
	for i := range b.Len() * 8 {
		damaged := bytes.Clone(b.Bytes())
		damaged[i/8] ^= 1 << (i % 8)
		e, err := read(damaged)
		if err != nil {
			refused++
		} else if !reflect.DeepEqual(e, want) {
			t.Errorf("bit %d of byte %d: %+v", i%8, i/8, e)
		}
	}
	if refused < 8*len(want.Data) {
		t.Errorf("only %d of %d bits are noticed", refused, b.Len()*8)
	}
	// What an earlier version wrote, with the time, is as good.
	e := written
	e.Extensions = seal(&written).Extensions
	b.Reset()
	if err := codec.Encode(&e, &b); err != nil {
		t.Fatal(err)
	}
	if e, err := read(b.Bytes()); err != nil || !reflect.DeepEqual(e, want) {
		t.Errorf("%+v %v", e, err)
	}
}
