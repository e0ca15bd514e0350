package consensus

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// defaultSegment is the size of a log segment: small, since a segment is the
// unit in which the log gives space back.
const defaultSegment = 2 << 20

// logStore is raft-wal with what we need around it: a checksum per entry,
// recovery from failed writes without a restart, and truncation that never
// goes past the older of the two kept snapshots.
type logStore struct {
	disk    *Disk
	dir     string
	segment int
	logger  hclog.Logger
	// kept returns the indexes of the snapshots: of the oldest that the log
	// must still reach (0: the log must be whole) and of the newest.
	kept func() (oldest, newest uint64)

	wmu    sync.Mutex   // one writer at a time: Raft appends and truncates from two goroutines
	mu     sync.RWMutex // the pointer w: held for writing while w is reopened
	w      *wal.WAL
	meta   *walMeta
	listed []types.SegmentInfo // what the log consisted of when it was opened
	cut    bool                // its last file was cut off within an entry
	broken error               // the last write failed: w must be reopened first

	first, last atomic.Uint64   // durable range
	ctx         context.Context // ends with the node; nil waits for nothing
	cutFrom     atomic.Uint64   // a truncation of the tail goes on from this entry; 0: none
	appended    atomic.Uint64   // bytes of entries, since the newest snapshot at open
	fault       func(error)
	well        func() // an append worked; nil is nobody's news
	// lower forgets durably that the log ever ended after last; nil if nobody
	// noted it.
	lower func(last uint64) error
}

var (
	_ raft.LogStore          = (*logStore)(nil)
	_ raft.MonotonicLogStore = (*logStore)(nil)
)

// IsMonotonic implements raft.MonotonicLogStore.
func (l *logStore) IsMonotonic() bool { return true }

// openWAL opens what is in the folder as it is.
func (l *logStore) openWAL() (err error) {
	defer func() {
		// raft-wal trusts the files it is given.
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: open log: %v", ErrDamaged, p)
		}
	}()
	l.meta = newWALMeta(l.disk, l.dir, l.segment)
	state, err := l.meta.Load(l.dir)
	if err != nil {
		return err
	}
	l.listed = state.Segments
	// A segment newer than the list says: the list is an old one. raft-wal
	// would delete that segment.
	ids, err := segment.NewFiler(l.dir, l.disk).List()
	if err != nil {
		return fmt.Errorf("%w: list log: %w", ErrDamaged, err)
	}
	for id := range ids {
		if id >= state.NextSegmentID {
			return fmt.Errorf("%w: the list of log segments is older than the log", ErrDamaged)
		}
	}
	w, err := wal.Open(l.dir, wal.WithMetaStore(l.meta), wal.WithLogger(l.logger),
		wal.WithSegmentSize(l.segment), wal.WithSegmentFiler(&sealFiler{Filer: segment.NewFiler(l.dir, l.disk), rotation: &l.meta.rotation}))
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	l.w = w
	return l.ranges()
}

func (l *logStore) ranges() error {
	first, err := l.w.FirstIndex()
	if err != nil {
		return fmt.Errorf("log: %w", err)
	}
	last, err := l.w.LastIndex()
	if err != nil {
		return fmt.Errorf("log: %w", err)
	}
	l.first.Store(first)
	l.last.Store(last)
	l.cutFrom.Store(0)
	return nil
}

// end is the durable end that may be promised to the next start: not what a
// truncation is about to take away.
func (l *logStore) end() uint64 {
	if from := l.cutFrom.Load(); from != 0 {
		return min(from-1, l.last.Load())
	}
	return l.last.Load()
}

func (l *logStore) closeWAL() {
	if l.w != nil {
		l.meta.rotation.wait()
		_ = l.w.Close()
		l.w = nil
	}
	if l.meta != nil {
		_ = l.meta.Close()
	}
}

