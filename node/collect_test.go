package node

import "testing"

// TestWhenImagesAreCollected: upstream's thresholds, 85 and 80 percent.
func TestWhenImagesAreCollected(t *testing.T) {
	for _, c := range []struct {
		size, free int64
		high, low  int
		want       int64
	}{
		{1000, 500, 85, 80, 0}, {1000, 151, 85, 80, 0}, {1000, 150, 85, 80, 50}, {1000, 0, 85, 80, 200},
		{1000, 0, 0, 80, 0}, {0, 0, 85, 80, 0},
	} {
		if got := (&DiskFacts{Size: c.size, Free: c.free}).toFree(c.high, c.low); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
	if got := (*DiskFacts)(nil).toFree(85, 80); got != 0 {
		t.Error(got)
	}
}
