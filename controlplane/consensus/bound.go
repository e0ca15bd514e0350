package consensus

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/hashicorp/raft-wal/types"
)

// boundEvery is the least time between two writes of the bound.
const boundEvery = time.Second

// boundOffsets are where the two records of the bound are, in different
// sectors: they are written in turn, so that a torn write costs one of them.
var boundOffsets = [2]int64{0, slotReserve / 2}

// boundFile holds the index of a committed entry, for the next start after a
// kill: a log that ends before it has lost something. It is never synced, since
// a second fsync would double the price of a commit, and so it is no part of
// the stable store, where a write that is not synced could cost a vote. It is
// written after the log's fsync and names what was committed only: it is never
// ahead of the log, and no new leader cuts the log before it. A file that is
// missing, torn or damaged is no bound.
type boundFile struct {
	disk  *Disk
	path  string
	f     types.WritableFile
	index uint64 // highest on disk
	seq   uint64
}

// load reads what is there.
func (b *boundFile) load() {
	content, err := os.ReadFile(b.path)
	if err != nil {
		return
	}
	for _, off := range boundOffsets {
		if off >= int64(len(content)) {
			continue
		}
		seq, payload, err := unframe(content[off:])
		if err == nil && len(payload) == 8 {
			b.seq, b.index = max(b.seq, seq), max(b.index, binary.BigEndian.Uint64(payload))
		}
	}
}

// raise writes a higher bound, without fsync; a lower one changes nothing.
func (b *boundFile) raise(index uint64) error {
	if index <= b.index {
		return nil
	}
	if err := b.write(index); err != nil {
		return err
	}
	b.index = index
	return nil
}

// lower replaces the bound durably, where the server goes on from less.
func (b *boundFile) lower(index uint64) error {
	if index >= b.index {
		return nil
	}
	for range boundOffsets {
		if err := b.write(index); err != nil {
			return err
		}
	}
	if err := b.f.Sync(); err != nil {
		return err
	}
	b.index = index
	return nil
}

func (b *boundFile) write(index uint64) error {
	if b.f == nil {
		dir, name := filepath.Split(b.path)
		f, err := b.disk.OpenWriter(dir, name)
		if errors.Is(err, fs.ErrNotExist) {
			f, err = b.disk.Create(dir, name, slotReserve)
		}
		if err != nil {
			return err
		}
		b.f = f
	}
	record := frame(frameFormat, b.seq+1, binary.BigEndian.AppendUint64(nil, index))
	if _, err := b.f.WriteAt(record, boundOffsets[(b.seq+1)%2]); err != nil {
		return err
	}
	b.seq++
	return nil
}

func (b *boundFile) close() {
	if b.f != nil {
		_ = b.f.Close()
		b.f = nil
	}
}

// keepBound lets the bound follow what is committed. It wakes only after
// commits: the first one is written at once, then what came within boundEvery.
func (n *Node) keepBound() {
	for {
		select {
		case <-n.committed:
		case <-n.ctx.Done():
			return
		}
		if err := n.bound.raise(n.fsm.index.Load()); err != nil {
			// What ails the disk the log's own writes tell; the next commit
			// tries again.
			n.log.Debug("bound of the log not written", "err", err)
		}
		select {
		case <-time.After(boundEvery):
		case <-n.ctx.Done():
			return
		}
	}
}

// acknowledged is the highest entry that the log is known to have held.
func (n *Node) acknowledged() uint64 { return max(n.stable.disk.LastIndex, n.bound.index) }
