package attempt

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestFirst(t *testing.T) {
	errNo := errors.New("no")
	// What a target does: answers after a time, with or without an error; 0 is
	// never.
	type behaviour struct {
		after time.Duration
		err   error
	}
	for name, c := range map[string]struct {
		order []string
		does  map[string]behaviour
		want  string
		took  time.Duration
		err   error
	}{
		"none":                    {err: ErrNone},
		"the first":               {order: []string{"a", "b"}, does: map[string]behaviour{"a": {after: 10}}, want: "a", took: 10},
		"a silent one":            {order: []string{"a", "b"}, does: map[string]behaviour{"a": {}, "b": {after: 10}}, want: "b", took: 110},
		"two silent ones":         {order: []string{"a", "b", "c"}, does: map[string]behaviour{"a": {}, "b": {}, "c": {after: 10}}, want: "c", took: 210},
		"a refusal is not waited": {order: []string{"a", "b"}, does: map[string]behaviour{"a": {after: 1, err: errNo}, "b": {after: 5}}, want: "b", took: 6},
		"the slow one wins":       {order: []string{"a", "b"}, does: map[string]behaviour{"a": {after: 130}, "b": {after: 50}}, want: "a", took: 130},
		"all refuse":              {order: []string{"a", "b"}, does: map[string]behaviour{"a": {after: 1, err: errNo}, "b": {after: 1, err: errNo}}, err: errNo, took: 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				got, err := First(t.Context(), 100, c.order, func(ctx context.Context, s string) (string, error) {
					b := c.does[s]
					if b.after == 0 {
						<-ctx.Done()
						return "", ctx.Err()
					}
					select {
					case <-time.After(b.after):
						return s, b.err
					case <-ctx.Done():
						return "", ctx.Err()
					}
				}, nil)
				if got != c.want || !errors.Is(err, c.err) || time.Since(start) != c.took {
					t.Errorf("%q %v after %d", got, err, time.Since(start))
				}
			})
		})
	}
}

// What comes too late is given back, and nothing runs on.
func TestFirstDiscards(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var late []string
		got, err := First(t.Context(), 1, []string{"a", "b"}, func(context.Context, string) (string, error) {
			time.Sleep(10 * time.Nanosecond)
			return "x", nil // does not look at its context
		}, func(s string) { late = append(late, s) })
		if got != "x" || err != nil || len(late) != 1 {
			t.Errorf("%q %v, late %v", got, err, late)
		}
	})
}
