package consensus

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/hashicorp/raft"
)

// openStable loads term and vote and judges, with the log and the snapshots,
// whether something acknowledged is missing.
func (n *Node) openStable(report *salvageReport) error {
	n.stable = &stableStore{
		slots: &slots{disk: n.disk, path: filepath.Join(n.cfg.Dir, "stable")},
		last:  n.logs.end, gate: n.logs.healthy, fault: n.faults.set, ctx: n.ctx,
	}
	n.logs.lower = n.stable.lower
	n.trans = n.cfg.Transport
	if n.trans == nil {
		_, n.trans = raft.NewInmemTransport(raft.ServerAddress(n.identity.id.Server))
	}
	n.stable.self = n.trans.EncodePeer(raft.ServerID(n.identity.id.Server), n.trans.LocalAddr())
	found, err := n.stable.load()
	_, newest := n.snaps.kept()
	last := max(n.logs.last.Load(), newest)
	switch {
	case errors.Is(err, ErrDamaged) && last == 0 && n.identity.id.Joined:
		// It was stopped before it ever had a term: a server that joins gets its
		// first one from the leader.
		if err := n.stable.slots.quarantine(); err != nil {
			return err
		}
	case errors.Is(err, ErrDamaged), err == nil && !found && last > 0:
		if err := n.rebuildStable(last); err != nil {
			return err
		}
	case err != nil:
		return err
	}
	if err := n.stable.slots.prepare(); err != nil {
		return err
	}
	if first := n.logs.first.Load(); first > newest+1 {
		return fmt.Errorf("%s: %w: the log starts at entry %d and no usable snapshot reaches it; restore a backup", n.cfg.Dir, ErrDamaged, first)
	}
	known := n.acknowledged()
	if report == nil { // a salvage has looked at all that can be read
		behind, err := n.logs.behindEnd()
		if err != nil {
			return err
		}
		known = max(known, behind)
	}
	lost := last < known || report != nil && report.Gap
	if report != nil && (lost || last > 0) { // otherwise the very first write was cut short
		n.sayDamaged(report, known)
	}
	if !lost {
		return nil
	}
	return n.acceptLoss(report, last, known)
}

func (n *Node) sayDamaged(report *salvageReport, known uint64) {
	n.log.Warn("log damaged: good entries copied, the old log moved aside", "first", report.First, "last", report.Last,
		"acknowledged", known, "moved", report.Quarantine, "err", report.Cause)
}

// rebuildStable makes a new record when both copies are gone. Alone, a server
// risks nothing by it: nobody else could have got its vote.
func (n *Node) rebuildStable(last uint64) error {
	sole, err := n.soleVoter()
	if err != nil {
		return err
	}
	if !sole {
		return fmt.Errorf("%s: %w: term and vote are lost, and this server is not the only voter; remove it from the cluster and join again", n.stable.slots.path, ErrDamaged)
	}
	if last > 0 { // otherwise the very first write was cut short
		n.log.Warn("stable store damaged, moved aside; term taken from the log", "path", n.stable.slots.path)
	}
	if err := n.stable.slots.quarantine(); err != nil {
		return err
	}
	term, err := n.lastTerm()
	if err != nil {
		return err
	}
	return n.stable.forget(last, term+1)
}

// acceptLoss goes on from what is left where that endangers nobody else, in a
// new recovery epoch. known is the highest entry that the log once held. The log
// that held it is moved aside, if it was not yet, or the next writes would go
// over what follows the damage.
func (n *Node) acceptLoss(report *salvageReport, last, known uint64) error {
	sole, err := n.soleVoter()
	if err != nil {
		return err
	}
	switch {
	case last == 0:
		return fmt.Errorf("%s: %w: the log is lost (it held %d entries) and there is no snapshot; restore a backup, or remove all of the server's state folder to start an empty cluster", n.cfg.Dir, ErrDamaged, known)
	case !sole:
		return fmt.Errorf("%s: %w: entries %d to %d are lost, and this server is not the only voter; remove it from the cluster and join again", n.cfg.Dir, ErrDamaged, last+1, known)
	}
	if report == nil {
		if report, err = n.setLogAside(fmt.Errorf("%w: the log ends at entry %d and held %d", ErrDamaged, last, known)); err != nil {
			return err
		}
		_, newest := n.snaps.kept()
		if last = max(n.logs.last.Load(), newest); last >= known && !report.Gap {
			n.sayDamaged(report, known) // all was saved
			return nil
		}
	}
	lost := any("unknown")
	if known > last {
		lost = known - last
	}
	n.log.Error("acknowledged changes are lost; going on from the last good one in a new recovery epoch; the damaged log is kept",
		"lost", lost, "last", last, "acknowledged", known, "moved", report.Quarantine)
	id := n.identity.id
	id.Recover = true
	if err := n.identity.save(id); err != nil {
		return err
	}
	term, err := n.lastTerm()
	if err != nil {
		return err
	}
	if err := n.bound.lower(last); err != nil {
		return fmt.Errorf("bound of the log: %w", err)
	}
	return n.stable.forget(last, term+1)
}

// setLogAside moves away a log that could be opened, and goes on with a copy of
// its good entries.
func (n *Node) setLogAside(cause error) (*salvageReport, error) {
	n.logs.closeWAL()
	return n.logs.salvage(cause)
}

// lastTerm returns the highest term that the log or a snapshot shows.
func (n *Node) lastTerm() (uint64, error) {
	var term uint64
	if metas, _ := n.snaps.List(); len(metas) > 0 {
		term = metas[0].Term
	}
	if last := n.logs.last.Load(); last > 0 {
		var e raft.Log
		if err := n.logs.GetLog(last, &e); err != nil {
			return 0, err
		}
		term = max(term, e.Term)
	}
	return term, nil
}

// soleVoter reads the newest configuration from log and snapshots: whether
// nobody but this server votes.
func (n *Node) soleVoter() (bool, error) {
	var c raft.Configuration
	first := n.logs.first.Load()
	if metas, _ := n.snaps.List(); len(metas) > 0 {
		// Of what the log has before the snapshot, a recovery may have made a
		// thing of the past.
		c, first = metas[0].Configuration, max(first, metas[0].Index+1)
	}
	if n.logs.first.Load() > 0 {
		for i := first; i <= n.logs.last.Load(); i++ {
			var e raft.Log
			if err := n.logs.GetLog(i, &e); err != nil {
				return false, err
			}
			if e.Type == raft.LogConfiguration {
				c = raft.DecodeConfiguration(e.Data)
			}
		}
	}
	if len(c.Servers) == 0 {
		return !n.identity.id.Joined, nil // nothing was ever written
	}
	return soleVoter(c, n.identity.id.Server), nil
}

func soleVoter(c raft.Configuration, self string) bool {
	for _, s := range c.Servers {
		if s.Suffrage == raft.Voter && string(s.ID) != self {
			return false
		}
	}
	return slices.ContainsFunc(c.Servers, func(s raft.Server) bool { return s.Suffrage == raft.Voter })
}
