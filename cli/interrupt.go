package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// interruption ends the context of a command: a signal asked for its end.
type interruption syscall.Signal

func (i interruption) Error() string {
	name := map[interruption]string{interruption(syscall.SIGINT): "SIGINT", interruption(syscall.SIGTERM): "SIGTERM"}[i]
	return "interrupted by " + name
}

// Is lets it pass as the end of a context that it is.
func (i interruption) Is(target error) bool { return target == context.Canceled }

// exitCode is what shells give to a process that the signal ended.
func (i interruption) exitCode() int { return 128 + int(i) }

// untilSignal is a context that SIGINT or SIGTERM ends, with an interruption
// as its cause.
func untilSignal(parent context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(parent)
	got := make(chan os.Signal, 1)
	signal.Notify(got, os.Interrupt, syscall.SIGTERM)
	go func() {
		select {
		case s := <-got:
			cancel(interruption(s.(syscall.Signal)))
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(got)
		cancel(nil)
	}
}

// interrupted says what came of a command's work that a signal ended.
func interrupted(ctx context.Context, err error, what string) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	return fmt.Errorf("%s: %w", what, err)
}
