package cronjob

import (
	"fmt"
	"time"

	batchv1 "k8s.io/api/batch/v1"

	"github.com/robfig/cron/v3"

	"github.com/dunlin-project/dunlin/manifests"
)

// calendar gives the nominal times of a schedule in its zone.
//
// Where clocks change, a schedule that names hours runs once for each time
// that it names: a time that does not exist that day runs at the end of the
// gap, one that exists twice runs the first time. A schedule of every hour
// runs by elapsed time, so also in the repeated hour.
type calendar struct {
	schedule cron.Schedule
	zone     *time.Location
	// civil, if not nil, counts in local times, written as if they were UTC.
	civil *cron.SpecSchedule
	every time.Duration // of @every
}

// anyHour is the mark of a field "*" in robfig's bit sets.
const anyHour = uint64(1) << 63

func newCalendar(c *batchv1.CronJob) (calendar, error) {
	zone, err := manifests.LoadZone(c.Spec.TimeZone)
	if err != nil {
		return calendar{}, fmt.Errorf("invalid timeZone: %w", err)
	}
	s, err := manifests.ParseSchedule(c.Spec.Schedule)
	if err != nil {
		return calendar{}, fmt.Errorf("unparseable schedule: %q : %w", c.Spec.Schedule, err)
	}
	cal := calendar{schedule: s, zone: zone}
	switch s := s.(type) {
	case cron.ConstantDelaySchedule:
		cal.every = s.Delay
	case *cron.SpecSchedule:
		in := *s
		if in.Hour&anyHour != 0 {
			in.Location = zone
			cal.schedule = &in
		} else {
			in.Location = time.UTC
			cal.civil = &in
		}
	}
	return cal, nil
}

// next is the first nominal time after t; zero if there is none (a 31st of
// February).
func (c calendar) next(t time.Time) time.Time {
	if c.civil == nil {
		return c.schedule.Next(t.In(c.zone)).UTC()
	}
	local := asUTC(t.In(c.zone))
	for range 10_000 { // more than can lie in a repeated or missing stretch
		if local = c.civil.Next(local); local.IsZero() {
			return time.Time{}
		}
		if at := c.first(local); at.After(t) {
			return at.UTC()
		}
	}
	return time.Time{}
}

// upcoming is the first nominal time after now, when runs are counted from
// after. Those of @every have no other anchor: counted from now, each look at
// the object would put the next one off.
func (c calendar) upcoming(after, now time.Time) time.Time {
	if c.every > 0 {
		return after.Add((max(now.Sub(after)/c.every, 0) + 1) * c.every).Truncate(time.Second)
	}
	return c.next(later(after, now))
}

// asUTC writes a local time as if it were UTC.
func asUTC(t time.Time) time.Time {
	return time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), t.Second(), 0, time.UTC)
}

// first is the first instant at which clocks in the zone show the local time,
// or the end of the gap that it falls into.
func (c calendar) first(local time.Time) time.Time {
	at := time.Date(local.Year(), local.Month(), local.Day(), local.Hour(), local.Minute(), local.Second(), 0, c.zone)
	start, end := at.ZoneBounds()
	if !asUTC(at).Equal(local) { // a gap: at lies on either side of the change
		if !start.IsZero() && at.Sub(start) < 24*time.Hour {
			return start
		}
		return end
	}
	if start.IsZero() || at.Sub(start) > 24*time.Hour {
		return at
	}
	_, before := start.Add(-time.Second).Zone()
	if earlier := local.Add(-time.Duration(before) * time.Second); earlier.Before(start) {
		return earlier.In(c.zone)
	}
	return at
}

// looks are how far back the last nominal time is looked for: the nearest
// that has one, so that a long outage of a schedule of every minute costs no
// more than a short one.
var looks = []time.Duration{time.Hour, 24 * time.Hour, 32 * 24 * time.Hour, 367 * 24 * time.Hour, 9 * 367 * 24 * time.Hour}

// last is the latest nominal time in (after, now]; zero if there is none.
func (c calendar) last(after, now time.Time) time.Time {
	if c.every > 0 {
		if n := now.Sub(after) / c.every; n > 0 {
			return after.Add(n * c.every).Truncate(time.Second)
		}
		return time.Time{}
	}
	for _, back := range looks {
		from, all := now.Add(-back), false
		if !from.After(after) {
			from, all = after, true
		}
		var found time.Time
		for t := c.next(from); !t.IsZero() && !t.After(now); t = c.next(t) {
			found = t
		}
		if !found.IsZero() || all {
			return found
		}
	}
	return time.Time{}
}
