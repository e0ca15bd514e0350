package loop

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// Env is what a controller may use; made anew for each leadership term.
type Env struct {
	Store registry.Store
	// Reader is the durable store's.
	Reader state.Reader
	Term   uint64
	Clock  clock.Clock
	// Trust returns an error while the wall clock jumped and nothing may
	// start, end or expire by it. Nil: it is always trusted.
	Trust  func() error
	Events events.Recorder
	Log    *slog.Logger
	// Rand returns numbers in [0,1) for jitter.
	Rand func() float64
}

// Write returns the options of every write: fenced to the term.
func (e Env) Write() registry.WriteOptions { return registry.WriteOptions{Term: e.Term} }

// Controller reconciles keys of one sort. Made anew for each term.
type Controller struct {
	Name    string
	Workers int // default 1
	// Limit of different keys in the queue; 0 is the Queue's default.
	Limit   int
	Sources []Source
	// Delay holds every key back a moment, so that a burst of changes is
	// reconciled once; 0 for none.
	Delay   time.Duration
	Backoff Backoff
	// Reconcile brings what the key names closer to what it should be. The
	// four outcomes: (0, nil) done; (d, nil) again after d; (_, err) again
	// after a back-off; (_, Terminal(err)) not again until the key is added.
	// It must be right from any half-done state and may be killed between any
	// two writes.
	Reconcile func(ctx context.Context, key state.Key) (time.Duration, error)
	// Background, if set, runs beside the workers until its context ends, for
	// timers of the controller's own.
	Background func(ctx context.Context, add func(state.Key)) error

	queue *Queue[state.Key]
}

// Source maps changes of one kind of record to keys.
type Source struct {
	Kind string // state.Key.Kind
	// Reset is called before a relist, for sources that keep an index. May be
	// nil.
	Reset func()
	// Keys is called for every change, in order, by the one Feed goroutine; a
	// relist calls it with an Added event for each record. It must be quick.
	Keys func(ev state.Event, add func(state.Key))
}

// Self is the source of a controller's own kind: the record's key.
func Self(kind string) Source {
	return Source{Kind: kind, Keys: func(ev state.Event, add func(state.Key)) { add(ev.Record.Header.Key) }}
}

// Controlled maps a record to its controlling owner of one kind, before and
// after the change.
func Controlled(kind, ownerKind string) Source {
	return Source{Kind: kind, Keys: func(ev state.Event, add func(state.Key)) {
		for _, r := range []*state.Record{ev.Record, ev.Prev} {
			if o, ok := ControllerOf(r); ok && o.Kind == ownerKind {
				add(state.Key{Kind: ownerKind, Namespace: r.Header.Key.Namespace, Name: o.Name})
			}
		}
	}}
}

// ControllerOf returns the record's controlling owner.
func ControllerOf(r *state.Record) (state.Owner, bool) {
	if r != nil {
		for _, o := range r.Header.Owners {
			if o.Controller {
				return o, true
			}
		}
	}
	return state.Owner{}, false
}

// TerminalError stops the retries of a key.
type TerminalError struct{ Err error }

// Error implements error.
func (e *TerminalError) Error() string { return e.Err.Error() }

// Unwrap gives the cause.
func (e *TerminalError) Unwrap() error { return e.Err }

// ErrMoved says that an object is no longer what a decision was about: a lost
// race, which the next try sees.
var ErrMoved = errors.New("changed meanwhile")

// Terminal marks an error that trying again cannot help.
func Terminal(err error) error {
	if err == nil {
		return nil
	}
	return &TerminalError{err}
}

// outcome names, for the metric.
const (
	outcomeDone     = "done"
	outcomeAfter    = "requeue_after"
	outcomeError    = "error"
	outcomeTerminal = "terminal"
)

// step reconciles one key that a worker holds.
func (c *Controller) step(ctx context.Context, key state.Key, m *Metrics, log *slog.Logger) {
	start := time.Now()
	after, err := c.guarded(ctx, key)
	var terminal *TerminalError
	outcome := outcomeDone
	switch {
	case ctx.Err() != nil:
		// The term is over: what failed was cancelled, and nobody waits.
	case errors.As(err, &terminal):
		outcome = outcomeTerminal
		c.queue.Forget(key)
		log.Warn("reconcile gave up", "controller", c.Name, "key", KeyString(key), "error", err)
	case err != nil:
		outcome = outcomeError
		d := c.queue.AddFailed(key)
		level := slog.LevelWarn
		if apierrors.IsConflict(err) || errors.Is(err, ErrMoved) {
			level = slog.LevelDebug // a lost race is normal flow
		}
		log.Log(ctx, level, "reconcile failed", "controller", c.Name, "key", KeyString(key), "retry_in", d, "error", err)
	case after > 0:
		outcome = outcomeAfter
		c.queue.Forget(key)
		c.queue.AddAfter(key, after)
	default:
		c.queue.Forget(key)
	}
	m.observe(c.Name, outcome, time.Since(start))
}

func (c *Controller) guarded(ctx context.Context, key state.Key) (after time.Duration, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic in %s: %v\n%s", c.Name, p, debug.Stack())
		}
	}()
	return c.Reconcile(ctx, key)
}

// KeyString shows a key to people.
func KeyString(k state.Key) string {
	s := k.Name
	if k.Namespace != "" {
		s = k.Namespace + "/" + s
	}
	if k.Kind != "" {
		s = k.Kind + " " + s
	}
	return s
}
