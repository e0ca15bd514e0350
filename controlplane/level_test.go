package controlplane

import (
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// A level is reached only if every server said that it understands it, and it
// never falls.
func TestDecideLevel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := rapid.Uint32Range(1, 4).Draw(t, "now")
		want := rapid.Uint32Range(0, 5).Draw(t, "want")
		var list []levelReport
		all, least, newest := true, ^uint32(0), uint32(0)
		for range rapid.IntRange(0, 5).Draw(t, "servers") {
			r := levelReport{Name: "s", Level: rapid.Uint32Range(now, 5).Draw(t, "level")}
			if rapid.IntRange(0, 9).Draw(t, "silent") == 0 {
				r.Err, all = errors.New("silent"), false
			}
			least, newest = min(least, r.Level), max(newest, r.Level)
			list = append(list, r)
		}
		to, err := decideLevel(now, want, list)
		if to < now {
			t.Fatalf("from %d to %d", now, to)
		}
		possible := all && len(list) > 0 && ((want == 0 && (least > now || newest == now)) || (want != 0 && want >= now && want <= least))
		if (err == nil) != possible {
			t.Fatalf("%d, want %d, of %+v: %v", now, want, list, err)
		}
		if err != nil && to != now {
			t.Fatalf("%d with %v", to, err)
		}
		if err == nil && (to > least || (want != 0 && to != want) || (want == 0 && to != least)) {
			t.Fatalf("%d, want %d, of %+v: %d", now, want, list, to)
		}
	})
	for _, want := range []uint32{0, 2} { // also where as much as possible would be nothing
		_, err := decideLevel(1, want, []levelReport{{Name: "new", Level: 2}, {Name: "pi-3", Version: "0.1", Level: 1}})
		if err == nil || !strings.Contains(err.Error(), `server pi-3, version "0.1", understands level 1: upgrade it first`) {
			t.Errorf("to %d: %v", want, err)
		}
	}
}
