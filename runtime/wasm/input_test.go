package wasm

import (
	"io"
	"strings"
	"testing"
)

// TestInput: what is written to a guest's standard input reaches it, from one
// writer after the other; one that leaves ends nothing.
func TestInput(t *testing.T) {
	b := newBench(t)
	s := b.spec("cat", "cat")
	s.Stdin = true
	b.start(s)
	for _, word := range []string{"first", "second"} {
		in, err := b.Input(t.Context(), s.ID)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(in, word+"\n"); err != nil {
			t.Fatal(err)
		}
		_ = in.Close()
		b.says(s, word)
	}
	without := b.spec("sleep", "without")
	b.start(without)
	if _, err := b.Input(t.Context(), without.ID); err == nil || !strings.Contains(err.Error(), "stdin: true") {
		t.Errorf("without an input: %v", err)
	}
}
