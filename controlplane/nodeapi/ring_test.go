package nodeapi

import (
	"bytes"
	"slices"
	"testing"
	"time"
)

// rings are the keys that members hold after each step, first is primary.
func ringOf(data map[string][]byte) (out []string) {
	for _, name := range []string{ringPrimary, ringNext, ringOld} {
		if k := data[name]; len(k) > 0 {
			out = append(out, string(k))
		}
	}
	return out
}

// TestKeysTakeThreeSteps: all understand the new key, then all use it, then
// nobody understands the one before; between any two steps members that are a
// step apart hold each other's primary key.
func TestKeysTakeThreeSteps(t *testing.T) {
	for _, banned := range []bool{false, true} {
		now := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
		data := map[string][]byte{ringPrimary: []byte("a")}
		if stepRing(data, false, now) != 0 {
			t.Fatal("there is nothing to do")
		}
		beginRing(data, []byte("b"), banned, now)
		want := [][]string{{"a", "b"}, {"b", "a"}, {"b"}}
		began := now
		last := []string{"a"}
		for i, w := range want {
			got := ringOf(data)
			if !slices.Equal(got, w) {
				t.Fatalf("banned %v, step %d: keys %v, want %v", banned, i, got, w)
			}
			if !slices.Contains(got, last[0]) || !slices.Contains(last, got[0]) {
				t.Fatalf("banned %v, step %d: members with %v and %v do not understand each other", banned, i, last, got)
			}
			last = got
			wait := stepRing(data, false, now)
			if i == len(want)-1 {
				if wait != 0 || len(data[ringBanned]) > 0 {
					t.Fatalf("banned %v: it goes on: %v %v", banned, wait, data)
				}
				break
			}
			if early := ringOf(data); wait < ringStep || !slices.Equal(early, got) {
				t.Fatalf("banned %v, step %d: wait %s, keys already %v", banned, i, wait, early)
			}
			now = now.Add(wait)
			stepRing(data, false, now)
		}
		if took := now.Sub(began); banned && took > 3*ringStep || !banned && took < ringOverlap {
			t.Errorf("banned %v: took %s", banned, took)
		}
	}
}

// TestKeyOfABannedNodeIsNeverUsed: a node is revoked while a rotation is under
// way whose next key it has been given already.
func TestKeyOfABannedNodeIsNeverUsed(t *testing.T) {
	start := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	for after := range 4 { // steps of the first rotation
		now := start
		data := map[string][]byte{ringPrimary: []byte("a")}
		beginRing(data, []byte("b"), false, now)
		for range after {
			now = now.Add(stepRing(data, false, now))
			stepRing(data, false, now)
		}
		beginRing(data, []byte("c"), true, now)
		for range 5 {
			now = now.Add(stepRing(data, false, now))
			stepRing(data, false, now)
		}
		if got := ringOf(data); !slices.Equal(got, []string{"c"}) {
			t.Errorf("revoked after %d steps: keys %v", after, got)
		}
	}
}

// TestKeysWithAWrongClock: a step that another clock dated into the future is
// due, and what cannot be read is, too.
func TestKeysWithAWrongClock(t *testing.T) {
	now := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
	for _, at := range []string{now.AddDate(2, 0, 0).Format(time.RFC3339), "", "junk"} {
		data := map[string][]byte{ringPrimary: []byte("a"), ringNext: []byte("b"), ringRotated: []byte(at)}
		stepRing(data, false, now)
		if !bytes.Equal(data[ringPrimary], []byte("b")) {
			t.Errorf("dated %q: %q is still primary", at, data[ringPrimary])
		}
	}
}

// TestAStepWaitsForNodesThatLackIt: but not for ever, and not long where
// somebody is to be kept out.
func TestAStepWaitsForNodesThatLackIt(t *testing.T) {
	for _, banned := range []bool{false, true} {
		now := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
		data := map[string][]byte{ringPrimary: []byte("a")}
		beginRing(data, []byte("b"), banned, now)
		began := now
		for slices.Equal(ringOf(data), []string{"a", "b"}) {
			wait := stepRing(data, true, now)
			if wait <= 0 || now.Sub(began) > time.Hour {
				t.Fatalf("banned %v: never used: wait %s after %s", banned, wait, now.Sub(began))
			}
			now = now.Add(wait)
		}
		limit := map[bool]time.Duration{false: ringPatience, true: ringBannedPatience}[banned]
		if took := now.Sub(began); took < limit || took > limit+2*ringStep+ringOverlap {
			t.Errorf("banned %v: a node that lacks the key held it up for %s, not %s", banned, took, limit)
		}
	}
}
