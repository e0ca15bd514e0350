package balance

import (
	"testing"
	"time"
)

// An endpoint that cannot be reached is tried by one connection at a time, less
// and less often, and has its share again once it was reached.
func TestOneTriesWhatFailed(t *testing.T) {
	var h health
	now := time.Unix(1_800_000_000, 0)
	skipped := func() bool { return h.until.Load() > now.UnixNano() }
	for i, want := range []time.Duration{5, 10, 20, 40, 60, 60, 60, 60, 60, 60, 60} {
		for range 5 { // all that were there fail together
			h.Fail(now)
		}
		if got := time.Duration(h.until.Load() - now.UnixNano()); got != want*time.Second {
			t.Fatalf("failure %d: passed over for %s, want %ds", i, got, want)
		}
		if now = now.Add(want * time.Second); skipped() {
			t.Fatal("it is never tried again")
		}
		if h.picked(now); !skipped() {
			t.Fatal("two try it")
		}
		now = now.Add(time.Second) // in which the one finds out
	}
	h.Reached()
	if h.picked(now); skipped() || h.strikes.Load() != 0 {
		t.Error("it was reached, and is passed over")
	}
	h.Fail(now)
	now = now.Add(FailedFor)
	h.picked(now)
	now = now.Add(FailedFor) // that one never said
	if skipped() {
		t.Error("one that says nothing is waited for")
	}
	if h.picked(now); !skipped() {
		t.Error("then all try it")
	}
}
