package peers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/wire"
)

// patience is how long writes and reads wait for a leader, counted from when
// there was one last: an election takes a second or two, and a cluster
// without a quorum shall say so at once.
const patience = 4 * time.Second

// Local is this server's share of the replicated state; *consensus.Node is
// one.
type Local interface {
	state.Proposer
	// Leader is the server that leads, "" if none is known, and a channel that
	// is closed when that may have changed.
	Leader() (id string, changed <-chan struct{})
	ServerID() string
	VerifyLeading(ctx context.Context) (version uint64, err error)
	WaitVersion(ctx context.Context, version uint64) error
	State() *state.Machine
	Err() error
	// Fault is what keeps this server from writing, or nil.
	Fault() error
}

var _ Local = (*consensus.Node)(nil)

// Caller asks another server; *Mesh is one.
type Caller interface {
	Call(ctx context.Context, id string, req, reply wire.Message) error
}

// Proposer is a state.Proposer on every server: where this one does not lead
// it asks the one that does. A write returns after this server applied it, a
// barrier after this server has all that was acknowledged before.
//
// Owner and goroutines: one, which asks for read versions, grouped. Close
// ends it.
type Proposer struct {
	local Local
	peers Caller

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu       sync.Mutex
	leadless time.Time // since when nobody leads; zero: somebody does
	next     *read
	wake     chan struct{}
}

var _ state.Proposer = (*Proposer)(nil)

// read is one question for a version; all that came before it was asked
// share it.
type read struct {
	done    chan struct{}
	version uint64
	err     error
}

// NewProposer starts a Proposer.
func NewProposer(local Local, peers Caller) *Proposer {
	p := &Proposer{local: local, peers: peers, wake: make(chan struct{}, 1), leadless: time.Now()}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.wg.Go(p.reads)
	p.wg.Go(p.watch)
	return p
}

// Close stops it and waits.
func (p *Proposer) Close() {
	p.cancel()
	p.wg.Wait()
}

// watch notes since when there is no leader.
func (p *Proposer) watch() {
	for {
		id, changed := p.local.Leader()
		p.mu.Lock()
		switch {
		case id != "":
			p.leadless = time.Time{}
		case p.leadless.IsZero():
			p.leadless = time.Now()
		}
		p.mu.Unlock()
		select {
		case <-changed:
		case <-p.ctx.Done():
			return
		}
	}
}

// Leadership implements state.Proposer: of this server.
func (p *Proposer) Leadership() (uint64, bool) { return p.local.Leadership() }

// errNoLeader is a definite no: nothing was done.
var errNoLeader = fmt.Errorf("%w: no server leads", state.ErrNoQuorum)

// somewhere runs f against the leader: id is "" for this server. f returns
// again with the reason when nothing was done and another try makes sense.
func (p *Proposer) somewhere(ctx context.Context, f func(ctx context.Context, id string) (again bool, err error)) error {
	began := time.Now()
	for {
		id, changed := p.local.Leader()
		_, leading := p.local.Leadership()
		last := errNoLeader
		switch {
		case leading:
			again, err := f(ctx, "")
			if !again {
				return err
			}
			last = err
		case id != "" && id != p.local.ServerID():
			again, err := p.until(ctx, changed, id, f)
			if !again {
				return err
			}
			last = err
		}
		if err := p.local.Err(); err != nil {
			return err
		}
		p.mu.Lock()
		since := p.leadless
		p.mu.Unlock()
		if since.IsZero() {
			since = began
		}
		left := patience - time.Since(since)
		if left <= 0 {
			if fault := p.local.Fault(); fault != nil && errors.Is(last, errNoLeader) {
				return fmt.Errorf("%w: no server leads, and this one cannot: %w", state.ErrDiskFull, fault)
			}
			return last
		}
		t := time.NewTimer(min(left, 100*time.Millisecond)) // what is wrong may pass without another leader
		select {
		case <-changed:
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return errors.Join(ctx.Err(), last)
		case <-p.ctx.Done():
			t.Stop()
			return consensus.ErrClosed
		}
		t.Stop()
	}
}

// until is f, given up when another server leads: the one asked may be
// stopped, and would answer never.
func (p *Proposer) until(ctx context.Context, changed <-chan struct{}, id string, f func(context.Context, string) (bool, error)) (bool, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	over := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(over)
	wg.Go(func() {
		for {
			select {
			case <-over:
				return
			case <-p.ctx.Done():
				cancel(consensus.ErrClosed)
				return
			case <-changed:
			}
			var now string
			if now, changed = p.local.Leader(); now != id && now != "" {
				cancel(errChanged)
				return
			}
		}
	})
	again, err := f(ctx, id)
	if err != nil && errors.Is(context.Cause(ctx), errChanged) {
		err = fmt.Errorf("%w: %w", state.ErrNoQuorum, errChanged)
	}
	return again, err
}

var errChanged = errors.New("the leader changed meanwhile")

// Propose implements state.Proposer.
func (p *Proposer) Propose(ctx context.Context, ops []state.Op) ([]state.Result, error) {
	if len(ops) == 0 {
		return nil, nil
	}
	for i := range ops {
		if ops[i].Term != 0 {
			return p.local.Propose(ctx, ops) // decided by a leader: nobody else's
		}
	}
	var results []state.Result
	var entry []byte
	err := p.somewhere(ctx, func(ctx context.Context, id string) (again bool, err error) {
		if id == "" {
			results, err = p.local.Propose(ctx, ops)
			return errors.Is(err, state.ErrNotLeader), err
		}
		if entry == nil {
			if entry, err = state.EncodeEntry(ops); err != nil {
				return false, err
			}
		}
		results, err = p.ask(ctx, id, entry, len(ops))
		return errors.Is(err, state.ErrNotLeader), err
	})
	return results, err
}

