package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/images"
)

// sessionOfItsOwn keeps signals of the agent's terminal away.
func sessionOfItsOwn() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }

// mountRootfs lays a layer of the container's own over the image's. The mount
// point is in the run folder, what the container writes in upper. It is
// idempotent.
func mountRootfs(dir, upper string, img *images.Image) error {
	target := filepath.Join(dir, rootfsDir)
	if mounted(target) {
		return nil
	}
	if len(img.Layers) == 0 {
		return errors.New("the image has no layers")
	}
	for _, d := range []string{target, filepath.Join(upper, "upper"), filepath.Join(upper, "work")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return fmt.Errorf("root file system: %w", err)
		}
	}
	// Who may enter the root folder is the image's word.
	st, err := os.Stat(filepath.Join(img.LayerDir, img.Layers[0]))
	if err != nil {
		return fmt.Errorf("layer: %w", err)
	}
	if err := os.Chmod(filepath.Join(upper, "upper"), st.Mode().Perm()); err != nil {
		return fmt.Errorf("root file system: %w", err)
	}
	// Mount options are one page at most, and an image may have 127 layers:
	// they are named from inside their folder.
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", strings.Join(img.Layers, ":"), filepath.Join(upper, "upper"), filepath.Join(upper, "work"))
	err = images.InFolder(img.LayerDir, func() error { return unix.Mount("overlay", target, "overlay", 0, options) })
	if err != nil {
		var st unix.Statfs_t
		if errors.Is(err, unix.EINVAL) && unix.Statfs(upper, &st) == nil && st.Type == unix.OVERLAYFS_SUPER_MAGIC {
			return fmt.Errorf("root file system: %s is on an overlayfs itself (inside a container?), which the kernel does not take below another: move the agent's --state-dir to another file system, such as a volume: %w", upper, err)
		}
		return fmt.Errorf("mount overlay of %d layers at %s: %w", len(img.Layers), target, err)
	}
	if err := writable(target, filepath.Join(upper, "work")); err != nil {
		return errors.Join(err, unmountRootfs(dir))
	}
	return nil
}

// writable: overlayfs that cannot make its folder in the work folder, as on a
// full disk, tells the kernel's log, and mounts read-only.
func writable(target, work string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(target, &st); err != nil || st.Flags&unix.ST_RDONLY == 0 {
		return err
	}
	probe := filepath.Join(work, "probe")
	err := os.Mkdir(probe, 0o700)
	if err == nil {
		err = errors.Join(errors.New("the kernel mounted it read-only (its log says why)"), os.Remove(probe))
	}
	return fmt.Errorf("root file system: %w", err)
}

// mounted says whether something is mounted on a folder.
func mounted(p string) bool {
	var a, b unix.Stat_t
	return unix.Lstat(p, &a) == nil && unix.Lstat(filepath.Dir(p), &b) == nil && a.Dev != b.Dev
}

// unmountRootfs undoes mountRootfs, but for what the container wrote.
func unmountRootfs(dir string) error {
	p := filepath.Join(dir, rootfsDir)
	for mounted(p) {
		if err := unix.Unmount(p, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", p, err)
		}
	}
	return nil
}
