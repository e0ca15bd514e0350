package consensus

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// TestIdleWritesNothing: a day without changes costs the disk nothing.
func TestIdleWritesNothing(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Dir: dir, ClusterID: "cluster-1", ServerID: "server-1", Log: slog.New(slog.DiscardHandler), Disk: &Disk{}}
		start := time.Now()
		n, err := Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.WaitLeading(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took > 500*time.Millisecond {
			t.Errorf("a lone server led after %v of virtual time", took)
		}
		mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", "a")})
		time.Sleep(2 * boundEvery) // the bound of what was just written
		before := cfg.Disk.Stats()
		for range 24 {
			time.Sleep(time.Hour)
			if err := n.Barrier(t.Context()); err != nil {
				t.Error(err)
			}
		}
		after := cfg.Disk.Stats()
		if after.Bytes != before.Bytes || after.Writes != before.Writes || after.Syncs != before.Syncs {
			t.Errorf("wrote while idle: %+v, then %+v", before, after)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestStartCosts counts what a start with one voter costs the disk.
func TestStartCosts(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	if err := openTest(t, cfg).Close(); err != nil {
		t.Fatal(err)
	}
	cfg.Disk = &Disk{}
	start := time.Now()
	n := openTest(t, cfg)
	st := cfg.Disk.Stats()
	t.Logf("restart: leading after %v, %d fsyncs, %d bytes", time.Since(start), st.Syncs, st.Bytes)
	if st.Syncs > 8 {
		t.Errorf("%d fsyncs for a start", st.Syncs)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestHaltsOnUnknownEntry: an entry of a newer version stops the server, not
// the process, and reading goes on.
func TestHaltsOnUnknownEntry(t *testing.T) {
	cfg := testConfig(t, t.TempDir())
	n := openTest(t, cfg)
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", "a")})
	future := []byte{0xa2, 0x01, 0x02, 0x02, 0x80} // entry format 2
	res := n.raft.Apply(future, time.Minute)
	if res.Error() != nil {
		t.Fatalf("commit: %v", res.Error())
	}
	select {
	case <-n.Halted():
	case <-testContext(t).Done():
		t.Fatal("did not halt")
	}
	if err := n.Err(); !errors.Is(err, ErrHalted) || !errors.Is(err, state.ErrUnknownOp) {
		t.Error(err)
	}
	if _, err := n.Propose(testContext(t), []state.Op{{Type: state.OpTimeFloor, Unix: 1}}); !errors.Is(err, ErrHalted) {
		t.Errorf("write: %v", err)
	}
	if n.State().Snapshot().Len("ConfigMap", "") != 1 {
		t.Error("reading failed")
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	// Nor does it go past the entry after a restart.
	again, err := Open(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-again.Halted():
	case <-testContext(t).Done():
		t.Fatal("did not halt again")
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
	// A recovery with this build says the same, and does not shut out those
	// that can read it.
	if _, err := Recover(t.Context(), cfg); !errors.Is(err, state.ErrUnknownOp) {
		t.Errorf("recover: %v", err)
	}
	if _, epoch, err := Voters(t.Context(), cfg); err != nil || epoch != 1 {
		t.Errorf("after a recovery that failed: epoch %d, %v", epoch, err)
	}
}

func TestTooLargeIsRefusedAlone(t *testing.T) {
	n := openTest(t, testConfig(t, t.TempDir()))
	r := object("ConfigMap", "", "big")
	r.Spec.Data = make([]byte, state.MaxEntryBytes)
	if _, err := n.Propose(testContext(t), []state.Op{{Type: state.OpCreate, Record: r}}); !errors.Is(err, state.ErrTooLarge) {
		t.Error(err)
	}
	// Many in one call travel in several entries.
	var ops []state.Op
	for i := range 50 {
		r := object("ConfigMap", "", "part-"+strings.Repeat("x", i))
		r.Spec.Data = make([]byte, 100<<10)
		ops = append(ops, state.Op{Type: state.OpCreate, Record: r})
	}
	if res := mustPropose(t, n, ops...); len(res) != 50 {
		t.Errorf("%d results", len(res))
	}
	if st := n.Stats(); st.Entries < 5 {
		t.Errorf("%d entries", st.Entries)
	}
}

func TestLead(t *testing.T) {
	n := openTest(t, testConfig(t, t.TempDir()))
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	terms := make(chan uint64)
	done := make(chan error, 1)
	go func() {
		done <- n.Lead(ctx, func(ctx context.Context, term uint64) error {
			select {
			case terms <- term:
			case <-ctx.Done():
			}
			<-ctx.Done()
			return nil
		})
	}()
	if got, want := <-terms, n.raft.CurrentTerm(); got != want {
		t.Errorf("term %d, want %d", got, want)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Errorf("Lead ended with %v", err)
	}
}
