package cronjob

import (
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
)

// Both edges, in zones on both sides of UTC.
func TestCalendarWhereClocksChange(t *testing.T) {
	for _, c := range []struct{ name, schedule, zone, from, to, want string }{
		{"a time that does not exist runs at the end of the gap", "30 2 * * *", "Europe/Berlin", "2026-03-28T00:00:00Z", "2026-03-31T00:00:00Z",
			"2026-03-28T01:30:00Z 2026-03-29T01:00:00Z 2026-03-30T00:30:00Z"},
		{"a time that exists twice runs the first time", "30 1 * * *", "America/New_York", "2026-10-31T00:00:00Z", "2026-11-03T00:00:00Z",
			"2026-10-31T05:30:00Z 2026-11-01T05:30:00Z 2026-11-02T06:30:00Z"},
		{"and not there where it exists once", "30 2 * * *", "America/New_York", "2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z", "2026-11-01T07:30:00Z"},
		{"many in the gap are one run", "*/10 2 * * *", "Europe/Berlin", "2026-03-29T00:00:00Z", "2026-03-29T12:00:00Z", "2026-03-29T01:00:00Z"},
		{"every hour runs by elapsed time in spring", "0 * * * *", "Europe/Berlin", "2026-03-28T23:30:00Z", "2026-03-29T03:30:00Z",
			"2026-03-29T00:00:00Z 2026-03-29T01:00:00Z 2026-03-29T02:00:00Z 2026-03-29T03:00:00Z"},
		{"and in autumn", "0 * * * *", "America/New_York", "2026-11-01T04:30:00Z", "2026-11-01T07:30:00Z",
			"2026-11-01T05:00:00Z 2026-11-01T06:00:00Z 2026-11-01T07:00:00Z"},
		{"half an hour of change", "15 2 * * *", "Australia/Lord_Howe", "2026-10-02T00:00:00Z", "2026-10-05T00:00:00Z",
			"2026-10-02T15:45:00Z 2026-10-03T15:30:00Z 2026-10-04T15:15:00Z"},
		{"midnight is the gap", "0 0 * * *", "Africa/Cairo", "2026-04-22T12:00:00Z", "2026-04-25T12:00:00Z",
			"2026-04-22T22:00:00Z 2026-04-23T22:00:00Z 2026-04-24T21:00:00Z"},
		{"UTC unless said otherwise", "0 12 * * *", "", "2026-03-28T00:00:00Z", "2026-03-30T00:00:00Z", "2026-03-28T12:00:00Z 2026-03-29T12:00:00Z"},
		{"never", "0 0 31 2 *", "Europe/Berlin", "2026-03-28T00:00:00Z", "2036-03-28T00:00:00Z", ""},
	} {
		var set []func(*batchv1.CronJob)
		if c.zone != "" {
			set = append(set, zone(c.zone))
		}
		cal := mustCalendar(t, c.schedule, set...)
		var got []string
		end := at(c.to)
		for x := cal.next(at(c.from)); !x.IsZero() && x.Before(end); x = cal.next(x) {
			got = append(got, x.Format(time.RFC3339))
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, s, c.want)
		}
	}
}

// last is what a walk with next comes to, and its cost does not grow with the
// outage.
func TestLast(t *testing.T) {
	for _, schedule := range []string{"* * * * *", "*/7 3 * * *", "0 0 29 2 *", "30 2 * * 0", "@every 90s", "@hourly"} {
		cal := mustCalendar(t, schedule, zone("Europe/Berlin"))
		for _, after := range []time.Time{at("2026-03-28T23:59:00Z"), at("2026-03-01T00:00:00Z"), at("2020-02-28T00:00:00Z")} {
			now := at("2026-03-29T12:34:56Z")
			if strings.HasPrefix(schedule, "@every") {
				now = after.Add(200 * time.Second)
			}
			var want time.Time
			from := after
			if schedule == "* * * * *" && after.Before(at("2026-01-01T00:00:00Z")) {
				from = at("2026-03-29T00:00:00Z") // the walk is what must not be needed
			}
			for x := cal.next(from); !x.IsZero() && !x.After(now); x = cal.next(x) {
				want = x
			}
			if got := cal.last(after, now); !got.Equal(want) {
				t.Errorf("%s after %s: %s, want %s", schedule, after, got, want)
			}
		}
	}
}
