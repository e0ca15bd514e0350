package link

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

// maxRedirects bounds the servers that are asked, one after the other,
// without a pause: leadership may move meanwhile.
const maxRedirects = 4

var (
	// errRedirect: the server does not lead and said who does.
	errRedirect = errors.New("link: sent to the server that leads")
	// errNoLeader: the server does not lead and knows nobody who does. It has
	// waited for one already.
	errNoLeader = errors.New("link: no server leads at the moment")
)

// pause is the wait before the next attempt. A server that is silent, or has
// no leader, may be back at any moment, and a new leader counts every node
// dead that has not come after one TTL: so these waits stay below it. What a
// server refused for good is asked rarely.
func pause(err error, try int) time.Duration {
	switch {
	case errors.Is(err, ErrRefused):
		return max(backoff(try, backoffMax), backoffMax/4)
	case permanent(err):
		return backoff(try, backoffMax)
	}
	return backoff(try, backoffNear)
}

// Waits between attempts: full jitter, so that a thousand nodes that lost
// the same server do not come back in step.
const (
	backoffFirst = 500 * time.Millisecond
	backoffMax   = 20 * time.Second
	// backoffNear is the most where a server may be back at any moment.
	backoffNear = 4 * time.Second
)

func backoff(try int, most time.Duration) time.Duration {
	if try < 6 {
		most = min(backoffFirst<<try, most)
	}
	return most/8 + rand.N(most)
}

// jittered is d, give or take a quarter.
func jittered(d time.Duration) time.Duration { return d*3/4 + rand.N(d/2) }

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
