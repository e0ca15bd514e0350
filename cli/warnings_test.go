package cli

import (
	"bytes"
	"testing"
)

// A command that asks again and again says a warning once.
func TestWarningsAreSaidOnce(t *testing.T) {
	newWorld(t)
	var b bytes.Buffer
	c, err := (&app{errw: &b}).client()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"old", "old", "other", "old"} {
		c.Warn(s)
	}
	if got := b.String(); got != "Warning: old\nWarning: other\n" {
		t.Errorf("%q", got)
	}
}
