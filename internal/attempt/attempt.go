// Package attempt tries several targets for the first that answers, without
// waiting for one that is silent (RFC 8305, section 5).
package attempt

import (
	"context"
	"errors"
	"time"
)

// ErrNone says that there was nothing to try.
var ErrNone = errors.New("no address is known")

// First calls try for each target in order, the next one as soon as the one
// before failed or stayed silent for the delay, and returns the first success.
// The context of the others ends then; what they still return goes to discard
// (nil: nowhere). Without a success the error joins all of theirs. It returns
// after every try has.
func First[T any](ctx context.Context, delay time.Duration, targets []string, try func(ctx context.Context, target string) (T, error), discard func(T)) (T, error) {
	type outcome struct {
		v   T
		err error
	}
	var zero T
	if len(targets) == 0 {
		return zero, ErrNone
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan outcome, len(targets))
	running, next := 0, 0
	start := func() {
		target := targets[next]
		next++
		running++
		go func() {
			v, err := try(ctx, target)
			done <- outcome{v, err}
		}()
	}
	start()
	t := time.NewTimer(delay)
	defer t.Stop()
	var won *T
	var errs []error
	for running > 0 {
		select {
		case o := <-done:
			running--
			switch {
			case o.err != nil:
				errs = append(errs, o.err)
			case won == nil:
				won = &o.v
				cancel()
			case discard != nil:
				discard(o.v)
			}
			if won == nil && running == 0 && next < len(targets) && ctx.Err() == nil {
				start()
				t.Reset(delay)
			}
		case <-t.C:
			if won == nil && next < len(targets) && ctx.Err() == nil {
				start()
				t.Reset(delay)
			}
		}
	}
	if won != nil {
		return *won, nil
	}
	return zero, errors.Join(errs...)
}
