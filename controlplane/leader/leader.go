// Package leader runs what may run on one server only: the controllers, the
// scheduler, node leases.
//
// Owner and goroutines: Run owns one goroutine per component while this
// server leads. Every component gets the context of its term; when leadership
// ends all of them are stopped and waited for before anything of a later term
// starts. Before the first starts, the state holds everything that earlier
// leaders committed.
package leader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"
)

// Component is one thing that runs on the leader.
type Component struct {
	Name string
	// Run works until ctx ends. term fences its writes (state.Op.Term). It is
	// started again, with back-off, when it returns early, fails or panics.
	// Everything it starts has ended when it returns.
	Run func(ctx context.Context, term uint64) error
	// Ready, if set, blocks until the component started by Run is usable; the
	// next component starts after it. An error (of ctx only) ends the wait.
	Ready func(ctx context.Context) error
}

// Elector says when this server leads; *consensus.Node is one.
type Elector interface {
	// Lead calls f each time this server comes to lead, with a context that
	// ends with the term, and waits for it before the next.
	Lead(ctx context.Context, f func(ctx context.Context, term uint64) error) error
	// Barrier returns when the state holds everything committed before.
	Barrier(ctx context.Context) error
}

// Back-off of a component that fails.
const (
	minBackoff = 100 * time.Millisecond
	maxBackoff = 30 * time.Second
	// steady is how long a component must have run for its next failure to
	// count as the first.
	steady = time.Minute
)

// Run runs the components, in order, whenever this server leads, until ctx
// ends or the elector gives up (then its error is returned).
func Run(ctx context.Context, e Elector, log *slog.Logger, components ...Component) error {
	err := e.Lead(ctx, func(ctx context.Context, term uint64) error {
		lead(ctx, e, log.With("term", term), term, components)
		return nil
	})
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return fmt.Errorf("lead: %w", err)
	}
	return nil
}

// lead runs one term.
func lead(ctx context.Context, e Elector, log *slog.Logger, term uint64, components []Component) {
	retry(ctx, log, "barrier", func(ctx context.Context) error { return e.Barrier(ctx) })
	if ctx.Err() != nil {
		return
	}
	log.Info("leading")
	defer log.Info("no longer leading")
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, c := range components {
		wg.Go(func() {
			retry(ctx, log, c.Name, func(ctx context.Context) error {
				if err := c.Run(ctx, term); err != nil || ctx.Err() != nil {
					return err
				}
				return errEarly
			})
		})
		if c.Ready != nil && c.Ready(ctx) != nil {
			return
		}
	}
}

var errEarly = errors.New("ended although the term goes on")

// retry calls f until it succeeds or ctx ends.
func retry(ctx context.Context, log *slog.Logger, name string, f func(context.Context) error) {
	wait := minBackoff
	for ctx.Err() == nil {
		start := time.Now()
		err := guard(ctx, f)
		if err == nil || ctx.Err() != nil {
			return
		}
		if time.Since(start) > steady {
			wait = minBackoff
		}
		pause := wait/2 + rand.N(wait/2+1)
		log.Error("component failed; starting it again", "component", name, "err", err, "after", pause)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
		wait = min(2*wait, maxBackoff)
	}
}

// guard turns a panic into an error.
func guard(ctx context.Context, f func(context.Context) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return f(ctx)
}
