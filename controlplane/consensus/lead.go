package consensus

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// leadership is what this server knows of its own: the term that it leads,
// once everything of earlier terms is applied here.
type leadership struct {
	mu      sync.Mutex
	term    uint64          // 0: not leading, or not ready yet
	ctx     context.Context // of the term
	cancel  context.CancelFunc
	changed chan struct{} // closed and replaced at each change
	told    func()        // of each change, too
}

func (l *leadership) init(told func()) { l.changed, l.told = make(chan struct{}), told }

// candidate starts a term's context: leadership was won but is not ready.
func (l *leadership) candidate(parent context.Context) context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reset()
	l.ctx, l.cancel = context.WithCancel(parent)
	return l.ctx
}

// ready publishes the term, unless it was lost meanwhile.
func (l *leadership) ready(ctx context.Context, term uint64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	l.term = term
	l.signal()
	return true
}

func (l *leadership) lose() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reset()
}

func (l *leadership) reset() {
	if l.cancel != nil {
		l.cancel()
		l.cancel = nil
	}
	if l.term != 0 {
		l.term = 0
		l.signal()
	}
}

func (l *leadership) signal() {
	close(l.changed)
	l.changed = make(chan struct{})
	l.told()
}

func (l *leadership) get() (term uint64, ctx context.Context, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.term, l.ctx, l.changed
}

// Leadership implements state.Proposer. leading is true only once everything
// that earlier leaders committed is applied here.
func (n *Node) Leadership() (uint64, bool) {
	term, _, _ := n.lead.get()
	if term == 0 {
		return n.raft.CurrentTerm(), false
	}
	return term, true
}

// WaitLeading blocks until this server leads and returns the term.
func (n *Node) WaitLeading(ctx context.Context) (uint64, error) {
	for {
		term, _, changed := n.lead.get()
		if term != 0 {
			return term, nil
		}
		select {
		case <-changed:
		case <-n.halted:
			return 0, n.Err()
		case <-ctx.Done():
			return 0, errors.Join(ctx.Err(), n.faults.get())
		case <-n.ctx.Done():
			return 0, ErrClosed
		}
	}
}

// Lead calls f each time this server comes to lead, with a context that ends
// with the term, and waits for it before the next. It returns when ctx ends
// or the Node closes or halts, never while f runs. An error of f ends Lead.
func (n *Node) Lead(ctx context.Context, f func(ctx context.Context, term uint64) error) error {
	for {
		term, err := n.WaitLeading(ctx)
		if err != nil {
			return err
		}
		got, termCtx, _ := n.lead.get()
		if got != term {
			continue
		}
		run, cancel := context.WithCancel(ctx)
		stop := context.AfterFunc(termCtx, cancel)
		err = f(run, term)
		stop()
		cancel()
		if err != nil && ctx.Err() == nil && termCtx.Err() == nil {
			return err
		}
		if err := n.waitLost(ctx, term); err != nil {
			return err
		}
	}
}

func (n *Node) waitLost(ctx context.Context, term uint64) error {
	for {
		got, _, changed := n.lead.get()
		if got != term {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// watchLeadership follows Raft's own notion of leadership. Raft waits for
// this goroutine, so it only starts and stops others.
func (n *Node) watchLeadership() {
	var wg sync.WaitGroup
	defer wg.Wait()
	halted := n.halted
	for {
		select {
		case leads := <-n.notify:
			if !leads {
				n.lead.lose()
				continue
			}
			ctx, term := n.lead.candidate(n.ctx), n.raft.CurrentTerm()
			wg.Go(func() { n.assume(ctx, term) })
		case <-halted:
			halted = nil
			n.wg.Go(func() { _ = n.stopRaft() }) // it waits for what this goroutine hears
		case <-n.ctx.Done():
			return
		}
	}
}

// assume makes a won election a usable leadership: a barrier, so that all of
// earlier terms is applied, then what a new or recovered cluster needs.
func (n *Node) assume(ctx context.Context, term uint64) {
	wait := 100 * time.Millisecond
	for ctx.Err() == nil {
		err := n.prepare(ctx, term)
		if err == nil {
			n.faults.clearWrite()
			if n.raft.State() == raft.Leader && n.raft.CurrentTerm() == term {
				n.lead.ready(ctx, term)
			}
			return
		}
		if ctx.Err() != nil {
			return
		}
		n.log.Warn("leadership not ready yet", "term", term, "err", err)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
		wait = min(2*wait, 5*time.Second)
	}
}

func (n *Node) prepare(ctx context.Context, term uint64) error {
	if err := n.await(n.raft.Barrier(enqueueTimeout)); err != nil {
		return n.commitError(err)
	}
	facts := n.machine.Facts()
	if facts.ClusterID == "" {
		if err := n.internal(ctx, state.Op{Type: state.OpBootstrap, ClusterID: n.ClusterID(), Feature: n.cfg.Feature, Term: term}); err != nil {
			return fmt.Errorf("bootstrap: %w", err)
		}
		facts = n.machine.Facts()
	}
	if facts.ClusterID != n.ClusterID() {
		err := fmt.Errorf("%w: the state is of cluster %s, the folder of %s", ErrOtherCluster, facts.ClusterID, n.identity.id.Cluster)
		n.halt(err)
		return err
	}
	if !n.identity.recovering.Load() {
		return nil
	}
	// One step for each epoch that this folder knows of and the state does not
	// (it may be restored from before them), so that no version of those comes
	// back with another meaning.
	known := n.identity.epoch.Load()
	for more := true; more; more = n.machine.Facts().Epoch <= known {
		if err := n.internal(ctx, state.Op{Type: state.OpRecover, Term: term}); err != nil {
			return fmt.Errorf("recover: %w", err)
		}
	}
	return n.identity.update(func(id *identity) {
		id.Recover, id.Epoch = false, n.machine.Facts().Epoch
	})
}

// internal proposes one op before leadership is announced.
func (n *Node) internal(ctx context.Context, op state.Op) error {
	b, err := state.EncodeOp(&op)
	if err != nil {
		return err
	}
	res, err := n.submit(ctx, &proposal{ops: [][]byte{b}, done: make(chan outcome, 1)})
	if err != nil {
		return err
	}
	if res[0].Reason != state.ReasonNone && res[0].Reason != state.ReasonExists {
		return fmt.Errorf("refused: %s", res[0].Detail)
	}
	return nil
}
