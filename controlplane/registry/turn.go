package registry

import (
	"context"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Turns bound how many of many writes compute at once. A write has a place
// while it decodes, merges, validates and encodes, and none while it waits for
// the log, so that as many as come wait for its next entry together, and yet
// never stand in line for the processors together, where leases and the API's
// requests would stand behind them.
type Turns chan struct{}

type turnsKey struct{}

// Do runs f, whose writes are made with its context, once there is a place.
func (t Turns) Do(ctx context.Context, f func(ctx context.Context)) {
	t <- struct{}{}
	defer func() { <-t }()
	f(context.WithValue(ctx, turnsKey{}, t))
}

// leave gives the caller's place to another, if it has one, until back is
// called.
func leave(ctx context.Context) (back func()) {
	t, ok := ctx.Value(turnsKey{}).(Turns)
	if !ok {
		return func() {}
	}
	<-t
	return func() { t <- struct{}{} }
}

// awaited proposes; the caller's place is another's meanwhile.
func awaited(ctx context.Context, p state.Proposer, ops []state.Op) ([]state.Result, error) {
	defer leave(ctx)()
	return p.Propose(ctx, ops)
}
