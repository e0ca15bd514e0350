package volumes

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

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

// unmountAll takes down all that is mounted in a folder, however deep: a
// container with mount propagation leaves mounts of its own in its volumes.
// Without an error nothing is mounted there any more.
func (v *Volumes) unmountAll(dir string) error {
	points, err := mountsIn(dir)
	if err != nil || len(points) == 0 {
		return err
	}
	for _, p := range slices.Backward(points) {
		if err := v.unmount(p); err != nil {
			return fmt.Errorf("unmount %s: %w", p, err)
		}
	}
	if points, err = mountsIn(dir); err == nil && len(points) > 0 {
		err = fmt.Errorf("%s is mounted still", points[len(points)-1])
	}
	return err
}

// mountsIn are the mount points below a folder, in the order of their mounting.
func mountsIn(dir string) ([]string, error) {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("mounts: %w", err)
	}
	var out []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 {
			if at := unescape(f[4]); strings.HasPrefix(at, dir+"/") {
				out = append(out, at)
			}
		}
	}
	return out, nil
}

// unescape undoes proc_pid_mountinfo(5)'s way to write spaces and their like.
func unescape(s string) string {
	var out strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+4 <= len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				out.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		out.WriteByte(s[i])
	}
	return out.String()
}
