package volumes

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

func inMemory(path string) bool {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return false
	}
	return int64(st.Type) == unix.TMPFS_MAGIC || int64(st.Type) == unix.RAMFS_MAGIC //nolint:unconvert // differs by architecture
}

// mountMemory mounts a tmpfs; size 0 keeps the kernel's default (half of the
// memory).
func (v *Volumes) mountMemory(path string, size int64) error {
	if !v.root {
		return errors.ErrUnsupported
	}
	opts := "mode=0777"
	if size > 0 {
		opts += fmt.Sprintf(",size=%d", size)
	}
	err := unix.Mount("tmpfs", path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, opts)
	if errors.Is(err, unix.EPERM) {
		return errors.ErrUnsupported
	}
	if err != nil {
		return &os.PathError{Op: "mount tmpfs", Path: path, Err: err}
	}
	return nil
}

func unmount(path string) error { return unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) }
