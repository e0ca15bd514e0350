package controlplane

import (
	"os"
	"path/filepath"
	"testing"
)

// A key that signs is kept twice; only where both are damaged there is a new
// one, and the caller is told.
func TestDamagedTokenKey(t *testing.T) {
	path := filepath.Join(t.TempDir(), "service-account.key")
	first, damaged, err := loadOrCreateKey(path)
	if err != nil || damaged != "" {
		t.Fatal(damaged, err)
	}
	damage := func(p string) {
		t.Helper()
		if err := os.Truncate(p, 100); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{path, path + ".copy"} {
		damage(p)
		if k, damaged, err := loadOrCreateKey(path); err != nil || damaged != "" || !k.Equal(first) {
			t.Fatalf("%s damaged: another key, %q, %v", p, damaged, err)
		}
	}
	if err := os.Remove(path + ".copy"); err != nil { // as before there was one
		t.Fatal(err)
	}
	if k, _, err := loadOrCreateKey(path); err != nil || !k.Equal(first) {
		t.Fatal(err)
	}
	damage(path)
	damage(path + ".copy")
	second, damaged, err := loadOrCreateKey(path)
	if err != nil || damaged != path+".damaged" || second.Equal(first) {
		t.Fatalf("both damaged: %q, %v", damaged, err)
	}
	if k, damaged, err := loadOrCreateKey(path); err != nil || damaged != "" || !k.Equal(second) {
		t.Fatalf("after that: %q, %v", damaged, err)
	}
}
