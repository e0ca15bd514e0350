package nodeapi

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// drive sweeps every SweepInterval for d and renews the nodes every interval.
func drive(l *Leases, d time.Duration, counter *uint64, nodes ...string) {
	for end := time.Now().Add(d); time.Now().Before(end); {
		for range int(LeaseInterval / SweepInterval) {
			time.Sleep(SweepInterval)
			l.sweepNow()
		}
		*counter++
		for _, n := range nodes {
			l.renew(n, "b", *counter)
		}
	}
}

func TestLeaseRunsOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLeases()
		l.lead(1, true, []string{"a", "b"})
		var c uint64
		drive(l, time.Minute, &c, "a", "b")
		start := time.Now()
		for !l.Snapshot()["a"].Expired {
			time.Sleep(SweepInterval)
			l.sweepNow()
		}
		if d := time.Since(start); d < LeaseTTL-LeaseInterval || d > LeaseTTL+SweepInterval {
			t.Fatalf("ran out after %v", d)
		}
		select {
		case <-l.Changed():
		default:
			t.Fatal("no hint")
		}
		c++
		l.renew("a", "b", c)
		if i := l.Snapshot()["a"]; i.Expired || !i.Stale {
			t.Fatalf("after it came back: %+v", i)
		}
		l.reported("a")
		if l.Snapshot()["a"].Stale {
			t.Fatal("still stale after a report")
		}
		if got := l.returned(); len(got) != 1 || got[0] != "a" {
			t.Fatalf("returned %v", got)
		}
	})
}

// A node that came back and has nothing to say is taken at its word.
func TestStaleEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLeases()
		l.lead(1, true, []string{"a"})
		ttlOf(l, "a")
		var c uint64
		drive(l, 2*staleMost, &c, "a")
		if i := l.Snapshot()["a"]; i.Expired || i.Stale {
			t.Fatalf("%+v", i)
		}
	})
}

// A server that stood still for longer than the TTL blames itself.
func TestLateSweepMovesDeadlines(t *testing.T) {
	for _, first := range []string{"sweep", "snapshot", "renewal of another node"} {
		synctest.Test(t, func(t *testing.T) {
			l := newLeases()
			l.lead(1, true, []string{"a", "b"})
			var c uint64
			drive(l, time.Minute, &c, "a", "b")
			time.Sleep(30 * time.Second) // stopped
			switch first {
			case "sweep":
				l.sweepNow()
			case "snapshot":
			default:
				l.renew("b", "b", c+1)
			}
			if l.Snapshot()["a"].Expired {
				t.Fatalf("a node died of the server's own sleep (%s first)", first)
			}
			for range 40 {
				time.Sleep(SweepInterval)
				l.sweepNow()
			}
			if !l.Snapshot()["a"].Expired {
				t.Fatal("and now it must run out")
			}
		})
	}
}

// ttlOf drives sweeps until the node's lease runs out.
func ttlOf(l *Leases, node string) time.Duration {
	start := time.Now()
	for !l.Snapshot()[node].Expired {
		time.Sleep(SweepInterval)
		l.sweepNow()
	}
	return time.Since(start)
}

// A new leader gives every node a fresh TTL, and as long as nobody took
// renewals nodes wait longer before they try again: that long more. A leader
// of before whom this server followed took them as well.
func TestNewTermGivesFullTTL(t *testing.T) {
	for _, tc := range []struct {
		name     string
		took     time.Duration // how long renewals were taken
		followed bool          // by another server
		away     time.Duration // how long nobody took them then
		again    time.Duration // and how long somebody did after that
		want     time.Duration
	}{
		{"a server that just started", 0, false, 0, 0, LeaseTTL + wire.ReconnectMost},
		{"a leader that leads again", time.Minute, false, 3 * time.Second, 0, LeaseTTL + 3*time.Second},
		{"a follower of one that died", time.Minute, true, 3 * time.Second, 0, LeaseTTL + 3*time.Second},
		{"a follower that started a moment ago", 10 * time.Second, true, 3 * time.Second, 0, LeaseTTL + wire.ReconnectMost - 13*time.Second},
		{"after a long time without a quorum", time.Minute, false, time.Hour, 0, LeaseTTL + wire.ReconnectMost},
		{"a moment after a long time without a quorum", time.Minute, true, time.Hour, 5 * time.Second, LeaseTTL + wire.ReconnectMost - 5*time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			l, counter := newLeases(), uint64(0)
			l.lead(1, !tc.followed, []string{"a"})
			take := func(d time.Duration) {
				for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(SweepInterval) {
					if counter++; tc.followed {
						l.taken(time.Now())
					} else {
						l.renew("a", "b", counter)
					}
				}
			}
			take(tc.took)
			if l.lead(2, false, nil); tc.took > 0 {
				if _, ok := l.renew("a", "b", counter+1); ok {
					t.Fatal("a follower acknowledged")
				}
			}
			time.Sleep(tc.away)
			take(tc.again)
			l.lead(3, true, []string{"a", "c"})
			if i := l.Snapshot()["a"]; i.Age != 0 {
				t.Fatalf("%s: age %s", tc.name, i.Age)
			}
			time.Sleep(SweepInterval)
			l.sweepNow()
			if i := l.Snapshot()["a"]; i.Age != SweepInterval {
				t.Fatalf("%s: age %s: it must not look like a renewal", tc.name, i.Age)
			}
			l.renew("c", "b", 1)
			if d := ttlOf(l, "c"); d > LeaseTTL+SweepInterval {
				t.Fatalf("%s: a node that was heard ran out after %s", tc.name, d)
			}
			if d := LeaseTTL + ttlOf(l, "a"); d < tc.want-3*SweepInterval || d > tc.want+3*SweepInterval {
				t.Errorf("%s: the fresh TTL was %s, want %s", tc.name, d, tc.want)
			}
		})
	}
}

func TestReplayedRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLeases()
		l.lead(1, true, nil)
		for _, step := range []struct {
			boot    string
			counter uint64
			ok      bool
		}{{"b", 1, true}, {"b", 3, true}, {"b", 3, false}, {"b", 2, false}, {"b", 4, true}, {"c", 1, true}} {
			if _, ok := l.renew("a", step.boot, step.counter); ok != step.ok {
				t.Errorf("%+v: %v", step, ok)
			}
		}
	})
}
