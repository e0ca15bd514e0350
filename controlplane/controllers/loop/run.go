package loop

import (
	"context"
	"errors"
	"fmt"
	"sync"
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
	again := make(chan struct{}, 1) // a queue that overflowed has room again
	for _, c := range controllers {
		c.queue = NewQueue[state.Key](c.Limit, c.backoff(env))
		m.queue(c.Name, c.queue)
		for range max(c.Workers, 1) {
			g.Go(func() error {
				for {
					key, ok := c.queue.Get(ctx)
					if !ok {
						return nil
					}
					c.step(ctx, key, m, env.Log)
					c.queue.Done(key)
					if c.queue.Overflowed() {
						select {
						case again <- struct{}{}:
						default:
						}
					}
				}
			})
		}
		if c.Background != nil {
			g.Go(func() error { return c.Background(ctx, c.queue.Add) })
		}
	}
	g.Go(func() error { return feed(ctx, env, again, controllers) })
	err := g.Wait()
	for _, c := range controllers {
		m.queue(c.Name, nil)
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
func feed(ctx context.Context, env Env, again <-chan struct{}, controllers []*Controller) error {
	jitter := 1.0
	for ctx.Err() == nil {
		if env.Rand != nil {
			jitter = 0.9 + 0.2*env.Rand()
		}
		round, cancel := context.WithTimeout(ctx, time.Duration(float64(resyncEvery)*jitter))
		after := relist(ctx, env.Reader.Snapshot(), controllers)
		var wg sync.WaitGroup
		wg.Go(func() {
			select {
			case <-again:
				cancel()
			case <-round.Done():
			}
		})
		err := follow(round, env, controllers, after)
		if round.Err() != nil {
			err = nil // a resync, or the end
		}
		cancel()
		wg.Wait()
		if err != nil && !errors.Is(err, state.ErrTooOld) && ctx.Err() == nil {
			return fmt.Errorf("watch the store: %w", err)
		}
	}
	return nil
}

// follow gives events to their sources until the watch breaks or ctx ends.
func follow(ctx context.Context, env Env, controllers []*Controller, after uint64) error {
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
	for {
		batch, _, err := w.Next(ctx)
		for _, ev := range batch {
			for _, s := range byKind[ev.Record.Header.Key.Kind] {
				s.source.Keys(ev, s.c.add)
			}
		}
		if err != nil {
			return err
		}
	}
}

type sourceOf struct {
	c      *Controller
	source Source
}

// relist gives every record to every source, waiting where a queue is full,
// and returns the version to watch from.
func relist(ctx context.Context, snap state.Snapshot, controllers []*Controller) uint64 {
	for _, c := range controllers {
		add := func(k state.Key) { c.queue.AddWait(ctx, k, c.Delay) }
		for _, s := range c.Sources {
			if s.Reset != nil {
				s.Reset()
			}
			snap.Range(s.Kind, "", state.Key{}, func(r *state.Record) bool {
				s.Keys(state.Event{Type: state.Added, ResourceVersion: r.Header.ResourceVersion, Record: r}, add)
				return ctx.Err() == nil
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
	ctx = Sequentially(ctx)
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
