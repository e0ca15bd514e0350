package registry

import (
	"context"
	"sync"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// writers lets the writers of one object go one after the other, once they have
// got into each other's way: of n that write at once, each commit lets all
// others begin anew. A hint only: writers on other servers are not asked, and
// the version decides.
type writers struct {
	mu sync.Mutex
	of map[state.Key]*line
}

// line is those who write one object.
type line struct {
	held  chan struct{} // one place
	users int           // that hold it or wait; guarded by writers.mu
}

// contended says whether somebody holds the turn of an object.
func (w *writers) contended(key state.Key) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.of[key] != nil
}

// take waits for the turn of an object. Whoever holds one must not take
// another.
func (w *writers) take(ctx context.Context, key state.Key) (done func(), err error) {
	w.mu.Lock()
	own := w.of[key]
	if own == nil {
		if w.of == nil {
			w.of = map[state.Key]*line{}
		}
		own = &line{held: make(chan struct{}, 1)}
		w.of[key] = own
	}
	own.users++
	w.mu.Unlock()
	off := func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if own.users--; own.users == 0 {
			delete(w.of, key)
		}
	}
	// Who has the turn may need the place (Turns) to go on.
	defer leave(ctx)()
	select {
	case own.held <- struct{}{}:
		return func() { <-own.held; off() }, nil
	case <-ctx.Done():
		off()
		return nil, ctx.Err()
	}
}
