package spare

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSpare on a file system that is full but for the reserve.
func TestSpare(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting a small tmpfs needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Skipf("SKIPPED: cannot mount a tmpfs here: %v", err)
	}
	defer func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	}()
	free := func() int64 {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		return int64(st.Bavail) * int64(st.Bsize) //nolint:unconvert // Bsize is smaller on 32-bit machines
	}
	const size = 64 << 10
	Open(filepath.Join(dir, "reserve"), size)
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, free()), 0o600); err != nil {
		t.Fatal(err)
	}
	if n := free(); n != 0 {
		t.Fatalf("%d bytes are free", n)
	}
	f := Open(filepath.Join(dir, "reserve"), size) // the next process
	if !f.Release() || f.Release() {
		t.Fatal("not given back exactly once")
	}
	if n := free(); n != size {
		t.Fatalf("%d bytes came free", n)
	}
	f.Renew() // there is not plenty
	if n := free(); n != size {
		t.Fatalf("taken of little: %d", n)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	before := free()
	f.Renew()
	if n := free(); n != before-size {
		t.Fatalf("%d of %d bytes are free", n, before)
	}
}
