package balance

import (
	"testing"
	"testing/synctest"
	"time"
)

// What is between two requests is told apart from an answer with pauses, from
// one that was not read yet and from one that is due.
func TestOnlyWhatNobodyUsesIsIdle(t *testing.T) {
	type step struct {
		after  time.Duration
		client bool
	}
	asked, answered := step{0, true}, step{0, false}
	for name, c := range map[string]struct {
		steps   []step
		pending time.Duration // so long after the last step
		stays   time.Duration // 0: for an hour at least
	}{
		"nobody spoke":                  {nil, 0, IdleFor},
		"the endpoint greeted":          {[]step{answered}, 0, IdleFor},
		"an answer is due":              {[]step{asked}, 0, 0},
		"between two requests":          {[]step{asked, answered}, 0, AnsweredFor},
		"an answer of several pieces":   {[]step{asked, answered, {3 * time.Second, false}}, 0, AnsweredFor},
		"an answer with long pauses":    {[]step{asked, answered, {30 * time.Second, false}}, 0, time.Minute},
		"asked again after such a one":  {[]step{asked, answered, {30 * time.Second, false}, asked, answered}, 0, AnsweredFor},
		"the client reads nothing":      {[]step{asked, answered}, 40 * time.Second, 40*time.Second + AnsweredFor},
		"the endpoint asks the client":  {[]step{answered, {30 * time.Second, false}}, 0, IdleFor},
		"the answer went round in time": {[]step{asked, {9 * time.Second, false}}, 0, AnsweredFor},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &Backend{conns: map[*Flow]struct{}{}, draining: true}
				f := &Flow{}
				f.Moved.Store(time.Now().UnixNano())
				b.Add(f)
				for _, s := range c.steps {
					time.Sleep(s.after)
					f.Hold(s.client)
					if len(b.Idle(time.Now().Add(time.Hour))) > 0 {
						t.Fatal("with bytes in hand")
					}
					f.Release()
				}
				last := time.Now()
				f.Pending = func() bool { return time.Since(last) < c.pending }
				for time.Since(last) < time.Hour {
					time.Sleep(time.Second)
					if len(b.Idle(time.Now())) > 0 {
						break
					}
				}
				stayed := time.Since(last)
				if c.stays == 0 && stayed < time.Hour || c.stays > 0 && (stayed < c.stays || stayed > c.stays+2*time.Second) {
					t.Errorf("it stayed for %s", stayed)
				}
				b.draining = false
				if len(b.Idle(time.Now().Add(time.Hour))) > 0 {
					t.Error("its endpoint stays")
				}
			})
		})
	}
}