// open opens the log and reads every entry once, so that Raft never meets a
// damaged one. report is nil for a healthy log.
func (l *logStore) open() (*salvageReport, error) {
	if err := finishSalvage(l.disk, l.dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(l.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make log folder: %w", err)
	}
	err := l.openWAL()
	if err == nil {
		err = l.verify()
	}
	if err == nil {
		err = l.checkTail()
	}
	if err == nil {
		return nil, nil
	}
	l.closeWAL()
	if diskFault(err) || errors.Is(err, ErrNewerVersion) || errors.Is(err, fs.ErrPermission) {
		return nil, err
	}
	return l.salvage(err)
}

// verify reads every entry and counts the bytes past the newest snapshot.
func (l *logStore) verify() error {
	_, newest := l.kept()
	first, last := l.first.Load(), l.last.Load()
	if first == 0 {
		return nil
	}
	var term, size uint64
	for i := first; i <= last; i++ {
		var e raft.Log
		if err := l.read(i, &e); err != nil {
			return err
		}
		if e.Term < term {
			return fmt.Errorf("%w: log entry %d of term %d follows term %d", ErrDamaged, i, e.Term, term)
		}
		term = e.Term
		if i > newest {
			size += uint64(len(e.Data))
		}
	}
	l.appended.Store(size)
	return nil
}

// commitMark begins the last 8 bytes of every write of raft-wal's.
var commitMark = []byte{segment.FrameCommit, 0, 0, 0}

// checkTail looks whether the file that is written to has the size that was
// reserved when it was made. If it is shorter and ends within an entry, it was
// cut off: raft-wal takes that for a write that was torn. Otherwise nothing is
// known to be missing (a kill can come between the making and the reserving),
// and the space is reserved again, or the next torn write would look like a cut.
func (l *logStore) checkTail() error {
	if len(l.listed) == 0 {
		return nil
	}
	tail := l.listed[len(l.listed)-1]
	if !tail.SealTime.IsZero() {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(l.dir, segment.FileName(tail)), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("check log: %w", err)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("check log: %w", err)
	}
	size := info.Size()
	if size >= int64(tail.SizeLimit) {
		return nil
	}
	end := make([]byte, min(size, 8))
	if _, err := f.ReadAt(end, size-int64(len(end))); err != nil {
		return fmt.Errorf("check log: %w", err)
	}
	if !bytes.Equal(end, make([]byte, len(end))) && !bytes.HasPrefix(end, commitMark) {
		l.cut = true
		return fmt.Errorf("%w: %s has %d of %d bytes and ends within an entry", ErrDamaged, f.Name(), size, tail.SizeLimit)
	}
	_ = reserve(f, int64(tail.SizeLimit)) // what ails the disk, the next write tells
	return nil
}

// read reads and checks one entry. raft-wal may panic on damaged bytes.
func (l *logStore) read(index uint64, e *raft.Log) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: log entry %d: %v", ErrDamaged, index, p)
		}
	}()
	if err := l.w.GetLog(index, e); err != nil {
		if errors.Is(err, wal.ErrNotFound) {
			return raft.ErrLogNotFound
		}
		return fmt.Errorf("read log entry %d: %w", index, err)
	}
	return unseal(index, e)
}

// seal returns a copy of the entry with its checksum in Extensions, which
// Raft carries and does not use. The time of the append, which Raft uses for
// a metric only, is left out: the checksum does not cover it.
func seal(e *raft.Log) *raft.Log {
	c := *e
	c.AppendedAt = time.Time{}
	c.Extensions = binary.BigEndian.AppendUint32(nil, entrySum(e))
	return &c
}

func unseal(index uint64, e *raft.Log) error {
	if e.Index != index || len(e.Extensions) != 4 || binary.BigEndian.Uint32(e.Extensions) != entrySum(e) {
		return fmt.Errorf("%w: log entry %d: checksum differs", ErrDamaged, index)
	}
	e.Extensions, e.AppendedAt = nil, time.Time{}
	return nil
}

func entrySum(e *raft.Log) uint32 {
	var h [17]byte
	binary.BigEndian.PutUint64(h[0:], e.Index)
	binary.BigEndian.PutUint64(h[8:], e.Term)
	h[16] = byte(e.Type)
	return crc32.Update(crc32.Checksum(h[:], castagnoli), castagnoli, e.Data)
}

// FirstIndex implements raft.LogStore.
func (l *logStore) FirstIndex() (uint64, error) { return l.first.Load(), nil }

// LastIndex implements raft.LogStore.
func (l *logStore) LastIndex() (uint64, error) { return l.last.Load(), nil }

// GetLog implements raft.LogStore. While the log is closed, since a failed
// write could not be mended yet, it waits: Raft would tell the leader that the
// entry is not there, and the leader, asking for ever older ones, would in the
// end send its snapshot, which may be older than what is here; or panic, for a
// committed one.
func (l *logStore) GetLog(index uint64, e *raft.Log) error {
	err := l.get(index, e)
	for wait := 50 * time.Millisecond; errors.Is(err, ErrClosed) && l.ctx != nil && l.ctx.Err() == nil; wait = min(2*wait, 5*time.Second) {
		if l.healthy(l.ctx) != nil {
			select {
			case <-time.After(wait):
			case <-l.ctx.Done():
			}
		}
		err = l.get(index, e)
	}
	return err
}

