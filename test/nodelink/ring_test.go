package nodelink

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/node/link"
	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

// member pulls as an agent does, and holds what it gets; unless it is stuck
// (its disk is full, say: it holds what it has saved).
func member(ctx context.Context, a *agent, stuck func() bool) {
	for ctx.Err() == nil {
		time.Sleep(time.Second)
		r, err := a.Pull(ctx, wire.PullRequest{Generation: a.held()})
		if err == nil && !r.Unchanged && !stuck() {
			a.set(r.Generation)
		}
	}
}

func (a *agent) held() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return *a.gen
}

// TestVirtualNewKeysWaitForAll: while a connected node does not hold the new
// gossip keys the next step waits, and it is said for whom; one that is off is
// not waited for. Once it holds them the rotation goes on, and when it never
// does, too.
func TestVirtualNewKeysWaitForAll(t *testing.T) {
	for _, heals := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			n := memnet.New()
			l, err := n.Listen(simServer)
			must(t, err)
			s := start(t, options{listen: l, ns: true, change: func(c *nodeapi.Config) { c.Site = nil }})
			var isStuck atomic.Bool
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			defer running.Wait()
			defer cancel()
			for _, name := range []string{"n1", "n2", "n3"} {
				a := runLink(t, s.enroll(name), func(c *link.Config) { c.Dial = n.Dialer(memnet.Addr(name)) })
				running.Go(func() { member(ctx, a, func() bool { return isStuck.Load() && name == "n2" }) })
			}
			time.Sleep(30 * time.Second)
			before, err := s.api.Keyring(t.Context(), nodeapi.DefaultZone)
			must(t, err)
			if r := s.api.Rotations(); len(before) != 1 || len(r) > 0 {
				t.Fatalf("%d keys, rotations %v", len(before), r)
			}
			n.Cut("n3", true)
			isStuck.Store(true)
			if err := s.api.RotateKeyring(t.Context(), "nope", false); !errors.Is(err, nodeapi.ErrNoSite) {
				t.Errorf("a site that there is not: %v", err)
			}
			must(t, s.api.RotateKeyring(t.Context(), nodeapi.DefaultZone, false))
			time.Sleep(5 * time.Minute)
			r := s.api.Rotations()
			if len(r) != 1 || r[0].Step != 1 || !slices.Equal(r[0].Missing, []string{"n2"}) {
				t.Fatalf("rotations: %+v", r)
			}
			wait := 10 * time.Minute
			if heals {
				isStuck.Store(false)
				wait = 15 * time.Second
			}
			time.Sleep(wait)
			r = s.api.Rotations()
			if len(r) != 1 || r[0].Step != 2 || len(r[0].Missing) > 0 == heals {
				t.Fatalf("heals %v: rotations: %+v", heals, r)
			}
			time.Sleep(2 * time.Hour)
			ring, err := s.api.Keyring(t.Context(), nodeapi.DefaultZone)
			must(t, err)
			if r := s.api.Rotations(); len(ring) != 1 || slices.Equal(ring[0], before[0]) || len(r) > 0 {
				t.Errorf("in the end: %d keys, rotations %v", len(ring), r)
			}
		})
	}
}
