package client

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestLockedKubeconfig: one that this user may not read is not one that is
// not there.
func TestLockedKubeconfig(t *testing.T) {
	dir := t.TempDir()
	locked := filepath.Join(dir, "etc")
	if err := os.Mkdir(locked, 0); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", "")
	t.Setenv("HOME", dir)
	if os.Geteuid() == 0 { // root may look everywhere
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Seteuid(65534); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := syscall.Seteuid(0); err != nil {
				t.Fatal(err)
			}
		}()
	}
	_, err := Load("", locked)
	if !errors.Is(err, os.ErrPermission) || !strings.Contains(err.Error(), filepath.Join(locked, AdminFile)) || !strings.Contains(err.Error(), "sudo") {
		t.Errorf("%v", err)
	}
}
