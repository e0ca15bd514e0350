package oci

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/images"
)

// TestOverlayOnOverlay: a state folder on an overlayfs, as in a container, is
// named as the reason.
func TestOverlayOnOverlay(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root (CI runs it as root)")
	}
	dir := t.TempDir()
	mount := func(source, to, kind, options string) {
		t.Helper()
		if err := unix.Mount(source, to, kind, 0, options); err != nil {
			t.Skipf("SKIPPED: no %s here: %v", kind, err)
		}
		t.Cleanup(func() { _ = unix.Unmount(to, unix.MNT_DETACH) })
	}
	mount("tmpfs", dir, "tmpfs", "size=4m")
	var errs []error
	for _, d := range []string{"lower", "upper", "work", "merged", "layers/0", "run"} {
		errs = append(errs, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	merged := filepath.Join(dir, "merged")
	mount("overlay", merged, "overlay", "lowerdir="+filepath.Join(dir, "lower")+",upperdir="+filepath.Join(dir, "upper")+",workdir="+filepath.Join(dir, "work"))
	err := mountRootfs(filepath.Join(dir, "run"), filepath.Join(merged, "state"), &images.Image{LayerDir: filepath.Join(dir, "layers"), Layers: []string{"0"}})
	if err == nil {
		t.Cleanup(func() { _ = unmountRootfs(filepath.Join(dir, "run")) })
		t.Skip("SKIPPED: this kernel takes an overlay on an overlay")
	}
	if !strings.Contains(err.Error(), "move the agent's --state-dir") {
		t.Fatal(err)
	}
}
