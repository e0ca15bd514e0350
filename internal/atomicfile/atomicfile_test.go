package atomicfile

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

func TestReadAcceptsOnlyWhatWriteWrote(t *testing.T) {
	p := filepath.Join(t.TempDir(), "f")
	if _, err := Read(p); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("missing file: %v", err)
	}
	for _, data := range [][]byte{nil, []byte("x"), bytes.Repeat([]byte{0}, 5000), []byte("a\n#sha256:b\n")} {
		if err := Write(p, data, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := Read(p)
		if err != nil || !bytes.Equal(got, data) {
			t.Fatalf("read back %d bytes: %v", len(got), err)
		}
		whole, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		for _, cut := range []int{0, 1, len(whole) / 2, len(whole) - 1} {
			if err := os.WriteFile(p, whole[:cut], 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := Read(p); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("cut at %d of %d: %v", cut, len(whole), err)
			}
		}
		if err := os.WriteFile(p, make([]byte, len(whole)), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Read(p); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("NUL-filled: %v", err)
		}
	}
	if entries, _ := os.ReadDir(filepath.Dir(p)); len(entries) != 1 {
		t.Fatalf("temporary files left: %v", entries)
	}
}

// What a killed writer left goes, what is being written stays.
func TestSweep(t *testing.T) {
	dir := t.TempDir()
	left := filepath.Join(dir, ".a.json.tmp123")
	if err := os.WriteFile(left, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := temporary(dir, ".b.json.tmp*")
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteRaw(filepath.Join(dir, "c.json"), []byte("whole"), 0o600); err != nil {
		t.Fatal(err)
	}
	Sweep(dir)
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("left over: %v", err)
	}
	if _, err := os.Stat(f.Name()); err != nil {
		t.Errorf("what is being written: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "c.json")); err != nil || string(b) != "whole" {
		t.Errorf("%s, %v", b, err)
	}
}
