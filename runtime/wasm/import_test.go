package wasm

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// doesNotCompile has whole sections and a function that adds nothing to
// nothing.
var doesNotCompile = []byte("\x00asm\x01\x00\x00\x00" + // header
	"\x01\x04\x01\x60\x00\x00" + // a type: () -> ()
	"\x03\x02\x01\x00" + // a function of it
	"\x07\x0a\x01\x06_start\x00\x00" + // its export
	"\x0a\x05\x01\x03\x00\x6a\x0b") // its body: i32.add

func blobs(t *testing.T, b *bench) []string {
	t.Helper()
	list, err := filepath.Glob(filepath.Join(b.Store().blobs(), "*"))
	if err != nil {
		t.Fatal(err)
	}
	hidden, err := filepath.Glob(filepath.Join(b.Store().blobs(), importing))
	if err != nil {
		t.Fatal(err)
	}
	return append(list, hidden...)
}

// A name points at a module only once that is compiled: what fails or is
// interrupted before leaves the old one, and nothing of its own.
func TestNameAfterCompileOnly(t *testing.T) {
	if interpreted() {
		t.Skip("nothing is compiled on this architecture")
	}
	b := newBench(t)
	good, err := b.ImportFile(t.Context(), "app.wasm", "testdata/print.wasm", nil)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "app.wasm")
	copyFile(t, "testdata/print.wasm", file)
	if _, err := b.Prepare(t.Context(), workload.ImageRequest{Image: "file://" + file, Policy: "IfNotPresent"}, nil); err != nil {
		t.Fatal(err)
	}
	before := blobs(t, b)
	same := func(what string) {
		t.Helper()
		for _, image := range []string{"app.wasm", "file://" + file} {
			if st, err := b.Prepare(t.Context(), workload.ImageRequest{Image: image, Policy: "Never"}, nil); err != nil || st.Digest != good.Digest {
				t.Errorf("after %s, %s is %+v, %v; want %s", what, image, st, err, good.Digest)
			}
		}
		if now := blobs(t, b); len(now) != len(before) {
			t.Errorf("after %s there are %v, before %v", what, now, before)
		}
	}

	var se *workload.StartError
	if _, err := b.Import(t.Context(), "app.wasm", "", bytes.NewReader(doesNotCompile), nil); !errors.As(err, &se) || se.Reason != ReasonInvalidModule {
		t.Fatalf("import of a module that does not compile: %v", err)
	}
	same("a module that does not compile")
	if _, err := b.ImportFile(t.Context(), "app.wasm", "testdata/startparam.wasm", nil); !errors.As(err, &se) || se.Reason != ReasonInvalidModule || !strings.Contains(err.Error(), "its _start is (i32) -> (), a program's takes and returns nothing") {
		t.Fatalf("import of a module whose entry point wants a parameter: %v", err)
	}
	same("a module whose entry point wants a parameter")

	if err := os.WriteFile(file, doesNotCompile, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Prepare(t.Context(), workload.ImageRequest{Image: "file://" + file, Policy: "IfNotPresent"}, nil); !errors.As(err, &se) || se.Reason != ReasonInvalidModule {
		t.Fatalf("a file that does not compile: %v", err)
	}
	same("a file that does not compile")

	ctx, cancel := context.WithCancel(t.Context())
	_, err = b.ImportFile(ctx, "app.wasm", "testdata/chello.wasm", func(string) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("an interrupted import: %v", err)
	}
	same("an interrupted import")

	next, err := b.ImportFile(t.Context(), "app.wasm", "testdata/chello.wasm", nil)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := b.Prepare(t.Context(), workload.ImageRequest{Image: "app.wasm", Policy: "Never"}, nil); err != nil || st.Digest != next.Digest {
		t.Fatalf("after a good import: %+v, %v", st, err)
	}
}