// ask hands an entry to the leader. ErrNotLeader is a definite no.
func (p *Proposer) ask(ctx context.Context, id string, entry []byte, n int) ([]state.Result, error) {
	reply := new(wire.ProposeReply)
	if err := p.peers.Call(ctx, id, &wire.ProposeRequest{Entry: entry}, reply); err != nil {
		return nil, fromFault(err)
	}
	results, err := state.DecodeResults(reply.Results)
	if err != nil {
		return nil, fmt.Errorf("answer of the leader: %w", err)
	}
	if len(results) != n {
		return nil, fmt.Errorf("answer of the leader: %d results for %d ops", len(results), n)
	}
	// It is done, whatever happens while this server catches up.
	if err := p.local.WaitVersion(ctx, reply.Version); err != nil && p.local.Err() != nil {
		return nil, err
	}
	return results, nil
}

// Barrier implements state.Proposer.
func (p *Proposer) Barrier(ctx context.Context) error {
	if _, leading := p.local.Leadership(); leading {
		if err := p.local.Barrier(ctx); !errors.Is(err, state.ErrNotLeader) {
			return err
		}
	}
	p.mu.Lock()
	r := p.next
	if r == nil {
		r = &read{done: make(chan struct{})}
		p.next = r
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
	p.mu.Unlock()
	select {
	case <-r.done:
	case <-ctx.Done():
		return ctx.Err()
	case <-p.ctx.Done():
		return consensus.ErrClosed
	}
	if r.err != nil {
		return r.err
	}
	return p.local.WaitVersion(ctx, r.version)
}

// readTimeout bounds one question for a version.
const readTimeout = 5 * time.Second

// reads asks for versions, one question at a time for all that wait.
func (p *Proposer) reads() {
	for {
		select {
		case <-p.wake:
		case <-p.ctx.Done():
			return
		}
		p.mu.Lock()
		r := p.next
		p.next = nil
		p.mu.Unlock()
		ctx, cancel := context.WithTimeout(p.ctx, readTimeout)
		r.err = p.somewhere(ctx, func(ctx context.Context, id string) (bool, error) {
			if id == "" {
				v, err := p.local.VerifyLeading(ctx)
				r.version = v
				return errors.Is(err, state.ErrNotLeader), err
			}
			reply := new(wire.ReadReply)
			err := p.peers.Call(ctx, id, &wire.ReadRequest{}, reply)
			if err != nil {
				err = fromFault(err)
				return ctx.Err() == nil, err // a read may always be asked again
			}
			r.version = reply.Version
			return false, nil
		})
		cancel()
		close(r.done)
	}
}

// ServeForwarded answers what Proposers of other servers ask; handled is
// false for anything else.
func ServeForwarded(ctx context.Context, local Local, t wire.Type, body []byte) (reply wire.Message, handled bool, err error) {
	switch t {
	case wire.TypeProposeRequest:
		reply, err = servePropose(ctx, local, body)
	case wire.TypeReadRequest:
		var v uint64
		v, err = local.VerifyLeading(ctx)
		reply = &wire.ReadReply{Version: v}
	default:
		return nil, false, nil
	}
	if err != nil {
		return nil, true, toFault(err)
	}
	return reply, true, nil
}

func servePropose(ctx context.Context, local Local, body []byte) (wire.Message, error) {
	req := new(wire.ProposeRequest)
	if err := wire.Unmarshal(body, req); err != nil {
		return nil, err
	}
	// Decoded, so that what this version does not know never reaches the log.
	ops, err := state.DecodeEntry(req.Entry)
	if err != nil {
		return nil, err
	}
	results, err := local.Propose(ctx, ops)
	if err != nil {
		return nil, err
	}
	b, err := state.EncodeResults(results)
	if err != nil {
		return nil, err
	}
	return &wire.ProposeReply{Results: b, Version: local.State().Snapshot().ResourceVersion()}, nil
}

func toFault(err error) error {
	code := wire.FaultInternal
	switch {
	case errors.Is(err, state.ErrNotLeader):
		code = wire.FaultNotLeader
	case errors.Is(err, state.ErrDiskFull):
		code = wire.FaultDisk
	case errors.Is(err, state.ErrNoQuorum), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded),
		errors.Is(err, consensus.ErrClosed), errors.Is(err, consensus.ErrHalted):
		code = wire.FaultNoQuorum
	case errors.Is(err, wire.ErrMalformed), errors.Is(err, state.ErrMalformed), errors.Is(err, state.ErrUnknownOp), errors.Is(err, state.ErrFeatureLevel):
		code = wire.FaultMalformed
	}
	return &wire.Fault{Code: code, Message: err.Error()}
}

// fromFault is what an answer means to the caller of a Proposer.
func fromFault(err error) error {
	var f *wire.Fault
	switch {
	case errors.Is(err, ErrUnreachable):
		return fmt.Errorf("%w: %w", state.ErrNotLeader, err) // it never left
	case errors.As(err, &f):
		switch f.Code {
		case wire.FaultNotLeader, wire.FaultBusy:
			return fmt.Errorf("%w: %w", state.ErrNotLeader, err)
		case wire.FaultDisk:
			return fmt.Errorf("%w: %w", state.ErrDiskFull, err)
		case wire.FaultMalformed:
			return err
		}
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	return fmt.Errorf("%w: %w", state.ErrNoQuorum, err)
}
