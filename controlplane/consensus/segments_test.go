package consensus

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// TestSealedSegmentsLetTheirWritersGo reads a segment while the next one takes
// its place, and after it.
func TestSealedSegmentsLetTheirWritersGo(t *testing.T) {
	f := &sealFiler{Filer: segment.NewFiler(t.TempDir(), &Disk{}), rotation: &rotation{}}
	info := func(id, base uint64) types.SegmentInfo {
		return types.SegmentInfo{ID: id, BaseIndex: base, MinIndex: base, SizeLimit: 8 << 10, Codec: 1}
	}
	entry := func(i uint64) string { return fmt.Sprintf("entry %d, and some more to fill the segment", i) }
	create := func(id, base uint64) *sealWriter {
		t.Helper()
		w, err := f.Create(info(id, base))
		if err != nil {
			t.Fatal(err)
		}
		return w.(*sealWriter)
	}
	first := create(1, 1)
	var last uint64
	for sealed := false; !sealed; {
		last++
		if err := first.Append([]types.LogEntry{{Index: last, Data: []byte(entry(last))}}); err != nil {
			t.Fatal(err)
		}
		var err error
		if sealed, _, err = first.Sealed(); err != nil {
			t.Fatal(err)
		}
	}
	_, start, _ := first.Sealed()
	check := func(i uint64) {
		b, err := first.GetLog(i)
		if err != nil || string(b.Bs) != entry(i) {
			t.Errorf("entry %d: %v", i, err)
			return
		}
		_ = b.Close()
	}
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for i := range last {
				check(i + 1)
			}
		})
	}
	second := create(2, last+1)
	readers.Wait()
	for i := range last {
		check(i + 1)
	}
	if first.w != nil || second.w == nil {
		t.Errorf("writers: %v of the sealed segment, %v of the tail", first.w, second.w)
	}
	if _, err := first.GetLog(last + 1); !errors.Is(err, types.ErrNotFound) {
		t.Errorf("past the end: %v", err)
	}
	if sealed, at, err := first.Sealed(); !sealed || at != start || err != nil || first.LastIndex() != last {
		t.Errorf("sealed %t at %d (%d), last %d (%d), %v", sealed, at, start, first.LastIndex(), last, err)
	}
	if err := first.Append([]types.LogEntry{{Index: last + 1}}); !errors.Is(err, types.ErrSealed) {
		t.Errorf("append to a sealed segment: %v", err)
	}
	// A tail that is not full is still its writer's when another follows.
	third := create(3, last+1)
	if second.w == nil {
		t.Error("a segment without an index lost its writer")
	}
	for _, s := range []*sealWriter{first, second, third} {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}
