package clock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Elapsed is the time since boot; it runs on while the machine sleeps, and
// no time service sets it.
func Elapsed() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return time.Since(began)
	}
	return time.Duration(ts.Nano())
}

// began is only the origin of what Elapsed falls back to.
var began = time.Now()
