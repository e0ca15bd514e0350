package consensus

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/time/rate"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// reliefEvery is how long a leader whose disk is full leaves between two
// attempts to have another one lead.
const reliefEvery = time.Minute

// relief hands leadership to a server whose disk has room.
type relief struct {
	last    time.Time // of the last attempt; the batcher's
	running atomic.Bool
	// told bounds what is said of nodes on a full disk: that a node is full
	// must not be kept from everybody because it is.
	told *rate.Limiter
	// credit is how many words may still be said of what deletions made untrue:
	// each deletion pays for some, so that they cannot take its room for ever.
	// The batcher's.
	credit int
}

const (
	creditEach = 6 // a pod's end changes a ReplicaSet, a Deployment, a budget, endpoints twice
	creditMost = 512
)

func newRelief() relief { return relief{told: rate.NewLimiter(rate.Every(30*time.Second), 4)} }

// room compares the free space with the reserve. An error of the first kind
// says that the disk is too full for ordinary writes; of the second, that it
// cannot be asked.
func (n *Node) room() (free, reserve int64, full, err error) {
	if free, err = n.disk.free(n.cfg.Dir); err != nil {
		return 0, 0, nil, err
	}
	reserve = n.cfg.ReserveBytes
	if reserve == 0 {
		reserve = 2*int64(n.cfg.SegmentBytes) + 2*n.machine.Bytes()
	}
	if free < reserve {
		full = fmt.Errorf("%w: %s has %d KiB left, needs %d", state.ErrDiskFull, n.cfg.Dir, free>>10, reserve>>10)
	}
	return free, reserve, full, nil
}

// Fault is what is wrong with the disk now, or nil: the last write failed, or
// there is too little room for ordinary writes.
func (n *Node) Fault() error {
	_, _, full, err := n.room()
	switch {
	case err != nil:
		return n.faults.get()
	case full != nil:
		return full
	}
	return n.faults.failed()
}

// refuseIfFull answers proposals for which the disk has no room, before Raft
// sees them: what it saw could still be committed later. The reserve keeps
// the log able to shrink: a snapshot fits, and deletions are still taken, and a
// few words for each on what it made untrue: a Deployment without pods must not
// be told as available because the disk is full.
// While a server that has room is asked to lead, they are told to ask again.
func (n *Node) refuseIfFull(batch []*proposal) []*proposal {
	free, reserve, full, err := n.room()
	if err != nil {
		return batch // the write will say
	}
	if full == nil {
		if n.faults.clearFull() {
			n.log.Info("the state folder has room again", "free", free)
		}
		n.spare.Renew()
		return batch
	}
	if n.faults.markFull(full) {
		n.log.Error("the state folder is nearly full: reads and deletions go on, other writes are refused", "free", free, "reserve", reserve)
	}
	answer := full
	if n.relieve() {
		answer = fmt.Errorf("%w: %v; a server that has room is asked to lead", state.ErrNotLeader, full) //nolint:errorlint // it is no full disk's answer
	}
	deleting := slices.ContainsFunc(batch, func(p *proposal) bool { return p.nodes || p.follows && n.relief.credit > 0 })
	room := deleting && n.roomForDeletions(free)
	taken := batch[:0]
	for _, p := range batch {
		if room && n.relief.takes(p) {
			taken = append(taken, p)
			continue
		}
		p.done <- outcome{err: answer}
	}
	return taken
}

// takes says whether a proposal is taken though the disk is full. The
// batcher's.
func (r *relief) takes(p *proposal) bool {
	switch {
	case p.deletes:
		r.credit = min(r.credit+creditEach*len(p.ops), creditMost)
		return true
	case p.follows && r.credit > 0:
		r.credit--
		return true
	}
	return p.nodes && r.told.Allow()
}

// relieve says whether a server that has room is asked to lead, and asks if it
// is time to. The batcher's.
func (n *Node) relieve() bool {
	switch {
	case n.cfg.Roomy == nil || n.alone():
		return false
	case n.relief.running.Load(), n.raft.State() != raft.Leader: // just handed over, and not told yet
		return true
	case !n.relief.last.IsZero() && time.Since(n.relief.last) < reliefEvery:
		return false
	}
	n.relief.last = time.Now()
	n.relief.running.Store(true)
	n.wg.Go(func() {
		defer n.relief.running.Store(false)
		n.handToRoomy()
	})
	return true
}

// handToRoomy asks who has room, and hands leadership to the first of them that
// takes it.
func (n *Node) handToRoomy() {
	roomy := n.cfg.Roomy(n.ctx)
	for _, id := range roomy {
		if n.ctx.Err() != nil {
			return
		}
		err := n.await(n.raft.LeadershipTransferToServer(raft.ServerID(id), raft.ServerAddress(id)))
		if err == nil {
			n.log.Warn("leadership handed over: the state folder of this server is nearly full", "to", id)
			return
		}
		n.log.Warn("leadership not handed over", "to", id, "err", err)
	}
	if len(roomy) == 0 {
		n.log.Warn("the state folder is nearly full, and no other server that votes says that it has room")
	}
}

// alone says whether no other server has a vote.
func (n *Node) alone() bool {
	c := n.raft.GetConfiguration()
	return c.Error() != nil || !slices.ContainsFunc(c.Configuration().Servers, func(s raft.Server) bool {
		return s.Suffrage == raft.Voter && string(s.ID) != n.ServerID()
	})
}

// roomForDeletions says whether one more segment of the log fits, now or in
// the space that was kept aside.
func (n *Node) roomForDeletions(free int64) bool {
	segment := int64(n.cfg.SegmentBytes)
	if free >= segment || n.disk.fits(n.cfg.Dir, segment) {
		return true
	}
	if !n.spare.Release() {
		return false
	}
	n.log.Warn("the state folder is full: the space that was kept for deletions is used now")
	return n.disk.fits(n.cfg.Dir, segment)
}
