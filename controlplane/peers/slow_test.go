package peers

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestSlowDisks: a disk whose fsync takes 1.5 s costs latency. It costs no
// leadership, and an election that has to wait for it ends.
func TestSlowDisks(t *testing.T) {
	for _, c := range []struct {
		name string
		slow [3]bool
		// known: the servers have told each other.
		known bool
	}{
		{"a follower, known", [3]bool{false, true, false}, true},
		{"a follower, unknown", [3]bool{false, true, false}, false},
		{"the leader, known", [3]bool{true, false, false}, true},
		{"two, known", [3]bool{true, true, false}, true},
		{"all, known", [3]bool{true, true, true}, true},
		{"all, unknown", [3]bool{true, true, true}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := dirs(t, 3)
			synctest.Test(t, func(t *testing.T) { slowDisks(t, d, c.slow, c.known) })
		})
	}
}

func slowDisks(t *testing.T, dirs []string, which [3]bool, known bool) {
	const slow = 1500 * time.Millisecond
	w := newWorld(t)
	w.slow = map[string]*atomic.Int64{"s0": {}, "s1": {}, "s2": {}}
	list := w.three(dirs)
	lead := leader(t, list, nil)
	if lead != list[0] {
		t.Fatal("the first server does not lead")
	}
	for i, s := range list {
		if which[i] {
			w.slow[s.id].Store(int64(slow))
		}
		if known {
			s.node.OtherSync(slow)
		}
	}
	term := func() (term uint64) {
		for _, s := range list {
			if !s.stopped {
				term = max(term, s.node.Stats().Term)
			}
		}
		return term
	}
	steady := func(lead *server) {
		t.Helper()
		before := term()
		for i := range 60 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			must(t, create(ctx, lead, fmt.Sprintf("%s-%d-%d", lead.id, before, i)))
			cancel()
			time.Sleep(time.Second)
		}
		if after := term(); after != before {
			t.Errorf("%d elections while nothing failed", after-before)
		}
	}
	steady(lead)
	lead.stop()
	began, before := time.Now(), term()
	next := leader(t, list, lead)
	took := time.Since(began)
	t.Logf("the next leader leads after %v and %d elections", took.Round(100*time.Millisecond), term()-before)
	if limit := map[bool]time.Duration{true: 45 * time.Second, false: 2 * time.Minute}[known]; took > limit {
		t.Errorf("%v without a leader", took)
	}
	steady(next)
}
