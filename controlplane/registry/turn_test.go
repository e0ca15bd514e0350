package registry

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// slowLog is a log whose entries take a second, and counts who waits for one.
type slowLog struct{ waits atomic.Int32 }

func (l *slowLog) Propose(context.Context, []state.Op) ([]state.Result, error) {
	l.waits.Add(1)
	defer l.waits.Add(-1)
	time.Sleep(time.Second)
	return nil, nil
}

func (l *slowLog) Barrier(context.Context) error { return nil }

func (l *slowLog) Leadership() (uint64, bool) { return 1, true }

// Writes in turns compute two at a time, and all wait for the log together.
func TestWritesComputeInTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const writers = 20
		log, turns := &slowLog{}, make(Turns, 2)
		var computing, most atomic.Int32
		compute := func() {
			most.Store(max(most.Load(), computing.Add(1)))
			time.Sleep(10 * time.Millisecond)
			computing.Add(-1)
		}
		start := time.Now()
		var done atomic.Int32
		for range writers {
			go turns.Do(t.Context(), func(ctx context.Context) {
				compute()
				_, _ = awaited(ctx, log, nil)
				compute()
				done.Add(1)
			})
		}
		time.Sleep(500 * time.Millisecond)
		if got := log.waits.Load(); got != writers {
			t.Errorf("%d of %d wait for the log together", got, writers)
		}
		synctest.Wait()
		for done.Load() < writers {
			time.Sleep(time.Millisecond)
		}
		if took := time.Since(start); most.Load() != 2 || took > 1300*time.Millisecond {
			t.Errorf("%d computed at once, all took %s", most.Load(), took)
		}
		// Who has no turn waits for none.
		turns <- struct{}{}
		turns <- struct{}{}
		if _, err := awaited(t.Context(), log, nil); err != nil {
			t.Error(err)
		}
	})
}
