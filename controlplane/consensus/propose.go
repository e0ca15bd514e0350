package consensus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

const (
	// batchBytes bounds one Raft entry, unless a single op is larger.
	batchBytes = 1 << 20
	// enqueueTimeout bounds the wait for Raft's main goroutine, which is
	// stuck only while the disk is.
	enqueueTimeout = 10 * time.Second
)

// proposal is one call of Propose.
type proposal struct {
	ops     [][]byte
	deletes bool // nothing but steps of deletions
	nodes   bool // nothing but those and what is said of nodes
	follows bool // nothing but those and what deletions make untrue elsewhere
	done    chan outcome
}

type outcome struct {
	results []state.Result
	err     error
}

// Propose implements state.Proposer. All calls that arrive while one entry is
// being synced share the next one: one fsync carries them all.
func (n *Node) Propose(ctx context.Context, ops []state.Op) ([]state.Result, error) {
	if len(ops) == 0 {
		return nil, nil
	}
	p := &proposal{ops: make([][]byte, len(ops)), deletes: true, nodes: true, follows: true, done: make(chan outcome, 1)}
	for i := range ops {
		b, err := state.EncodeOp(&ops[i])
		if err != nil {
			return nil, err
		}
		p.ops[i] = b
		step := n.deletes(&ops[i])
		p.deletes = p.deletes && step
		p.follows = p.follows && (step || follows(&ops[i]))
		p.nodes = p.nodes && (step || ops[i].Type == state.OpUpdate && ops[i].Record != nil && ops[i].Record.Header.Key.Kind == "Node")
	}
	if _, leading := n.Leadership(); !leading {
		return nil, n.notLeading()
	}
	// The level that is applied here never falls, so what passes stays right.
	if err := state.Gate(ops, n.machine.Facts().Feature); err != nil {
		return nil, err
	}
	return n.submit(ctx, p)
}

// deletes says whether an op is a step of a deletion: the mark, what is said of
// an object that is marked, the end; and that a dependent loses an owner, which
// an owner that is deleted alone waits for. They are taken on a full disk, too.
func (n *Node) deletes(op *state.Op) bool {
	switch op.Type {
	case state.OpDelete:
		return true
	case state.OpUpdate:
		if op.Record == nil || op.Record.Header.Deleted != 0 {
			return op.Record != nil
		}
		old, ok := n.machine.Snapshot().Get(op.Record.Header.Key)
		return ok && len(op.Record.Header.Owners) < len(old.Header.Owners)
	}
	return false
}

// follows says whether an op may correct what a deletion made untrue: figures
// in the status of what owned a pod, addresses where it was reached.
func follows(op *state.Op) bool {
	if op.Type != state.OpUpdate || op.Record == nil {
		return false
	}
	switch op.Record.Header.Key.Kind {
	case "EndpointSlice.discovery.k8s.io", "Endpoints":
		return true
	case "Deployment.apps", "ReplicaSet.apps", "StatefulSet.apps", "DaemonSet.apps", "ReplicationController", "Job.batch", "PodDisruptionBudget.policy":
		return op.Keep&state.KeepSpec != 0
	}
	return false
}

func (n *Node) submit(ctx context.Context, p *proposal) ([]state.Result, error) {
	select {
	case n.queue <- p:
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-n.ctx.Done():
		return nil, ErrClosed
	}
	n.proposals.Add(1)
	select {
	case o := <-p.done:
		return o.results, o.err
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-n.ctx.Done():
		return nil, ErrClosed
	}
}

// notLeading says why this server cannot take a write.
func (n *Node) notLeading() error {
	if err := n.Err(); err != nil {
		return err
	}
	if n.ctx.Err() != nil {
		return ErrClosed
	}
	if err := n.faults.get(); err != nil {
		if !n.alone() { // another one may lead by now, whatever this disk is like
			return fmt.Errorf("%w: %v", state.ErrNotLeader, err) //nolint:errorlint // it is no full disk's answer
		}
		return fmt.Errorf("%w: %w", state.ErrDiskFull, err)
	}
	return state.ErrNotLeader
}

// batch is the one goroutine that hands entries to Raft.
func (n *Node) batch() {
	for {
		select {
		case p := <-n.queue:
			n.commit(n.gather(p))
		case <-n.ctx.Done():
			return
		}
	}
}

// gather takes what waits, up to the size of one entry.
func (n *Node) gather(p *proposal) []*proposal {
	batch, size := []*proposal{p}, p.size()
	for size < batchBytes {
		select {
		case p = <-n.queue:
			batch = append(batch, p)
			size += p.size()
		default:
			return batch
		}
	}
	return batch
}

func (p *proposal) size() int {
	n := 0
	for _, op := range p.ops {
		n += len(op)
	}
	return n
}

// commit writes the batch, one entry where it fits, and hands out results.
func (n *Node) commit(batch []*proposal) {
	batch = n.refuseIfFull(batch)
	var ops [][]byte
	for _, p := range batch {
		ops = append(ops, p.ops...)
	}
	var results []state.Result
	var err error
	for err == nil && len(ops) > 0 {
		take, size := 1, len(ops[0])
		for take < len(ops) && size+len(ops[take]) <= batchBytes {
			size += len(ops[take])
			take++
		}
		var part []state.Result
		part, err = n.apply(ops[:take])
		results = append(results, part...)
		ops = ops[take:]
	}
	for _, p := range batch {
		if len(results) < len(p.ops) {
			p.done <- outcome{err: err}
			continue
		}
		p.done <- outcome{results: results[:len(p.ops):len(p.ops)]}
		results = results[len(p.ops):]
	}
}

// apply commits one entry and waits until it is applied here.
func (n *Node) apply(ops [][]byte) ([]state.Result, error) {
	b, err := state.JoinEntry(ops)
	if err != nil {
		return nil, err
	}
	n.entries.Add(1)
	began := time.Now()
	f := n.raft.Apply(b, enqueueTimeout)
	if err := n.await(f); err != nil {
		return nil, n.commitError(err)
	}
	if n.cfg.Committed != nil {
		n.cfg.Committed(time.Since(began))
	}
	// Errors of the state machine arrive in the response, not in the error.
	a, ok := f.Response().(applied)
	if !ok {
		return nil, fmt.Errorf("raft answered with a %T", f.Response())
	}
	n.faults.clearWrite()
	return a.results, a.err
}

func (n *Node) commitError(err error) error {
	switch {
	case n.Err() != nil:
		return n.Err()
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return fmt.Errorf("%w: %w", state.ErrNotLeader, err)
	case errors.Is(err, raft.ErrRaftShutdown):
		return ErrClosed
	case diskFault(err):
		return fmt.Errorf("%w: %w", state.ErrDiskFull, err)
	case errors.Is(err, raft.ErrLeadershipLost), errors.Is(err, raft.ErrEnqueueTimeout):
		if fault := n.faults.get(); fault != nil {
			return fmt.Errorf("%w: %w", state.ErrDiskFull, fault)
		}
		return fmt.Errorf("%w: %w", state.ErrNoQuorum, err)
	}
	return fmt.Errorf("commit: %w", err)
}