// get is GetLog for who does not wait.
func (l *logStore) get(index uint64, e *raft.Log) error {
	if first, last := l.first.Load(), l.last.Load(); index < first || index > last {
		return raft.ErrLogNotFound
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.w == nil {
		return fmt.Errorf("read log entry %d: %w", index, ErrClosed)
	}
	return l.read(index, e)
}

// StoreLog implements raft.LogStore.
func (l *logStore) StoreLog(e *raft.Log) error { return l.StoreLogs([]*raft.Log{e}) }

// StoreLogs implements raft.LogStore: one write, one fsync.
func (l *logStore) StoreLogs(entries []*raft.Log) error {
	l.disk.delay()
	l.wmu.Lock()
	defer l.wmu.Unlock()
	sealed := make([]*raft.Log, len(entries))
	var bytes uint64
	for i, e := range entries {
		sealed[i] = seal(e)
		bytes += uint64(len(e.Data))
	}
	err := l.usable()
	if err == nil {
		err = l.w.StoreLogs(sealed)
	}
	if errors.Is(err, wal.ErrSealed) {
		// The rotation after the write before failed; opening repeats it.
		if err = l.reopen(); err == nil {
			err = l.w.StoreLogs(sealed)
		}
	}
	if err != nil {
		l.mu.Lock()
		l.broken = err
		l.mu.Unlock()
		l.fault(err)
		return fmt.Errorf("append to log: %w", err)
	}
	if l.well != nil {
		l.well()
	}
	if l.first.Load() == 0 {
		l.first.Store(entries[0].Index)
	}
	l.last.Store(entries[len(entries)-1].Index)
	l.appended.Add(bytes)
	return nil
}

// usable reopens the log after a failed write.
func (l *logStore) usable() error {
	l.mu.RLock()
	broken := l.broken
	l.mu.RUnlock()
	if broken == nil {
		return nil
	}
	return l.reopen()
}

// reopen opens the log anew and drops what was written but never
// acknowledged.
func (l *logStore) reopen() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	first, last, end := l.first.Load(), l.last.Load(), l.end()
	restore := func(err error) error {
		l.first.Store(first)
		l.last.Store(last)
		l.broken = err
		return err
	}
	l.closeWAL()
	if err := l.openWAL(); err != nil {
		l.closeWAL()
		return restore(err)
	}
	if got := l.last.Load(); got < end {
		return restore(fmt.Errorf("%w: log ends at %d, acknowledged was %d", ErrDamaged, got, end))
	} else if got > last {
		l.meta.rotation.wait()
		if err := l.w.DeleteRange(last+1, got); err != nil {
			return restore(fmt.Errorf("drop unacknowledged entries: %w", err))
		}
	}
	l.broken = nil
	return l.ranges()
}

// healthy tries to make a broken log usable; the stable store asks before a
// new term.
func (l *logStore) healthy(context.Context) error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	return l.usable()
}

// DeleteRange implements raft.LogStore. A deletion from the front stops at
// the oldest snapshot that may still be needed, unless the newest snapshot
// lies past the end of the log: then the log is of no more use.
func (l *logStore) DeleteRange(lo, hi uint64) error {
	l.wmu.Lock()
	defer l.wmu.Unlock()
	if err := l.usable(); err != nil {
		return fmt.Errorf("truncate log: %w", err)
	}
	if first, last := l.first.Load(), l.last.Load(); lo <= first {
		oldest, newest := l.kept()
		if newest <= last {
			hi = min(hi, oldest)
		}
		if hi < first {
			return nil
		}
	} else if l.lower != nil {
		// Before the entries go, or a kill right after makes the next start
		// miss them. cutFrom stays until the log's range is read again.
		l.cutFrom.Store(lo)
		if err := l.lower(lo - 1); err != nil {
			l.fault(err)
			return fmt.Errorf("truncate log: %w", err)
		}
	}
	l.meta.rotation.wait()
	if err := l.w.DeleteRange(lo, hi); err != nil {
		l.fault(err)
		return fmt.Errorf("truncate log: %w", err)
	}
	return l.ranges()
}

func (l *logStore) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closeWAL()
}

// bytes returns the size of the log on disk.
func (l *logStore) bytes() int64 {
	var n int64
	entries, err := os.ReadDir(l.dir)
	if err != nil {
		return 0
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && filepath.Ext(e.Name()) == ".wal" {
			n += info.Size()
		}
	}
	return n
}
