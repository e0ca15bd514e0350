package cli

import "testing"

func TestCollectorPercent(t *testing.T) {
	last := 100
	for _, tc := range []struct {
		mib  uint64
		want int
	}{{0, 50}, {64, 50}, {176, 43}, {288, 35}, {512, 20}, {1 << 20, 20}} {
		got := collectorPercent(tc.mib << 20)
		if got != tc.want {
			t.Errorf("%d MiB in use: %d, want %d", tc.mib, got, tc.want)
		}
		if got > last {
			t.Errorf("%d MiB in use: more than for less", tc.mib)
		}
		last = got
	}
}
