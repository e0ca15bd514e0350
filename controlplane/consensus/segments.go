package consensus

import (
	"sync"

	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// sealFiler makes segments that tell when they are sealed, and that are small
// in memory after it: raft-wal 0.4.0 reads a segment that it wrote through
// its writer until it is opened again, with the index and the buffer of the
// largest append (together some 640 KiB, for every 2 MiB of the log).
type sealFiler struct {
	*segment.Filer
	rotation *rotation

	mu   sync.Mutex
	tail *sealWriter // made last
}

var _ types.SegmentFiler = (*sealFiler)(nil)

// Create implements types.SegmentFiler: raft-wal calls it when the segment
// before is sealed and listed so.
func (f *sealFiler) Create(info types.SegmentInfo) (types.SegmentWriter, error) {
	w, err := f.Filer.Create(info)
	if err != nil {
		return nil, err
	}
	return f.next(info, w), nil
}

// RecoverTail implements types.SegmentFiler.
func (f *sealFiler) RecoverTail(info types.SegmentInfo) (types.SegmentWriter, error) {
	w, err := f.Filer.RecoverTail(info)
	if err != nil {
		return nil, err
	}
	return f.next(info, w), nil
}

func (f *sealFiler) next(info types.SegmentInfo, w types.SegmentWriter) *sealWriter {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tail != nil {
		f.tail.letGo(f.Filer)
	}
	f.tail = &sealWriter{info: info, rotation: f.rotation, w: w, r: w}
	return f.tail
}

// sealWriter is a segment: its writer, and a reader of the file once it is
// sealed and not the tail any more.
type sealWriter struct {
	info     types.SegmentInfo
	rotation *rotation

	mu     sync.RWMutex
	w      types.SegmentWriter // nil: let go
	r      types.SegmentReader // of both, what reads
	last   uint64              // as the writer said at the end
	start  uint64              // of the index in the file
	closed bool
}

var _ types.SegmentWriter = (*sealWriter)(nil)

// letGo puts a reader in the writer's place. A segment that is not sealed (its
// end was cut off) or cannot be opened stays as it is.
func (s *sealWriter) letGo(filer *segment.Filer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.w == nil || s.closed {
		return
	}
	sealed, start, err := s.w.Sealed()
	if err != nil || !sealed {
		return
	}
	info := s.info
	info.MaxIndex, info.IndexStart = s.w.LastIndex(), start
	r, err := filer.Open(info)
	if err != nil {
		return
	}
	s.last, s.start = info.MaxIndex, start
	_ = s.w.Close() // what was written is synced, and listed
	s.w, s.r = nil, r
}

// Append implements types.SegmentWriter.
func (s *sealWriter) Append(entries []types.LogEntry) error {
	s.mu.RLock()
	w := s.w
	s.mu.RUnlock()
	if w == nil {
		return types.ErrSealed
	}
	return w.Append(entries)
}

// Sealed implements types.SegmentWriter; raft-wal asks after each append and
// rotates if so.
func (s *sealWriter) Sealed() (bool, uint64, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.w == nil {
		return true, s.start, nil
	}
	sealed, start, err := s.w.Sealed()
	if sealed && err == nil {
		s.rotation.sealed()
	}
	return sealed, start, err
}

// LastIndex implements types.SegmentWriter.
func (s *sealWriter) LastIndex() uint64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.w == nil {
		return s.last
	}
	return s.w.LastIndex()
}

// GetLog implements types.SegmentReader.
func (s *sealWriter) GetLog(idx uint64) (*types.PooledBuffer, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.r.GetLog(idx)
}

// Close implements io.Closer.
func (s *sealWriter) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.r.Close()
}
