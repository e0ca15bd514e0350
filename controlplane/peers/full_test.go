package peers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// TestAFullDiskDoesNotEndWrites: disks fill up and are emptied in any order.
// As long as one voter's has room, every write is made, through whichever
// server: the leader hands over before it refuses. Leadership does not go
// round: it moves at most once for each disk that fills up, and not at all
// while all are full.
func TestAFullDiskDoesNotEndWrites(t *testing.T) {
	for seed := range uint64(2) {
		d := dirs(t, 3)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { fullDisks(t, d, rand.New(rand.NewPCG(seed, 1))) })
		})
	}
}

func fullDisks(t *testing.T, dirs []string, rnd *rand.Rand) {
	w := newWorld(t)
	w.free = map[string]*atomic.Int64{}
	for i := range 3 {
		w.free[fmt.Sprint("s", i)] = new(atomic.Int64)
		w.free[fmt.Sprint("s", i)].Store(10 * reserve)
	}
	list := w.three(dirs)
	term := func() (term uint64) {
		for _, s := range list {
			term = max(term, s.node.Stats().Term)
		}
		return term
	}
	made := 0
	write := func(s *server) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		made++
		return create(ctx, s, fmt.Sprint("w", made))
	}
	leader(t, list, nil)
	for step := range 10 {
		id := fmt.Sprint("s", rnd.IntN(3))
		fills := w.free[id].Load() > reserve
		if w.free[id].Store(10 * reserve); fills {
			w.free[id].Store(reserve / 10)
		}
		room := 0
		for _, f := range w.free {
			if f.Load() > reserve {
				room++
			}
		}
		// A leader asks around once a minute at most.
		time.Sleep(reliefPause)
		before := term()
		for range 10 {
			err := write(list[rnd.IntN(3)])
			switch {
			case room > 0 && err != nil:
				t.Fatalf("step %d: %d disks have room: %v", step, room, err)
			case room == 0 && !errors.Is(err, state.ErrDiskFull):
				t.Fatalf("step %d: all disks are full: %v", step, err)
			}
			time.Sleep(time.Second)
		}
		if moved := term() - before; moved > 1 || (room == 0 && moved > 0) {
			t.Fatalf("step %d: leadership moved %d times, with room on %d disks", step, moved, room)
		}
	}
}

const reliefPause = 61 * time.Second
