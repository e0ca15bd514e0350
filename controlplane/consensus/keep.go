package consensus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"
)

// keep takes snapshots when the log has grown by the state's size, and lets
// the election time-out follow the disk. It wakes only after commits.
func (n *Node) keep() {
	var retry time.Time
	pause := 10 * time.Second
	var tuned time.Time
	for {
		select {
		case <-n.snapshots:
		case <-n.ctx.Done():
			return
		}
		n.noteEpoch()
		now := time.Now()
		if now.Sub(tuned) > 10*time.Second {
			tuned = now
			n.tune(0)
		}
		grown := int64(n.logs.appended.Load())
		if grown <= max(n.cfg.SnapshotBytes, n.machine.Bytes()) || now.Before(retry) {
			continue
		}
		if err := n.Snapshot(n.ctx); err != nil {
			if n.ctx.Err() != nil {
				return
			}
			n.log.Warn("snapshot failed; the log goes on growing", "err", err, "retry", pause)
			retry = now.Add(pause)
			pause = min(2*pause, 5*time.Minute)
			continue
		}
		pause = 10 * time.Second
	}
}

// grown wakes the keepers of snapshots and of the bound.
func (n *Node) grown() {
	for _, due := range []chan struct{}{n.snapshots, n.committed} {
		select {
		case due <- struct{}{}:
		default:
		}
	}
}

// Snapshot writes a snapshot now and cuts the log behind the one before.
func (n *Node) Snapshot(ctx context.Context) error {
	grown := n.logs.appended.Load()
	f := n.raft.Snapshot()
	done := make(chan error, 1)
	n.wg.Go(func() { done <- n.await(f) })
	select {
	case err := <-done:
		if err != nil && !errors.Is(err, raft.ErrNothingNewToSnapshot) {
			return fmt.Errorf("snapshot: %w", err)
		}
		n.logs.appended.Add(-grown)
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Stats are figures for metrics.
type Stats struct {
	Term          uint64
	Leading       bool
	LastIndex     uint64 // of the log
	CommitIndex   uint64
	AppliedIndex  uint64
	SnapshotIndex uint64
	LogBytes      int64 // on disk
	StateBytes    int64
	Proposals     uint64 // calls of Propose
	Entries       uint64 // Raft entries that carried them
	Queue         int    // proposals waiting
	Disk          DiskStats
	Fault         error // what is wrong with the disk, or nil
}

// Stats returns the figures of now.
func (n *Node) Stats() Stats {
	term, leading := n.Leadership()
	_, snap := n.snaps.kept()
	return Stats{
		Term: term, Leading: leading, LastIndex: n.raft.LastIndex(), CommitIndex: n.raft.CommitIndex(),
		AppliedIndex: n.raft.AppliedIndex(), SnapshotIndex: snap, LogBytes: n.logs.bytes(), StateBytes: n.machine.Bytes(),
		Proposals: n.proposals.Load(), Entries: n.entries.Load(), Queue: len(n.queue), Disk: n.disk.Stats(), Fault: n.Fault(),
	}
}
