package cronjob

import (
	"time"

	batchv1 "k8s.io/api/batch/v1"
)

// maxAhead is how far in the future a stamp may lie and still be waited for:
// a clock that was put back runs nothing twice. A stamp beyond that was
// written under a clock that was plainly wrong, and counts as now.
const maxAhead = 25 * time.Hour

// decision about one look at a CronJob.
type decision struct {
	// start is the nominal time to start now; zero for none.
	start time.Time
	// missed is a nominal time that is too late to start.
	missed time.Time
	// blocked is a nominal time that waits for a Job that still runs.
	blocked time.Time
	// replace: the Jobs that still run go first.
	replace bool
	// crowded: times are left out, as a Job of their minute was started.
	crowded bool
	// next nominal time that may be started; zero if there is none.
	next time.Time
}

// stamp is the time after which a run may be due: that of the last run, or of
// the creation.
func stamp(c *batchv1.CronJob) time.Time {
	if last := c.Status.LastScheduleTime; last != nil {
		return last.Time
	}
	return c.CreationTimestamp.Time
}

// decide is pure. running counts the Jobs that were started and are not over;
// since is when a stamp far ahead was first seen.
func decide(c *batchv1.CronJob, cal calendar, running int, since, now time.Time) decision {
	after := stamp(c)
	if after.Sub(now) > maxAhead {
		after = since
	}
	d := decision{next: cal.upcoming(after, now)}
	due := cal.last(after, now)
	if last := c.Status.LastScheduleTime; last != nil {
		// A minute has one Job, whose name is made of it: its other times are
		// not even stamped, or each second would cost a write.
		d.skipMinute(cal, after, now, last.Time)
		if !due.IsZero() && minute(due) == minute(last.Time) {
			d.crowded, due = true, time.Time{}
		}
	}
	if due.IsZero() {
		return d
	}
	if s := c.Spec.StartingDeadlineSeconds; s != nil && now.Sub(due) > time.Duration(*s)*time.Second {
		d.missed = due
		return d
	}
	if running > 0 {
		switch c.Spec.ConcurrencyPolicy {
		case batchv1.ForbidConcurrent:
			d.blocked = due
			d.skipMinute(cal, after, now, due) // it is told once a minute
			return d
		case batchv1.ReplaceConcurrent:
			d.replace = true
		}
	}
	d.start = due
	return d
}

// skipMinute puts off the next time if it lies in the minute of t.
func (d *decision) skipMinute(cal calendar, after, now, t time.Time) {
	if !d.next.IsZero() && minute(d.next) == minute(t) {
		end := time.Unix((minute(t)+1)*60, 0)
		d.crowded, d.next = true, cal.upcoming(after, later(now, end.Add(-1)))
	}
}

// minute is the number of the minute of t.
func minute(t time.Time) int64 { return t.Unix() / 60 }

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// startCap limits how often one CronJob may start anything, whatever its schedule
// and the clock do.
type startCap struct{ starts []time.Time } // monotonic

const (
	capStarts = 10
	capWindow = 5 * time.Minute
)

// wait until one more start is allowed; 0 if it is now.
func (s *startCap) wait(now time.Time) time.Duration {
	for len(s.starts) > 0 && now.Sub(s.starts[0]) >= capWindow {
		s.starts = s.starts[1:]
	}
	if len(s.starts) < capStarts {
		return 0
	}
	return capWindow - now.Sub(s.starts[0])
}

func (s *startCap) note(now time.Time) { s.starts = append(s.starts, now) }

// surplus are the finished Jobs beyond the history limits, oldest first.
func surplus(jobs []*batchv1.Job, limit *int32) []*batchv1.Job {
	if limit == nil || len(jobs) <= int(*limit) {
		return nil
	}
	return jobs[:len(jobs)-int(*limit)]
}
