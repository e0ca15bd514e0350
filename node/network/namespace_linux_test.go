package network

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// TestNamedFolderIsLeftAsItWas: the mount that named namespaces need is there
// while there are any, and goes with the last; a mount of another's stays.
func TestNamedFolderIsLeftAsItWas(t *testing.T) {
	if err := Usable(); err != nil {
		t.Skipf("SKIPPED, needs root and network namespaces (CI runs it as root): %v", err)
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends, and its mounts with it
		done <- inOwnMounts(func() error {
			unlock, err := lockNamed()
			if err != nil {
				return err
			}
			err = shareNamed()
			unlock()
			if err != nil {
				return err
			}
			other := filepath.Join(namedDir, "other")
			if err := os.WriteFile(other, nil, 0o600); err != nil {
				return err
			}
			if err := unshareNamed(); err != nil {
				return err
			}
			if _, err := os.Stat(other); err != nil {
				return fmt.Errorf("another's namespace: %w", err)
			}
			if err := os.Remove(other); err != nil {
				return err
			}
			if err := unshareNamed(); err != nil {
				return err
			}
			if _, err := os.Stat(namedDir); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("the folder is left: %w", err)
			}
			if err := os.Mkdir(namedDir, 0o755); err != nil {
				return err
			}
			if err := unix.Mount("x", namedDir, "tmpfs", 0, ""); err != nil {
				return err
			}
			if err := unshareNamed(); err != nil {
				return err
			}
			if _, err := os.Stat(namedDir); err != nil {
				return fmt.Errorf("another's mount: %w", err)
			}
			return nil
		})
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// inOwnMounts leaves the thread in a mount namespace of its own, with an empty
// /run.
func inOwnMounts(f func() error) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("run", "/run", "tmpfs", 0, ""); err != nil {
		return err
	}
	return f()
}
