package network

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// createNamed makes the namespace without leaving the calling goroutine's
// thread in it: the thread that enters it ends.
func createNamed(name string) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread
		unlock, err := lockNamed()
		if err == nil {
			if err = shareNamed(); err == nil {
				err = newNamed(name)
			}
			unlock()
		}
		if err != nil {
			err = fmt.Errorf("create network namespace %s: %w", name, err)
		}
		done <- err
	}()
	return <-done
}

func newNamed(name string) error {
	ns, err := netns.NewNamed(name)
	if err != nil {
		return err
	}
	return ns.Close()
}

// namedDir is where named network namespaces are (ip-netns(8)).
const namedDir = "/run/netns"

// lockNamed makes the folder of named namespaces and takes the lock that
// iproute2 also takes while it mounts there.
func lockNamed() (unlock func(), err error) {
	for {
		if err := os.MkdirAll(namedDir, 0o755); err != nil {
			return nil, err
		}
		lock, err := os.Open(namedDir)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
			_ = lock.Close()
			return nil, fmt.Errorf("lock %s: %w", namedDir, err)
		}
		held, err := lock.Stat()
		now, serr := os.Stat(namedDir)
		if err == nil && serr == nil && os.SameFile(held, now) {
			return func() { _ = lock.Close() }, nil
		}
		_ = lock.Close() // another one removed it meanwhile
		if err != nil || (serr != nil && !errors.Is(serr, fs.ErrNotExist)) {
			return nil, errors.Join(err, serr)
		}
	}
}

// shareNamed makes the folder of named namespaces a shared mount of its own,
// as iproute2 does before it adds one. If we left that to a later 'ip netns
// add', it would mount the folder over the namespaces that are there already,
// and those could not be removed any more.
func shareNamed() error {
	share := func() error { return unix.Mount("", namedDir, "none", unix.MS_SHARED|unix.MS_REC, "") }
	if err := share(); !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Mount(namedDir, namedDir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s on itself: %w", namedDir, err)
	}
	return share()
}

// unshareNamed undoes that once no namespace is left in the folder; whoever
// adds one later mounts it again.
func unshareNamed() error {
	if _, err := os.Stat(namedDir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	unlock, err := lockNamed()
	if err != nil {
		return err
	}
	defer unlock()
	left, err := os.ReadDir(namedDir)
	if err != nil || len(left) > 0 {
		return err
	}
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		return fmt.Errorf("read mounts: %w", err)
	}
	if !mountedOnItself(string(mounts), namedDir) {
		return nil
	}
	// Detached, since the lock is a file of the mount.
	err = unix.Unmount(namedDir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EINVAL) {
		return nil // the mount that is listed lies hidden below another one on /run
	}
	if err != nil {
		return fmt.Errorf("unmount %s: %w", namedDir, err)
	}
	_ = os.Remove(namedDir) // not empty: somebody put files below the mount
	return nil
}

// mountedOnItself says whether the top mount of a folder is the folder itself:
// its root in its filesystem is then a folder of that name, not the whole
// (proc_pid_mountinfo(5)).
func mountedOnItself(mountinfo, dir string) (own bool) {
	for line := range strings.Lines(mountinfo) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == dir {
			own = filepath.Base(f[3]) == filepath.Base(dir)
		}
	}
	return own
}

// within runs f on a thread inside a namespace.
func within(path string, f func() error) error {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", path, err)
	}
	defer func() { _ = ns.Close() }()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			done <- fmt.Errorf("read own network namespace: %w", err)
			return
		}
		defer func() { _ = home.Close() }()
		if err := netns.Set(ns); err != nil {
			done <- fmt.Errorf("enter network namespace %s: %w", path, err)
			return
		}
		err = f()
		if netns.Set(home) == nil {
			runtime.UnlockOSThread() // else the thread ends with the goroutine
		}
		done <- err
	}()
	return <-done
}

// Usable says whether this process may make network namespaces and join
// them to the host, and if not why. It tries, in a namespace that is gone
// with the answer: a kernel may lack the veth module.
func Usable() error {
	if os.Geteuid() != 0 {
		return errors.New("not root")
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends
		done <- tryNamespace()
	}()
	return <-done
}

// tryNamespace leaves its thread in a new namespace.
func tryNamespace() error {
	ns, err := netns.New()
	if err != nil {
		return fmt.Errorf("cannot make a network namespace: %w", err)
	}
	defer func() { _ = ns.Close() }()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("cannot configure a network namespace: %w", err)
	}
	defer h.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "try0"
	if err := h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "try1"}); err != nil {
		return fmt.Errorf("cannot make a veth pair (is the kernel module veth there?): %w", err)
	}
	return nil
}
