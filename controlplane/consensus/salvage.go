package consensus

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/hashicorp/raft"
	wal "github.com/hashicorp/raft-wal"
	"github.com/hashicorp/raft-wal/segment"
	"github.com/hashicorp/raft-wal/types"
)

// salvageReport says what was saved from a damaged log.
type salvageReport struct {
	Cause       error
	First, Last uint64 // what was kept
	Gap         bool   // entries past Last exist but do not connect
	Quarantine  string
}

// salvage copies every good entry, in order, to a new log and moves the old
// one aside. It reads the segments without trusting their list.
func (l *logStore) salvage(cause error) (*salvageReport, error) {
	fresh := &logStore{disk: l.disk, dir: l.dir + ".new", segment: l.segment, logger: l.logger, kept: l.kept, fault: l.fault}
	if err := os.RemoveAll(fresh.dir); err != nil {
		return nil, fmt.Errorf("salvage log: %w", err)
	}
	if err := os.MkdirAll(fresh.dir, 0o700); err != nil {
		return nil, fmt.Errorf("salvage log: %w", err)
	}
	if err := fresh.openWAL(); err != nil {
		return nil, fmt.Errorf("salvage log: %w", err)
	}
	s := salvager{to: fresh}
	_, s.newest = l.kept()
	err := s.run(l.dir, l.disk)
	fresh.closeWAL()
	if err != nil {
		return nil, fmt.Errorf("salvage log: %w", err)
	}
	if err := l.keepEarlier(); err != nil {
		return nil, err
	}
	if err := moveAside(l.disk, l.dir); err != nil {
		return nil, err
	}
	if err := l.disk.rename(fresh.dir, l.dir); err != nil {
		return nil, fmt.Errorf("salvage log: %w", err)
	}
	if err := l.openWAL(); err != nil {
		return nil, fmt.Errorf("salvage log: %w", err)
	}
	if err := l.verify(); err != nil {
		return nil, fmt.Errorf("salvage log: %w", err)
	}
	return &salvageReport{Cause: cause, First: l.first.Load(), Last: l.last.Load(), Gap: s.gap || l.cut, Quarantine: l.dir + ".damaged"}, nil
}

// keepEarlier keeps one damaged log more than the last one: a start that is cut
// short between the salvage and its end salvages once more, and that log is a
// copy of the good entries only.
func (l *logStore) keepEarlier() error {
	damaged := l.dir + ".damaged"
	if _, err := os.Lstat(damaged); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := os.RemoveAll(damaged + ".before"); err != nil {
		return fmt.Errorf("quarantine: %w", err)
	}
	if err := l.disk.rename(damaged, damaged+".before"); err != nil {
		return fmt.Errorf("quarantine: %w", err)
	}
	return nil
}

// finishSalvage completes or drops a salvage that a crash cut short. The new
// log was complete before the old one was moved.
func finishSalvage(d *Disk, dir string) error {
	if _, err := os.Stat(dir + ".new"); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return d.rename(dir+".new", dir)
	}
	if err := os.RemoveAll(dir + ".new"); err != nil {
		return fmt.Errorf("drop half-done salvage: %w", err)
	}
	return nil
}

type salvager struct {
	to     *logStore
	newest uint64 // index of the newest snapshot
	gap    bool
	bad    uint64 // highest index of an entry that was not what was written
	batch  []*raft.Log
	bytes  int
}

func (s *salvager) run(dir string, d *Disk) error {
	filer := segment.NewFiler(dir, d)
	segments, err := filer.List()
	if err != nil {
		return nil // nothing that can be named: an empty log
	}
	ids := make([]uint64, 0, len(segments))
	for id := range segments {
		ids = append(ids, id)
	}
	slices.Sort(ids) // in the order they were made: later ones supersede
	var codec wal.BinaryCodec
	for _, id := range ids {
		var fatal error
		err := filer.DumpSegment(segments[id], id, 0, 0, func(_ types.SegmentInfo, e types.LogEntry) (more bool, err error) {
			defer func() {
				if recover() != nil { // damaged bytes
					s.bad = max(s.bad, e.Index)
					more, err = true, nil
				}
			}()
			if bytes.Equal(e.Data, truncationMark) {
				return true, nil
			}
			entry := new(raft.Log)
			if codec.Decode(e.Data, entry) != nil || unseal(e.Index, entry) != nil {
				s.bad = max(s.bad, e.Index)
				return true, nil
			}
			fatal = s.add(entry)
			return fatal == nil, nil
		})
		_ = err // an unreadable rest of a segment is damage like any other
		if fatal != nil {
			return fatal
		}
	}
	if err := s.flush(); err != nil {
		return err
	}
	s.gap = s.gap || s.bad > max(s.to.last.Load(), s.newest)
	return nil
}

func (s *salvager) add(e *raft.Log) error {
	last := s.to.last.Load() + uint64(len(s.batch))
	if len(s.batch) > 0 {
		last = s.batch[len(s.batch)-1].Index
	}
	switch {
	case last == 0 || e.Index == last+1:
	case e.Index <= last: // a truncated tail, written again later
		if err := s.flush(); err != nil {
			return err
		}
		if err := s.cut(e.Index); err != nil {
			return err
		}
	case e.Index <= s.newest+1: // the hole is covered by a snapshot
		if err := s.flush(); err != nil {
			return err
		}
		s.to.meta.rotation.wait()
		if err := s.to.w.DeleteRange(0, s.to.last.Load()); err != nil {
			return err
		}
		s.to.first.Store(0)
		s.to.last.Store(0)
	default:
		s.gap = true
		return nil
	}
	s.batch = append(s.batch, e)
	if s.bytes += len(e.Data); s.bytes > 1<<20 || len(s.batch) >= 4096 {
		return s.flush()
	}
	return nil
}

func (s *salvager) cut(from uint64) error {
	s.to.meta.rotation.wait()
	if err := s.to.w.DeleteRange(from, s.to.last.Load()); err != nil {
		return err
	}
	return s.to.ranges()
}

func (s *salvager) flush() error {
	if len(s.batch) == 0 {
		return nil
	}
	err := s.to.StoreLogs(s.batch)
	s.batch, s.bytes = nil, 0
	return err
}
