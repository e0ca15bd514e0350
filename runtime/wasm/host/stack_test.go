package host

import (
	"runtime"
	"strings"
	"testing"
)

func TestStackBound(t *testing.T) {
	const mi = 1 << 20
	for _, c := range []struct{ limit, base, initial, want uint64 }{
		{0, 2 * mi, 0, mostStack},
		{16 * mi, 2 * mi, 0, 4 * mi},
		{64 * mi, 2 * mi, 0, 28 * mi},
		{64 * mi, 2 * mi, 40 * mi, 8 * mi},
		{64 * mi, 20 * mi, 0, 20 * mi}, // a module of much code
		{128 * mi, 2 * mi, 100_000, 60*mi - 64<<10},
		{1024 * mi, 2 * mi, 0, mostStack},
		{8 * mi, 2 * mi, 0, leastStack},
		{9 * mi, 2 * mi, 0, leastStack},
		{4 * mi, 20 * mi, 64 * mi, leastStack},
	} {
		if got := stackBound(c.limit, c.base, c.initial); got != c.want {
			t.Errorf("limit %d, host %d, memory %d: %d, want %d", c.limit, c.base, c.initial, got, c.want)
		}
	}
}

// TestStackIsBounded fails where this build of wazero has other fields than
// boundStack knows, or another ceiling.
func TestStackIsBounded(t *testing.T) {
	if runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		t.Skip("SKIPPED: an interpreter bounds the number of calls")
	}
	for _, limit := range []uint64{0, 16 << 20, 128 << 20} {
		r := &memoryRecord{}
		_, o := runGuest(t, "recurse", func(g *Guest) { g.MemoryLimit, g.Record = limit, r })
		want := stackBound(limit, 0, 64<<10)
		if got := r.stack.Load(); got != want {
			t.Errorf("limit %d: the stack is bounded by %d, want %d", limit, got, want)
		}
		if !strings.HasPrefix(o.Trap, "stack overflow: its calls nest deeper than its stack of "+bytesText(want)) || o.ExitCode != trapExitCode {
			t.Errorf("limit %d: %+v", limit, o)
		}
		if names := strings.Contains(o.Trap, "memory limit of "+bytesText(limit)); names != (limit > 0) {
			t.Errorf("limit %d: %q", limit, o.Trap)
		}
	}
}

func TestMemoryUse(t *testing.T) {
	if got := privateBytes("3000 1000 400 1 0 900 0\n"); got == 0 || got%600 != 0 {
		t.Errorf("statm of 600 private pages: %d bytes", got)
	}
	for _, s := range []string{"", "1 2", "3000 400 1000 1", "x y z"} {
		if got := privateBytes(s); got != 0 {
			t.Errorf("statm %q: %d", s, got)
		}
	}
	const mi = 1 << 20
	for _, c := range []struct {
		u        MemoryUse
		overflow bool
		words    string
	}{
		{MemoryUse{64 * mi, 2 * mi, mi, 0}, true, ""},
		{MemoryUse{64 * mi, 2 * mi, mi, 28 * mi}, false, "its call stack 28Mi at most, its host program 2Mi; its tables had the rest"},
		{MemoryUse{64 * mi, 2 * mi, 40 * mi, 28 * mi}, false, "of its limit of 64Mi, its own memory had 40Mi, its call stack 28Mi at most, its host program 2Mi"},
		{MemoryUse{64 * mi, 2 * mi, 40 * mi, 0}, false, "its own memory had 40Mi, its host program 2Mi; its tables had the rest"},
	} {
		if _, ok := c.u.Overflowed(); ok != c.overflow {
			t.Errorf("%+v: overflow %v", c.u, ok)
		}
		if got := c.u.String(); !strings.HasSuffix(got, c.words) {
			t.Errorf("%+v: %q", c.u, got)
		}
	}
}
