package clock

import (
	"fmt"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/internal/version"
)

// Guard watches a wall clock for jumps against a clock that cannot jump. Who
// issues certificates or acts on dates asks it first. Safe for concurrent
// use; it owns no goroutine.
type Guard struct {
	wall    Clock
	elapsed func() time.Duration

	mu      sync.Mutex
	base    time.Time     // wall time that is believed ...
	at      time.Duration // ... as of then
	jump    time.Duration // how far wall is from base; 0 is within bounds
	jumped  time.Duration // when that was first seen
	steadyJ time.Duration // the jump that is steady since jumped
}

// Limits of a Guard.
const (
	// GuardLimit is how far the wall clock may move on its own.
	GuardLimit = time.Minute
	// GuardSettle is how long a moved clock must run evenly before it is
	// believed: a board without a battery gets its time once, by a jump of
	// decades, and nobody is there to restart anything.
	GuardSettle = 15 * time.Minute
)

// plausible is a time that is over: a clock before it was never set, and what
// moves it to after it is the repair.
func plausible() time.Time {
	least := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	if built := version.Built(); built.After(least) {
		return built
	}
	return least
}

// NewGuard believes wall as it is now. elapsed runs evenly, also while the
// machine sleeps; nil is Elapsed.
func NewGuard(wall Clock, elapsed func() time.Duration) *Guard {
	if elapsed == nil {
		elapsed = Elapsed
	}
	return &Guard{wall: wall, elapsed: elapsed, base: wall.Now().Round(0), at: elapsed()}
}

// GuardDoubt is how far beyond the last known time a clock may be at the
// start: a machine may have been off for long, but a clock that is years
// ahead is more often wrong, and what it would put into certificates cannot
// be taken back.
const GuardDoubt = 180 * 24 * time.Hour

// Doubt tells the guard the latest time that is known to have been. A wall
// clock that is far beyond it counts as one that jumped just now.
func (g *Guard) Doubt(known time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if known = known.Round(0); !known.Before(plausible()) && g.base.Sub(known) > GuardDoubt {
		g.base = known
	}
}

// JumpError says that the wall clock moved.
type JumpError struct {
	By    time.Duration // forward is positive
	Until time.Duration // when it is believed again, if it runs evenly
}

// Error implements error.
func (e *JumpError) Error() string {
	return fmt.Sprintf("this server's clock jumped by %s; it is believed again if it runs evenly for %s more (check the time service)",
		e.By.Round(time.Second), e.Until.Round(time.Second))
}

// Now implements Clock: the wall clock, and while that is not believed what it
// would show had it not moved. Certificates are judged by it.
func (g *Guard) Now() time.Time {
	if g.Check() == nil {
		return g.wall.Now()
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.base.Add(g.elapsed() - g.at)
}

// Check returns a *JumpError while the wall clock cannot be trusted.
func (g *Guard) Check() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	now, at := g.wall.Now().Round(0), g.elapsed()
	off := now.Sub(g.base) - (at - g.at)
	if off.Abs() <= GuardLimit || (g.base.Before(plausible()) && !now.Before(plausible())) {
		// Slow drift is what time services repair: follow it.
		g.base, g.at, g.jump = now, at, 0
		return nil
	}
	if g.jump == 0 || (off-g.steadyJ).Abs() > GuardLimit {
		g.jumped, g.steadyJ = at, off
	}
	g.jump = off
	if left := GuardSettle - (at - g.jumped); left > 0 {
		return &JumpError{By: off, Until: left}
	}
	g.base, g.at, g.jump = now, at, 0
	return nil
}
