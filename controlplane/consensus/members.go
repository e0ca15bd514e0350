package consensus

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// signal wakes all who wait for a change.
type signal struct {
	mu sync.Mutex
	ch chan struct{} // closed and replaced at each change
}

func (s *signal) init() { s.ch = make(chan struct{}) }

func (s *signal) fire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.ch)
	s.ch = make(chan struct{})
}

func (s *signal) wait() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ch
}

// WaitVersion returns once this server's state has at least the version rv:
// the state's version counts every change, so equal versions are equal
// states.
func (n *Node) WaitVersion(ctx context.Context, rv uint64) error {
	for {
		changed := n.applied.wait()
		if n.machine.Snapshot().ResourceVersion() >= rv {
			return nil
		}
		select {
		case <-changed:
		case <-n.halted:
			return n.Err()
		case <-n.ctx.Done():
			return ErrClosed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// observeLeaders lets Raft tell of other leaders. Raft never waits for it.
func (n *Node) observeLeaders() {
	ch := make(chan raft.Observation, 16)
	o := raft.NewObserver(ch, false, func(o *raft.Observation) bool {
		_, ok := o.Data.(raft.LeaderObservation)
		return ok
	})
	n.raft.RegisterObserver(o)
	n.wg.Go(func() {
		defer n.raft.DeregisterObserver(o)
		for {
			select {
			case <-ch:
				n.leads.fire()
			case <-n.ctx.Done():
				return
			}
		}
	})
}

// Leader returns the id of the server that leads, as far as this one knows;
// "" is none. changed is closed when that may be another one.
func (n *Node) Leader() (id string, changed <-chan struct{}) {
	changed = n.leads.wait()
	_, lid := n.raft.LeaderWithID()
	return string(lid), changed
}

// Member is one server of the Raft configuration.
type Member struct {
	ID    string
	Voter bool
}

// Members lists the newest configuration that this server knows, and its
// index in the log.
func (n *Node) Members() ([]Member, uint64, error) {
	f := n.raft.GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, 0, fmt.Errorf("read members: %w", err)
	}
	var out []Member
	for _, s := range f.Configuration().Servers {
		out = append(out, Member{ID: string(s.ID), Voter: s.Suffrage == raft.Voter})
	}
	return out, f.Index(), nil
}

// memberTimeout bounds a change of members; it needs a quorum.
const memberTimeout = 10 * time.Second

// AddNonvoter adds a server that gets the log and does not count for quorum.
// index, if not 0, is that of the configuration the change was decided on: it
// fails if there is a newer one. On the leader only.
func (n *Node) AddNonvoter(id string, index uint64) error {
	return n.member("add", id, n.raft.AddNonvoter(raft.ServerID(id), raft.ServerAddress(id), index, memberTimeout))
}

// Promote makes a non-voter a voter.
func (n *Node) Promote(id string, index uint64) error {
	return n.member("promote", id, n.raft.AddVoter(raft.ServerID(id), raft.ServerAddress(id), index, memberTimeout))
}

// Demote makes a voter a non-voter.
func (n *Node) Demote(id string, index uint64) error {
	return n.member("demote", id, n.raft.DemoteVoter(raft.ServerID(id), index, memberTimeout))
}

// Remove takes a server out of the configuration.
func (n *Node) Remove(id string, index uint64) error {
	return n.member("remove", id, n.raft.RemoveServer(raft.ServerID(id), index, memberTimeout))
}

func (n *Node) member(what, id string, f raft.Future) error {
	if err := n.await(f); err != nil {
		return fmt.Errorf("%s server %s: %w", what, id, n.commitError(err))
	}
	return nil
}

// handOverTimeout bounds HandOver: a Raft that waits for its disk answers
// nobody, and a server that stops must not wait for it.
const handOverTimeout = 10 * time.Second

// HandOver asks another voter to lead. It returns when this server does not
// lead any more, or with an error.
func (n *Node) HandOver() error {
	answer := make(chan error, 1)
	go func() { answer <- n.await(n.raft.LeadershipTransfer()) }() // ends with Raft at the latest
	var err error
	select {
	case err = <-answer:
	case <-time.After(handOverTimeout):
		err = context.DeadlineExceeded
	}
	if err != nil {
		return fmt.Errorf("hand over leadership: %w", err)
	}
	return nil
}

// LeaderHeard is when this follower last heard from a leader that had begun
// its work, on the monotonic clock. It is the zero time if it never did, on
// the leader itself, and while nothing of the leader's term is committed here:
// before that a leader takes nothing from anybody.
func (n *Node) LeaderHeard() time.Time {
	term, at := n.raft.CurrentTerm(), n.raft.LastContact()
	if n.raft.State() != raft.Follower || !n.committedIn(term) || n.raft.CurrentTerm() != term {
		return time.Time{} // a vote is a contact, too, but of another term
	}
	return at
}

// committedIn says whether an entry of the current term is committed here.
func (n *Node) committedIn(term uint64) bool {
	if n.begun.Load() == term {
		return true
	}
	var e raft.Log
	if err := n.logs.get(n.raft.CommitIndex(), &e); err != nil || e.Term != term {
		return false // one that is only in a snapshot counts as none
	}
	n.begun.Store(term)
	return true
}

// VerifyLeading returns the version of the state that a linearizable read
// must show at least. On the leader only.
func (n *Node) VerifyLeading(ctx context.Context) (uint64, error) {
	if err := n.Barrier(ctx); err != nil {
		return 0, err
	}
	return n.machine.Snapshot().ResourceVersion(), nil
}
