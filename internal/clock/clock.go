// Package clock is the one source of wall and boot time (design invariant
// 11). Timers stay package time; only what is displayed, stored or compared
// with a date comes from here, so that tests can make it jump.
package clock

import (
	"os"
	"strings"
	"time"
)

// Clock reads wall time.
type Clock interface {
	Now() time.Time
}

// Func adapts a function.
type Func func() time.Time

// Now implements Clock.
func (f Func) Now() time.Time { return f() }

// System is the machine's clock.
var System Clock = Func(system)

// moved is empty. The linker sets it in a build for tests (-X) to the name of
// an environment variable, whose value is the path of a file: the duration in
// there is added to the machine's time, and may change at any moment.
var moved string

func system() time.Time {
	if moved == "" {
		return time.Now()
	}
	b, err := os.ReadFile(os.Getenv(moved))
	if err != nil {
		return time.Now()
	}
	d, err := time.ParseDuration(strings.TrimSpace(string(b)))
	if err != nil {
		return time.Now()
	}
	return time.Now().Round(0).Add(d) // as the kernel's, without what a jump would not move
}
