package balance

import (
	"sync/atomic"
	"time"
)

// health is what is known of an endpoint that could not be reached. It is the
// last choice for a while, and then one connection tries it: the others come
// back once that has reached it, since an endpoint to which nothing leads has
// the fewest connections of all, and would get every new one.
type health struct {
	until   atomic.Int64 // Unix nanoseconds until which it is the last choice
	strikes atomic.Int32 // how often in a row; 0 is healthy
	trial   atomic.Bool  // the one that tries it is under way
}

// FailedFor is how long an endpoint that could not be reached is the last
// choice, the first time; each time in a row doubles it, up to failedMost.
const (
	FailedFor  = 5 * time.Second
	failedMost = time.Minute
)

// Fail says that it could not be reached.
func (h *health) Fail(now time.Time) {
	if h.until.Load() > now.UnixNano() && !h.trial.Swap(false) {
		return // one of many that failed together
	}
	h.trial.Store(false)
	n := min(h.strikes.Add(1), 8) // 2^7 times 5 s is above the most
	h.until.Store(now.Add(min(FailedFor<<(n-1), failedMost)).UnixNano())
}

// Reached says that it was reached.
func (h *health) Reached() {
	if h.strikes.Load() == 0 {
		return
	}
	h.strikes.Store(0)
	h.trial.Store(false)
	h.until.Store(0)
}

// picked: a connection is to go there. Of an endpoint that failed it is the one
// that tries it.
func (h *health) picked(now time.Time) {
	if h.strikes.Load() > 0 && h.until.Load() <= now.UnixNano() {
		h.trial.Store(true)
		h.until.Store(now.Add(FailedFor).UnixNano())
	}
}
