package consensus

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// TestElectionTimeout: the time covers every known disk and grows while nobody
// leads, within its bounds.
func TestElectionTimeout(t *testing.T) {
	for _, c := range []struct{ sync, leaderless, want time.Duration }{
		{0, 0, time.Second},
		{20 * time.Millisecond, 0, time.Second},
		{1500 * time.Millisecond, 0, 12 * time.Second},
		{time.Minute, 0, 30 * time.Second},
		{0, 20 * time.Second, 5 * time.Second},
		{0, time.Hour, 12 * time.Second},
	} {
		if got := electionTimeout(c.sync, c.leaderless); got != c.want {
			t.Errorf("fsync %v, nobody led for %v: %v, want %v", c.sync, c.leaderless, got, c.want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		sync := time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "sync"))
		idle := time.Duration(rapid.Int64Range(0, int64(1000*time.Hour)).Draw(t, "leaderless"))
		if d := electionTimeout(sync, idle); d < baseTimeout || d > maxTimeout || d < electionTimeout(sync, 0) {
			t.Errorf("%v", d)
		}
	})
}
