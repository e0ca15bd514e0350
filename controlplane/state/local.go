package state

import (
	"context"
	"sync"
)

// Local is a Proposer without Raft and without a disk: it applies at once.
// Tests and simulations of what stands above the state use it.
type Local struct {
	machine *Machine

	mu   sync.Mutex
	term uint64
}

var _ Proposer = (*Local)(nil)

// NewLocal leads the machine in term 1.
func NewLocal(m *Machine) *Local { return &Local{machine: m, term: 1} }

// Propose implements Proposer.
func (l *Local) Propose(ctx context.Context, ops []Op) ([]Result, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b, err := EncodeEntry(ops)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.term == 0 {
		return nil, ErrNotLeader
	}
	return l.machine.Apply(l.term, b)
}

// Barrier implements Proposer.
func (l *Local) Barrier(ctx context.Context) error { return ctx.Err() }

// Leadership implements Proposer.
func (l *Local) Leadership() (uint64, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.term, l.term != 0
}

// SetTerm moves leadership to another term; 0 is none.
func (l *Local) SetTerm(term uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.term = term
}
