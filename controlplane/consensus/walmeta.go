package consensus

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// walMeta keeps raft-wal's list of segments in two slots; raft-wal's own
// keeps it in a bbolt file, which panics when it is damaged.
//
// It also repairs what raft-wal 0.4.0 does not: when the process ends after
// the write that seals a segment and before the new list of segments, raft-wal
// opens the sealed segment as its tail and refuses every further write; and
// see finishTruncation.
type walMeta struct {
	slots *slots
	filer *segment.Filer
	size  int // of a new segment

	rotation rotation
}

var _ types.MetaStore = (*walMeta)(nil)

func newWALMeta(d *Disk, dir string, size int) *walMeta {
	return &walMeta{slots: &slots{disk: d, path: filepath.Join(dir, "segments")}, filer: segment.NewFiler(dir, d), size: size}
}

// Load implements types.MetaStore.
func (m *walMeta) Load(string) (types.PersistentState, error) {
	var s types.PersistentState
	b, err := m.slots.load()
	if err != nil || b == nil {
		return s, err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("%w: list of log segments: %w", ErrDamaged, err)
	}
	if err := m.finishTruncation(&s); err != nil {
		return s, err
	}
	return s, m.finishRotation(&s)
}

// truncationMark is the data of the entry that finishTruncation appends. No
// list of segments ever counts it.
var truncationMark = []byte("dunlin: end of a truncated segment")

// finishTruncation repairs another gap of raft-wal 0.4.0 (its issue 31): when
// the end of the log is cut off, as on a follower whose last entries were
// never committed, the segment that held it is listed as sealed, but its
// index is never written, and the next open cannot read it. One more entry,
// past the segment's listed end, makes the writer add the index. Done twice,
// it finds the index there.
func (m *walMeta) finishTruncation(s *types.PersistentState) error {
	changed := false
	for i := range s.Segments {
		seg := &s.Segments[i]
		if seg.SealTime.IsZero() || seg.IndexStart != 0 {
			continue
		}
		start, err := m.sealTruncated(*seg)
		if err != nil {
			return fmt.Errorf("seal a truncated log segment: %w", err)
		}
		seg.IndexStart, changed = start, true
	}
	if !changed {
		return nil
	}
	return m.CommitState(*s)
}

func (m *walMeta) sealTruncated(seg types.SegmentInfo) (indexStart uint64, err error) {
	seg.SizeLimit = 1 // full already: the next entry seals it
	w, err := m.filer.RecoverTail(seg)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	if last := w.LastIndex(); last < seg.MaxIndex {
		return 0, fmt.Errorf("%w: it ends at entry %d, listed is %d", ErrDamaged, last, seg.MaxIndex)
	}
	sealed, indexStart, err := w.Sealed()
	if err != nil || sealed {
		return indexStart, err
	}
	if err := w.Append([]types.LogEntry{{Index: w.LastIndex() + 1, Data: truncationMark}}); err != nil {
		return 0, err
	}
	sealed, indexStart, err = w.Sealed()
	if err == nil && !sealed {
		err = fmt.Errorf("%w: it cannot be sealed", ErrDamaged)
	}
	return indexStart, err
}

// finishRotation lists a sealed tail as sealed and a new tail after it; the
// new file is made when the log is opened.
func (m *walMeta) finishRotation(s *types.PersistentState) error {
	if len(s.Segments) == 0 {
		return nil
	}
	tail := &s.Segments[len(s.Segments)-1]
	if !tail.SealTime.IsZero() {
		return nil
	}
	w, err := m.filer.RecoverTail(*tail)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read log tail: %w", err)
	}
	sealed, indexStart, err := w.Sealed()
	last := w.LastIndex()
	if err = errors.Join(err, w.Close()); err != nil {
		return fmt.Errorf("read log tail: %w", err)
	}
	if !sealed {
		return nil
	}
	now := time.Now()
	tail.SealTime, tail.MaxIndex, tail.IndexStart = now, last, indexStart
	s.Segments = append(s.Segments, types.SegmentInfo{
		ID: s.NextSegmentID, BaseIndex: last + 1, MinIndex: last + 1,
		SizeLimit: uint32(m.size), Codec: tail.Codec, CreateTime: now,
	})
	s.NextSegmentID++
	return m.CommitState(*s)
}

// CommitState implements types.MetaStore.
func (m *walMeta) CommitState(s types.PersistentState) error {
	m.rotation.begun()
	b, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode list of log segments: %w", err)
	}
	if err := m.slots.store(b); err != nil {
		return fmt.Errorf("list of log segments: %w", err)
	}
	return nil
}

var errStable = errors.New("consensus: the stable store is not the log's")

// GetStable implements types.MetaStore; unused.
func (m *walMeta) GetStable([]byte) ([]byte, error) { return nil, errStable }

// SetStable implements types.MetaStore; unused.
func (m *walMeta) SetStable(_, _ []byte) error { return errStable }

// Close implements types.MetaStore.
func (m *walMeta) Close() error { return m.slots.close() }

// rotation knows whether raft-wal still has to rotate a sealed segment, which
// it does in a goroutine of its own. A truncation of everything, or a close,
// that comes before it confuses raft-wal 0.4.0: the rotation then seals the
// wrong segment, or never happens.
type rotation struct {
	mu  sync.Mutex
	due chan struct{} // closed when the rotation holds raft-wal's lock
}

func (r *rotation) sealed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.due == nil {
		r.due = make(chan struct{})
	}
}

func (r *rotation) begun() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.due != nil {
		close(r.due)
		r.due = nil
	}
}

// wait returns when no rotation is due that has not begun.
func (r *rotation) wait() {
	r.mu.Lock()
	due := r.due
	r.mu.Unlock()
	if due != nil {
		<-due
	}
}
