package wasm

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestWhatIsNoModule(t *testing.T) {
	whole, err := os.ReadFile("testdata/print.wasm")
	if err != nil {
		t.Fatal(err)
	}
	file := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join("testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"component":        {[]byte("\x00asm\x0d\x00\x01\x00"), "component (WASI 0.2)"},
		"unknown version":  {[]byte("\x00asm\x02\x00\x00\x00"), "version that is not known"},
		"empty":            {nil, "empty"},
		"zero bytes":       {make([]byte, 4096), "only zero bytes"},
		"ELF":              {[]byte("\x7fELF\x02\x01\x01\x00"), "native Linux program"},
		"gzip":             {[]byte("\x1f\x8b\x08\x00\x00\x00\x00\x00"), "gzip"},
		"HTML":             {[]byte("<!DOCTYPE html>\n<title>404</title>"), "web page"},
		"text format":      {file("print.wat"), ".wat"},
		"text":             {[]byte("#!/bin/sh\necho hi\n"), "this is a text file"},
		"noise":            {[]byte{0xff, 0xfe, 0, 1, 2, 3, 4, 5, 6}, "begins with ff fe"},
		"only the magic":   {whole[:4], "cut off after 4 bytes"},
		"only the header":  {whole[:8], "no _start"},
		"cut in a section": {whole[:len(whole)/2], "cut off"},
		"missing imports":  {file("imports.wasm"), "env.read_sensor, spin.http_send"},
		"library":          {file("library.wasm"), "no _start"},
	} {
		_, err := Inspect(bytes.NewReader(c.data), int64(len(c.data)))
		if !errors.Is(err, ErrInvalidModule) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: more than one line: %v", name, err)
		}
	}
	// A cut between two sections after the code leaves a whole module.
	ends := map[int64]bool{}
	code := false
	for at := int64(8); at < int64(len(whole)); {
		id, _, next, err := section(bytes.NewReader(whole), at, int64(len(whole)))
		if err != nil {
			t.Fatal(err)
		}
		if code = code || id == sectionCode; code {
			ends[next] = true
		}
		at = next
	}
	for i := int64(9); i < int64(len(whole)); i++ {
		if _, err := Inspect(bytes.NewReader(whole[:i]), i); err == nil && !ends[i] {
			t.Errorf("cut at %d of %d was not noticed", i, len(whole))
		}
	}
}

func TestEveryTestModuleIsBuiltFromItsSource(t *testing.T) {
	sources, err := filepath.Glob("testdata/*.wat")
	if err != nil || len(sources) < 10 {
		t.Fatalf("%d sources, %v", len(sources), err)
	}
	for _, s := range sources {
		if _, err := os.Stat(strings.TrimSuffix(s, ".wat") + ".wasm"); err != nil {
			t.Error(err)
		}
	}
}

func FuzzInspect(f *testing.F) {
	modules, err := filepath.Glob("testdata/*.wasm")
	if err != nil {
		f.Fatal(err)
	}
	for _, m := range modules {
		b, err := os.ReadFile(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte("\x00asm\x01\x00\x00\x00\x02\xff\xff\xff\xff\x0f"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := Inspect(bytes.NewReader(b), int64(len(b))); err != nil && !errors.Is(err, ErrInvalidModule) {
			t.Errorf("neither a module nor a named fault: %v", err)
		}
	})
}

func TestWASIFunctionsAreSorted(t *testing.T) {
	if f := WASIFunctions(); len(f) != 46 || !slices.IsSorted(f) {
		t.Errorf("%d functions", len(f))
	}
}
