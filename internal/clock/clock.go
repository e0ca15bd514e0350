// Package clock is the one source of wall and boot time (design invariant
// 11). Timers stay package time; only what is displayed, stored or compared
// with a date comes from here, so that tests can make it jump.
package clock

import "time"

// Clock reads wall time.
type Clock interface {
	Now() time.Time
}

// Func adapts a function.
type Func func() time.Time

// Now implements Clock.
func (f Func) Now() time.Time { return f() }

// System is the machine's clock.
var System Clock = Func(time.Now)
