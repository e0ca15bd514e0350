package consensus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"
)

// keep takes snapshots when the log has grown by the state's size, and lets
// the election time-outs follow the disk. It wakes only after commits.
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
		now := time.Now()
		if now.Sub(tuned) > 10*time.Second {
			tuned = now
			n.tune()
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

// grown wakes the keeper.
func (n *Node) grown() {
	select {
	case n.snapshots <- struct{}{}:
	default:
	}
}

// Snapshot writes a snapshot now and cuts the log behind the one before.
func (n *Node) Snapshot(ctx context.Context) error {
	grown := n.logs.appended.Load()
	f := n.raft.Snapshot()
	done := make(chan error, 1)
	n.wg.Go(func() { done <- f.Error() })
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

// timeouts is the rule for heartbeat and election time-outs: an election is a
// vote (one or two fsyncs here, two on each voter) and a first entry (one on
// each), so eight times the slow fsync leaves room; at least a second, at
// most thirty.
func timeouts(syncP99 time.Duration) time.Duration {
	return min(max(baseTimeout, 8*syncP99), 30*time.Second)
}

// tune follows the disk, in steps of a quarter so that noise changes nothing.
func (n *Node) tune() {
	want := timeouts(n.disk.times.p99())
	c := n.raft.ReloadableConfig()
	if d := want - c.ElectionTimeout; d < c.ElectionTimeout/4 && -d < c.ElectionTimeout/4 {
		return
	}
	c.HeartbeatTimeout, c.ElectionTimeout = want, want
	if err := n.raft.ReloadConfig(c); err != nil {
		n.log.Warn("election time-out not changed", "err", err)
		return
	}
	n.log.Info("election time-out follows the disk", "timeout", want, "fsync_p99", n.disk.times.p99())
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
		Proposals: n.proposals.Load(), Entries: n.entries.Load(), Queue: len(n.queue), Disk: n.disk.Stats(), Fault: n.faults.get(),
	}
}
