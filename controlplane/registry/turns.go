package registry

import (
	"context"
	"sync"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// turns lets the writers of one object go one after the other, once they have
// got into each other's way: of n that write at once, each commit lets all
// others begin anew. A hint only: writers on other servers are not asked, and
// the version decides.
type turns struct {
	mu sync.Mutex
	of map[state.Key]*turn
}

type turn struct {
	held  chan struct{} // one place
	users int           // that hold it or wait; guarded by turns.mu
}

// contended says whether somebody holds the turn of an object.
func (t *turns) contended(key state.Key) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.of[key] != nil
}

// take waits for the turn of an object. Whoever holds one must not take
// another.
func (t *turns) take(ctx context.Context, key state.Key) (done func(), err error) {
	t.mu.Lock()
	own := t.of[key]
	if own == nil {
		if t.of == nil {
			t.of = map[state.Key]*turn{}
		}
		own = &turn{held: make(chan struct{}, 1)}
		t.of[key] = own
	}
	own.users++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if own.users--; own.users == 0 {
			delete(t.of, key)
		}
	}
	select {
	case own.held <- struct{}{}:
		return func() { <-own.held; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}
