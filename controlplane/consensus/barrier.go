package consensus

import (
	"context"
	"sync"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// barriers groups linearizable reads: one check of leadership serves all that
// asked before it began.
type barriers struct {
	mu   sync.Mutex
	next *barrier
	wake chan struct{}
}

type barrier struct {
	done chan struct{}
	err  error
}

func (b *barriers) init() { b.wake = make(chan struct{}, 1) }

func (b *barriers) join() *barrier {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == nil {
		b.next = &barrier{done: make(chan struct{})}
		select {
		case b.wake <- struct{}{}:
		default:
		}
	}
	return b.next
}

func (b *barriers) take() *barrier {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := b.next
	b.next = nil
	return next
}

// Barrier implements state.Proposer. On the leader, every write that anybody
// was told of is applied here already, so what is left to check is that this
// server still leads: without other voters that costs no message and no
// write. Elsewhere it returns ErrNotLeader.
func (n *Node) Barrier(ctx context.Context) error {
	if term, _, _ := n.lead.get(); term == 0 {
		return n.notLeading()
	}
	b := n.barriers.join()
	select {
	case <-b.done:
		return b.err
	case <-ctx.Done():
		return ctx.Err()
	case <-n.ctx.Done():
		return ErrClosed
	}
}

// verify is the goroutine that checks leadership for barriers.
func (n *Node) verify() {
	for {
		select {
		case <-n.barriers.wake:
		case <-n.ctx.Done():
			return
		}
		b := n.barriers.take()
		if b == nil {
			continue
		}
		if err := n.await(n.raft.VerifyLeader()); err != nil {
			b.err = n.commitError(err)
		} else if term, _, _ := n.lead.get(); term == 0 {
			b.err = state.ErrNotLeader
		}
		close(b.done)
	}
}
