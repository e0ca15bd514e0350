package clock

import (
	"fmt"
	"slices"
	"time"
)

// SkewLimit is how far a clock may be from what most others show.
const SkewLimit = time.Minute

// SkewError says that a clock shows another time than most others.
type SkewError struct {
	By     time.Duration // ahead is positive
	Others int           // how many were asked
}

// Error implements error.
func (e *SkewError) Error() string {
	way := "ahead of"
	if e.By < 0 {
		way = "behind"
	}
	return fmt.Sprintf("this server's clock is %s %s the median of the %d servers that vote (check the time service)", e.By.Abs().Round(time.Second), way, e.Others+1)
}

// Offset is how far own is from the median of own and the others. Of an even
// number of clocks the median is the middle between the two inner ones: of two
// that differ nobody can say which one is right, so half of the difference
// counts for each.
func Offset(own time.Time, others []time.Time) time.Duration {
	diffs := []time.Duration{0}
	for _, t := range others {
		diffs = append(diffs, t.Round(0).Sub(own.Round(0)))
	}
	slices.Sort(diffs)
	n := len(diffs)
	if n%2 == 1 {
		return -diffs[n/2]
	}
	return -(diffs[n/2-1]/2 + diffs[n/2]/2)
}

// Skew returns a *SkewError if own is too far from the median.
func Skew(own time.Time, others []time.Time) error {
	if off := Offset(own, others); off.Abs() > SkewLimit {
		return &SkewError{By: off, Others: len(others)}
	}
	return nil
}
