package install

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFoldersThatAreMountPoints: a disk that is mounted at a folder of Dunlin's
// is emptied and stays mounted; what is mounted below is named and left alone.
func TestFoldersThatAreMountPoints(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root")
	}
	p := Paths{Root: filepath.Join(t.TempDir(), "a b")} // the kernel writes the space in its own way
	put := func(files ...string) {
		t.Helper()
		for _, f := range files {
			if err := errors.Join(os.MkdirAll(filepath.Dir(f), 0o700), os.WriteFile(f, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
	}
	mount := func(dir string) {
		t.Helper()
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
			t.Skipf("SKIPPED: no mounts here: %v", err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	}
	mount(p.State())
	mount(p.Run())
	put(p.ConfigFile(), filepath.Join(p.State(), "server/pki/ca.key"), filepath.Join(p.Run(), "agent.sock"))
	if err := os.Mkdir(filepath.Join(p.State(), "lost+found"), 0o700); err != nil {
		t.Fatal(err)
	}
	below := filepath.Join(p.State(), "volumes/x")
	mount(below)
	put(filepath.Join(below, "somebody's"))
	if _, err := Remove(p, false); err == nil || !strings.Contains(err.Error(), below+" is still mounted") || !there(p.ConfigFile()) || !there(filepath.Join(below, "somebody's")) {
		t.Fatalf("with something mounted below: %v, %v", err, tree(t, p.Root))
	}
	if err := unix.Unmount(below, 0); err != nil {
		t.Fatal(err)
	}
	if !Present(p, false) {
		t.Error("nothing is found")
	}
	did, err := Remove(p, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{p.State(), p.Run()} {
		if self, _ := mounts(dir); !self || len(contents(dir)) > 0 {
			t.Errorf("%s: mounted %v, holds %v", dir, self, contents(dir))
		}
		if dir == p.State() && !slices.Contains(did, "emptied  "+dir+" (a mount point, which stays)") {
			t.Errorf("it said %q", did)
		}
	}
	if there(p.ConfigFile()) || Present(p, false) {
		t.Errorf("left: %v", tree(t, p.Root))
	}
}
