package peers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/wire/memnet"
)

func dirs(t *testing.T, n int) []string {
	var out []string
	for range n {
		out = append(out, t.TempDir())
	}
	return out
}

// One server leads at once, over the transport that further servers will
// use, and grows to three; every server takes writes and answers reads.
func TestGrowAndForward(t *testing.T) {
	d := dirs(t, 3)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		start := time.Now()
		list := w.three(d)
		if waited := time.Since(start); waited > 2*time.Second {
			t.Errorf("a lone server led and took two others after %v", waited)
		}
		for i, s := range list {
			name := fmt.Sprintf("by-%d", i)
			must(t, create(t.Context(), s, name))
			if !has(s, name) {
				t.Errorf("%s acknowledged a write that it has not applied", s.id)
			}
			for _, other := range list {
				must(t, other.writes.Barrier(t.Context()))
				if !has(other, name) {
					t.Errorf("a read on %s that began after the write on %s does not show it", other.id, s.id)
				}
			}
			if err := create(t.Context(), s, name); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("the second create: %v", err)
			}
		}
		// A term's own writes are never anybody else's.
		_, err := list[1].writes.Propose(t.Context(), []state.Op{{Type: state.OpTimeFloor, Unix: 1, Term: 1}})
		if !errors.Is(err, state.ErrNotLeader) {
			t.Errorf("a fenced write on a follower: %v", err)
		}
	})
}

// Leaders are stopped, cut off and brought back under writes through every
// server. What was acknowledged is everywhere, once, at the end.
func TestLeadersFail(t *testing.T) {
	d := dirs(t, 3)
	rounds := 10
	if testing.Short() {
		rounds = 4
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		list := w.three(d)
		var acked []string
		write := func(s *server, name string) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			if err := create(ctx, s, name); err == nil {
				acked = append(acked, name)
			}
		}
		for round := range rounds {
			old := leader(t, list, nil)
			for i, s := range list {
				write(s, fmt.Sprintf("before-%d-%d", round, i))
			}
			if round%2 == 0 {
				old.stop()
			} else {
				w.net.Cut(memnet.Addr(old.addr), true)
			}
			for i, s := range list {
				if s != old {
					write(s, fmt.Sprintf("during-%d-%d", round, i))
				}
			}
			if next := leader(t, list, old); next == old {
				t.Fatal("the old leader")
			}
			for i, s := range list {
				if s != old {
					write(s, fmt.Sprintf("after-%d-%d", round, i))
				}
			}
			if round%2 == 0 {
				for i, s := range list {
					if s == old {
						list[i] = w.start(old.id, options{dir: old.dir, join: true})
					}
				}
			} else {
				if err := old.writes.Barrier(t.Context()); err == nil {
					t.Errorf("round %d: a server that is cut off answered a linearizable read", round)
				}
				w.net.Cut(memnet.Addr(old.addr), false)
			}
		}
		settled(t, list)
		for i, s := range list {
			write(s, fmt.Sprintf("end-%d", i))
		}
		settled(t, list)
		want, err := list[0].node.State().Hash()
		must(t, err)
		for _, s := range list {
			if got, err := s.node.State().Hash(); err != nil || got != want {
				t.Errorf("%s: its state differs: %v", s.id, err)
			}
			for _, name := range acked {
				if !has(s, name) {
					t.Errorf("%s: %s was acknowledged and is missing", s.id, name)
				}
			}
		}
		t.Logf("%d acknowledged in %d rounds", len(acked), rounds)
		if len(acked) < 6*rounds {
			t.Errorf("only %d writes were acknowledged in %d rounds: they shall wait for an election", len(acked), rounds)
		}
	})
}

