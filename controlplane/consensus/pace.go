package consensus

import (
	"sync"
	"time"
)

const (
	// baseTimeout is the heartbeat time-out, and the election time-out on a
	// fast disk.
	baseTimeout = time.Second
	// maxTimeout bounds the election time-out.
	maxTimeout = 30 * time.Second
	// maxPatience bounds how far it grows while nobody leads: votes on a disk
	// whose fsync takes 1.5 s fit in four times.
	maxPatience = 12 * time.Second
)

// pace is how long an election may take.
type pace struct {
	mu    sync.Mutex
	other time.Duration // slow fsync of the slowest other server, as last heard
}

// OtherSync tells how long the slow fsync (the 99th percentile) of the slowest
// other server takes: a candidate waits for other servers' disks, too.
func (n *Node) OtherSync(p99 time.Duration) {
	n.pace.mu.Lock()
	n.pace.other = p99
	n.pace.mu.Unlock()
	n.tune(0)
}

// electionTimeout is how long a candidate waits for votes, from the slow fsync
// of the slowest disk that it knows and from how long nobody led.
//
// An election is a vote (one fsync here, two on each voter) and a first entry
// (one on each), so eight times the slow fsync leaves room. Who asks again
// before the votes are written gets none: the new term makes them void. A
// server that has just started knows no disk but its own, so the time grows
// while nobody leads.
//
// The heartbeat time-out does not follow the disk. Heartbeats are answered
// without it, and Raft sends them ten times in that time-out: were it more
// than five times the leader's lease, leaders would step down by themselves.
func electionTimeout(syncP99, leaderless time.Duration) time.Duration {
	d := max(baseTimeout, 8*syncP99, min(leaderless/4, maxPatience))
	return min(d, maxTimeout)
}

// tune sets the election time-out, in steps of a quarter so that noise changes
// nothing.
func (n *Node) tune(leaderless time.Duration) {
	n.pace.mu.Lock()
	defer n.pace.mu.Unlock()
	sync := max(n.disk.times.p99(), n.pace.other)
	want := electionTimeout(sync, leaderless)
	c := n.raft.ReloadableConfig()
	if d := want - c.ElectionTimeout; d < c.ElectionTimeout/4 && -d < c.ElectionTimeout/4 {
		return
	}
	c.ElectionTimeout = want
	if err := n.raft.ReloadConfig(c); err != nil {
		n.log.Warn("election time-out not changed", "err", err)
		return
	}
	n.log.Info("election time-out changed", "timeout", want, "fsync_p99", sync, "leaderless", leaderless.Round(time.Second))
}

// watchPace gives elections more time while nobody leads, and the usual time
// again once somebody does.
func (n *Node) watchPace() {
	var since time.Time // when nobody led any more; zero while somebody does
	for {
		leader, changed := n.Leader()
		var again <-chan time.Time
		switch {
		case leader != "" && !since.IsZero():
			since = time.Time{}
			n.tune(0)
		case leader == "" && since.IsZero():
			since = time.Now()
			fallthrough
		case leader == "":
			d := time.Since(since)
			n.tune(d)
			if d <= 4*maxPatience {
				again = time.After(baseTimeout)
			}
		}
		select {
		case <-changed:
		case <-again:
		case <-n.ctx.Done():
			return
		}
	}
}
