package clock

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// With most clocks close together, exactly those that are far from them are
// found; whoever is among the many never is.
func TestSkew(t *testing.T) {
	at := time.Date(2027, 3, 1, 0, 0, 0, 0, time.UTC)
	rapid.Check(t, func(t *rapid.T) {
		good := rapid.IntRange(2, 5).Draw(t, "good")
		bad := rapid.IntRange(0, good-1).Draw(t, "bad")
		var clocks []time.Time
		for range good {
			clocks = append(clocks, at.Add(time.Duration(rapid.Int64Range(0, int64(10*time.Second)).Draw(t, "near"))))
		}
		for range bad {
			off := time.Duration(rapid.Int64Range(int64(3*time.Minute), int64(200*365*24*time.Hour)).Draw(t, "off"))
			if rapid.Bool().Draw(t, "behind") {
				off = -off
			}
			clocks = append(clocks, at.Add(off))
		}
		for i, own := range clocks {
			var others []time.Time
			for j, c := range clocks {
				if j != i {
					others = append(others, c)
				}
			}
			err := Skew(own, others)
			var se *SkewError
			if (err != nil) != (i >= good) || (err != nil && !errors.As(err, &se)) {
				t.Fatalf("clock %d of %v: %v", i, clocks, err)
			}
		}
	})
	if err := Skew(at, nil); err != nil {
		t.Errorf("alone: %v", err)
	}
	if err := Skew(at, []time.Time{at.Add(2 * 365 * 24 * time.Hour)}); err == nil {
		t.Error("of two that differ by years neither may be believed")
	}
}
