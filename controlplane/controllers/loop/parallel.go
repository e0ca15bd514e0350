package loop

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sync/errgroup"
)

// inFlight bounds the writes of one reconcile that wait for the log at once:
// enough to share an fsync, few enough to leave room for others.
const inFlight = 64

type sequentially struct{}

// Sequentially makes Parallel run one after the other, in order: what is
// written, and in which order, then depends on nothing but the state.
func Sequentially(ctx context.Context) context.Context {
	return context.WithValue(ctx, sequentially{}, true)
}

// Parallel runs f(0..n-1), a bounded number at a time, and returns one of
// the errors after all have ended.
func Parallel(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	if n == 1 {
		return f(ctx, 0)
	}
	if ctx.Value(sequentially{}) != nil {
		var first error
		for i := range n {
			if err := f(ctx, i); err != nil && first == nil {
				first = err
			}
		}
		return first
	}
	var g errgroup.Group
	g.SetLimit(inFlight)
	var mu sync.Mutex
	var first error
	for i := range n {
		g.Go(func() error {
			if err := f(ctx, i); err != nil {
				mu.Lock()
				defer mu.Unlock()
				if first == nil || errors.Is(first, context.Canceled) {
					first = err
				}
			}
			return nil
		})
	}
	_ = g.Wait() // the functions return nil; their error is in first
	return first
}