// Two of three are gone: writes are refused with a reason that names the
// quorum, and soon; reads say that they cannot be verified. They come back,
// and all is well.
func TestNoQuorum(t *testing.T) {
	d := dirs(t, 3)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		list := w.three(d)
		must(t, create(t.Context(), list[1], "one"))
		settled(t, list)
		list[0].stop()
		list[1].stop()
		time.Sleep(10 * time.Second)
		start := time.Now()
		if err := create(t.Context(), list[2], "two"); !errors.Is(err, state.ErrNoQuorum) {
			t.Errorf("a write without a quorum: %v", err)
		}
		if err := list[2].writes.Barrier(t.Context()); !errors.Is(err, state.ErrNoQuorum) {
			t.Errorf("a read without a quorum: %v", err)
		}
		if d := time.Since(start); d > time.Second {
			t.Errorf("it took %v to say so", d)
		}
		if !has(list[2], "one") {
			t.Error("what was acknowledged is not there to be read")
		}
		list[0] = w.start("s0", options{dir: d[0]})
		list[1] = w.start("s1", options{dir: d[1]})
		settled(t, list)
		for i, s := range list {
			must(t, create(t.Context(), s, fmt.Sprintf("again-%d", i)))
		}
		if has(list[2], "two") {
			t.Error("a refused write was made after all")
		}
	})
}

// A server that hears nobody, and is heard, does not unseat the leader.
func TestDeafServer(t *testing.T) {
	d := dirs(t, 3)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		list := w.three(d)
		lead := leader(t, list, nil)
		term, _ := lead.node.Leadership()
		deaf := list[1]
		if deaf == lead {
			deaf = list[2]
		}
		w.net.Deafen(memnet.Addr(deaf.addr), true)
		for range 60 {
			time.Sleep(time.Second)
			if now, leading := lead.node.Leadership(); !leading || now != term {
				t.Fatalf("the leader of term %d was unseated: term %d, leading %v", term, now, leading)
			}
		}
		must(t, create(t.Context(), lead, "meanwhile"))
		w.net.Deafen(memnet.Addr(deaf.addr), false)
		time.Sleep(20 * time.Second)
		if now, leading := lead.node.Leadership(); !leading || now != term {
			t.Errorf("when it hears again: term %d after %d, leading %v", now, term, leading)
		}
		must(t, deaf.writes.Barrier(t.Context()))
		if !has(deaf, "meanwhile") {
			t.Error("it did not catch up")
		}
	})
}

// All servers change address at once; each is told of one of the others.
func TestAddressesChange(t *testing.T) {
	d := dirs(t, 3)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		list := w.three(d)
		must(t, create(t.Context(), list[0], "before"))
		for _, s := range list {
			s.stop()
		}
		for i := range list {
			next := fmt.Sprintf("moved%d:6443", (i+1)%3)
			list[i] = w.start(list[i].id, options{dir: d[i], addr: fmt.Sprintf("moved%d", i), seeds: []string{next}})
		}
		settled(t, list)
		must(t, create(t.Context(), list[2], "after"))
		// One more time, without seeds, one by one: each tells the others.
		for i := range list {
			list[i].stop()
			list[i] = w.start(list[i].id, options{dir: d[i], addr: fmt.Sprintf("again%d", i)})
			mustCreate(t, list[i], fmt.Sprintf("again-%d", i))
		}
		settled(t, list)
		for _, s := range list {
			if !has(s, "before") || !has(s, "after") || !has(s, "again-2") {
				t.Errorf("%s does not have everything", s.id)
			}
		}
	})
}

// settled waits until every server can answer reads.
func settled(t *testing.T, list []*server) {
	t.Helper()
	for _, s := range list {
		var err error
		for range 600 {
			if err = s.writes.Barrier(t.Context()); err == nil {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		must(t, err)
	}
}

// leader waits for one that leads and is not the one excluded.
func leader(t *testing.T, list []*server, but *server) *server {
	t.Helper()
	for range 1200 {
		for _, s := range list {
			if s.stopped || s == but {
				continue
			}
			if _, leading := s.node.Leadership(); leading {
				return s
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatal("no leader within two minutes")
	return nil
}

// mustCreate goes on until the write is acknowledged; that it was made by a
// try of which the answer was lost is fine.
func mustCreate(t *testing.T, s *server, name string) {
	t.Helper()
	var err error
	for range 100 {
		if err = create(t.Context(), s, name); err == nil || strings.Contains(err.Error(), "refused: 1 ") {
			return
		}
		time.Sleep(500 * time.Millisecond)
	}
	t.Fatal(err)
}
