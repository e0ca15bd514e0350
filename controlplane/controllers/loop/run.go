package loop

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// resyncEvery is how often everything is listed anew even if no event was
// lost; spread by ±10 %.
const resyncEvery = 10 * time.Minute

// Run runs the controllers until ctx ends, and returns when all their
// goroutines have. It fails only if the store cannot be watched.
func Run(ctx context.Context, env Env, m *Metrics, controllers ...*Controller) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, c := range controllers {
		c.queue = NewQueue[state.Key](c.Limit, c.backoff(env))
		for range max(c.Workers, 1) {
			g.Go(func() error {
				for {
					key, ok := c.queue.Get(ctx)
					if !ok {
						return nil
					}
					c.step(ctx, key, m, env.Log)
					c.queue.Done(key)
				}
			})
		}
		if c.Background != nil {
			g.Go(func() error { return c.Background(ctx, c.queue.Add) })
		}
	}
	g.Go(func() error { return feed(ctx, env, m, controllers) })
	err := g.Wait()
	for _, c := range controllers {
		m.setDepth(c.Name, 0)
	}
	return err
}

func (c *Controller) backoff(env Env) Backoff {
	b := c.Backoff
	if b.Rand == nil {
		b.Rand = env.Rand
	}
	return b
}

// add queues a key of a change.
func (c *Controller) add(k state.Key) { c.queue.AddAfter(k, c.Delay) }

// feed turns changes of the store into keys: first everything, then events;
// everything again when the ring lost events, a queue overflowed, or the
// resync is due.
func feed(ctx context.Context, env Env, m *Metrics, controllers []*Controller) error {
	jitter := 1.0
	for ctx.Err() == nil {
		if env.Rand != nil {
			jitter = 0.9 + 0.2*env.Rand()
		}
		due := time.Now().Add(time.Duration(float64(resyncEvery) * jitter))
		after := relist(env.Reader.Snapshot(), controllers)
		err := follow(ctx, env, m, controllers, after, due)
		if err != nil && !errors.Is(err, state.ErrTooOld) && ctx.Err() == nil {
			return fmt.Errorf("watch the store: %w", err)
		}
	}
	return nil
}

func follow(ctx context.Context, env Env, m *Metrics, controllers []*Controller, after uint64, due time.Time) error {
	w, err := env.Reader.Watch("", "", after)
	if err != nil {
		return err
	}
	byKind := map[string][]sourceOf{}
	for _, c := range controllers {
		for _, s := range c.Sources {
			byKind[s.Kind] = append(byKind[s.Kind], sourceOf{c, s})
		}
	}
	ctx, cancel := context.WithDeadline(ctx, due)
	defer cancel()
	for {
		batch, _, err := w.Next(ctx)
		for _, ev := range batch {
			for _, s := range byKind[ev.Record.Header.Key.Kind] {
				s.source.Keys(ev, s.c.add)
			}
		}
		if err != nil {
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return nil // the resync
			}
			return err
		}
		for _, c := range controllers {
			m.setDepth(c.Name, c.queue.Len())
			if c.queue.Overflowed() {
				return nil
			}
		}
	}
}

type sourceOf struct {
	c      *Controller
	source Source
}

// relist gives every record to every source, and returns the version to
// watch from.
func relist(snap state.Snapshot, controllers []*Controller) uint64 {
	for _, c := range controllers {
		for _, s := range c.Sources {
			if s.Reset != nil {
				s.Reset()
			}
			snap.Range(s.Kind, "", state.Key{}, func(r *state.Record) bool {
				s.Keys(state.Event{Type: state.Added, ResourceVersion: r.Header.ResourceVersion, Record: r}, c.add)
				return true
			})
		}
	}
	return snap.ResourceVersion()
}

// ErrNotSettled says that Settle's rounds were not enough.
var ErrNotSettled = errors.New("controllers did not settle")

// Settle runs the controllers in one goroutine, in rounds of a relist and
// one reconcile of every key in order, until a round changes nothing. It is
// the event loop of deterministic tests and of the simulation: the same
// state gives the same writes. Delayed keys are tried in every round.
// An error of a reconcile is not fatal; the last round's are returned if it
// never settles.
func Settle(ctx context.Context, env Env, rounds int, controllers ...*Controller) error {
	var last error
	for range rounds {
		before := env.Reader.Snapshot().ResourceVersion()
		last = nil
		for _, c := range controllers {
			if c.queue == nil {
				c.queue = NewQueue[state.Key](c.Limit, c.backoff(env))
			}
			var keys []state.Key
			seen := map[state.Key]bool{}
			add := func(k state.Key) {
				if !seen[k] {
					seen[k] = true
					keys = append(keys, k)
				}
			}
			snap := env.Reader.Snapshot()
			for _, s := range c.Sources {
				if s.Reset != nil {
					s.Reset()
				}
				snap.Range(s.Kind, "", state.Key{}, func(r *state.Record) bool {
					s.Keys(state.Event{Type: state.Added, ResourceVersion: r.Header.ResourceVersion, Record: r}, add)
					return true
				})
			}
			for _, k := range keys {
				if _, err := c.guarded(ctx, k); err != nil {
					last = errors.Join(last, fmt.Errorf("%s %s: %w", c.Name, KeyString(k), err))
				}
			}
		}
		if last == nil && env.Reader.Snapshot().ResourceVersion() == before {
			return nil
		}
	}
	return errors.Join(fmt.Errorf("%w in %d rounds", ErrNotSettled, rounds), last)
}
