package clock

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"
)

func TestGuard(t *testing.T) {
	wall, run := time.Unix(4_000_000_000, 0), time.Duration(0)
	g := NewGuard(Func(func() time.Time { return wall }), func() time.Duration { return run })
	pass := func(w, r time.Duration) error {
		wall, run = wall.Add(w), run+r
		return g.Check()
	}
	for range 100 { // a clock that is 5 % fast drifts and does not jump
		if err := pass(63*time.Second, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	for _, by := range []time.Duration{61 * time.Second, -time.Hour, 40 * 365 * 24 * time.Hour} {
		var j *JumpError
		if err := pass(by, 0); !errors.As(err, &j) || j.By != by {
			t.Fatalf("jump by %s: %v", by, err)
		}
		if got := g.Now(); !got.Equal(wall.Add(-by)) {
			t.Fatalf("jump by %s: judged by %s", by, got)
		}
		if err := pass(-by, 0); err != nil {
			t.Fatalf("jump by %s and back: %v", by, err)
		}
		if got := g.Now(); !got.Equal(wall) {
			t.Fatalf("jump by %s and back: judged by %s", by, got)
		}
		if err := pass(by, 0); err == nil {
			t.Fatalf("jump by %s again: believed", by)
		}
		if err := pass(GuardSettle-time.Second, GuardSettle-time.Second); err == nil {
			t.Fatal("believed before it settled")
		}
		if err := pass(time.Second, time.Second); err != nil {
			t.Fatalf("not believed after it settled: %v", err)
		}
	}
	if err := pass(time.Hour, 0); err == nil {
		t.Fatal("no jump seen")
	}
	if err := pass(GuardSettle+time.Hour, GuardSettle); err == nil {
		t.Fatal("a clock that goes on jumping is believed")
	}
}

// A server that starts while its clock is years ahead of what it knew goes by
// what it knew; one that was off for weeks does not.
func TestGuardDoubtsTheFirstReading(t *testing.T) {
	known := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, ahead := range []time.Duration{0, 30 * 24 * time.Hour, 2 * 365 * 24 * time.Hour} {
		wall, run := known.Add(ahead), time.Duration(0)
		g := NewGuard(Func(func() time.Time { return wall }), func() time.Duration { return run })
		g.Doubt(known)
		if doubted := ahead > GuardDoubt; (g.Check() != nil) != doubted {
			t.Fatalf("%s ahead: %v", ahead, g.Check())
		} else if doubted && !g.Now().Equal(known) {
			t.Fatalf("%s ahead: goes by %s", ahead, g.Now())
		}
		wall, run = wall.Add(GuardSettle), run+GuardSettle
		if err := g.Check(); err != nil {
			t.Fatalf("%s ahead, and steady: %v", ahead, err)
		}
	}
	g := NewGuard(Func(func() time.Time { return known }), func() time.Duration { return 0 })
	g.Doubt(time.Unix(0, 0)) // a server that never knew the time
	if err := g.Check(); err != nil {
		t.Fatal(err)
	}
}

// A board without a battery boots in 1970 and gets its time by one jump.
func TestGuardBelievesTheFirstRealTime(t *testing.T) {
	wall := time.Unix(100, 0)
	g := NewGuard(Func(func() time.Time { return wall }), func() time.Duration { return 0 })
	if err := g.Check(); err != nil {
		t.Fatal(err)
	}
	wall = time.Date(2031, 5, 1, 0, 0, 0, 0, time.UTC)
	if err := g.Check(); err != nil {
		t.Fatal(err)
	}
	wall = time.Unix(100, 0)
	if g.Check() == nil {
		t.Fatal("a jump back to 1970 is believed")
	}
}

func TestElapsedRises(t *testing.T) {
	a := Elapsed()
	if b := Elapsed(); a <= 0 || b < a {
		t.Fatalf("%s, then %s", a, b)
	}
}

func TestFloor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "floor")
		wall := time.Unix(0, 0) // a board without a battery
		real := time.Unix(1_800_000_000, 0)
		writes := func() time.Time {
			st, err := os.Stat(path)
			if err != nil {
				return time.Time{}
			}
			return st.ModTime()
		}
		open := func() *Floor {
			f, err := OpenFloor(Func(func() time.Time { return wall }), path)
			if err != nil {
				t.Fatal(err)
			}
			return f
		}
		say := func(f *Floor, at time.Time) {
			if err := f.Observe(at, time.Second); err != nil {
				t.Fatal(err)
			}
		}
		near := func(got, want time.Time) {
			t.Helper()
			if got.Sub(want).Abs() > 3*time.Second {
				t.Fatalf("clock says %s, want %s", got.UTC(), want.UTC())
			}
		}
		f := open()
		near(f.Now(), wall)
		say(f, real)
		near(f.Now(), real)
		first := writes()
		time.Sleep(time.Hour)
		near(f.Now(), real.Add(time.Hour))
		say(f, real.Add(time.Hour))
		if writes() != first {
			t.Fatal("written twice in an hour")
		}
		f = open() // boots again: at least where it was
		near(f.Now(), real)
		say(f, real.Add(40*365*24*time.Hour))
		near(f.Now(), real.Add(24*time.Hour)) // a wrong server gains a day at most
		say(f, real.Add(time.Hour))
		near(f.Now(), real.Add(time.Hour)) // and a right one takes it back
		near(open().Now(), real.Add(time.Hour))
		wall = real.Add(48 * time.Hour)
		near(f.Now(), wall)
		if err := os.WriteFile(path, []byte("junk"), 0o600); err != nil {
			t.Fatal(err)
		}
		near(open().Now(), wall)
		time.Sleep(25 * time.Hour)
		if err := f.Keep(); err != nil {
			t.Fatal(err)
		}
		wall = time.Unix(0, 0)
		near(open().Now(), real.Add(26*time.Hour))
	})
}

// TestFloorFollows: a clock that was ahead and is put right while it is watched
// is seen to move, and the floor falls once that is believed; one that falls
// back to 1970, or was behind from the start, is not followed, and said to be
// wrong.
func TestFloorFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "floor")
		real := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
		ahead := real.AddDate(2, 0, 0)
		wall := ahead
		open := func() *Floor {
			f, err := OpenFloor(Func(func() time.Time { return wall }), path)
			if err != nil {
				t.Fatal(err)
			}
			f.Follow()
			return f
		}
		check := func(f *Floor, want time.Time, doubted bool) {
			t.Helper()
			if got := f.Now(); !got.Equal(want) || (f.Doubt() != nil) != doubted {
				t.Fatalf("%s, want %s; doubt: %v", got.UTC(), want, f.Doubt())
			}
		}
		believe := func(f *Floor) {
			t.Helper()
			if err := f.Believe(); err != nil {
				t.Fatal(err)
			}
		}
		f := open()
		check(f, ahead, false)
		believe(f)
		wall = time.Unix(0, 0)
		check(f, ahead, true)
		wall = real
		check(f, real, false)
		again := open() // it may never have been right
		check(again, ahead, true)
		believe(again)
		check(again, ahead, true)
		believe(f)
		check(open(), real, false)
		wall = time.Unix(0, 0)
		check(open(), real, true)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		check(open(), wall, true)
	})
}
