package feature

import (
	"errors"
	"testing"

	"pgregory.net/rapid"
)

// Two builds either speak at a level that both understand, or one of them is
// named as too old; a build always accepts those of two releases before it.
func TestCommon(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		theirs := rapid.Uint32Range(0, Level+5).Draw(t, "theirs")
		level, err := Common(theirs, "v")
		var old *TooOldError
		switch {
		case theirs < Oldest:
			if !errors.As(err, &old) || old.Level != theirs || old.Needed != Oldest {
				t.Fatalf("level %d: %v", theirs, err)
			}
		case err != nil:
			t.Fatal(err)
		case level > Level || level > theirs || (level != Level && level != theirs):
			t.Fatalf("level %d with one of %d", level, theirs)
		}
	})
	for version, want := range map[string]string{
		"0.1": `version "0.1" is too old: it understands feature level 1, and 2 is needed`,
		"":    "unknown version is too old: it understands feature level 1, and 2 is needed",
	} {
		if got := (&TooOldError{Version: version, Level: 1, Needed: 2}).Error(); got != want {
			t.Errorf("%q: %s", version, got)
		}
	}
	if Oldest > 1 && Level-Oldest != 2 {
		t.Errorf("level %d accepts those from %d on", Level, Oldest)
	}
}
