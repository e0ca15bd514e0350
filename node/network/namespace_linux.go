package network

import (
	"errors"
	"fmt"
	"os"
	"runtime"

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
		err := shareNamed()
		var ns netns.NsHandle
		if err == nil {
			ns, err = netns.NewNamed(name)
		}
		if err == nil {
			err = ns.Close()
		}
		if err != nil {
			err = fmt.Errorf("create network namespace %s: %w", name, err)
		}
		done <- err
	}()
	return <-done
}

// shareNamed makes the folder of named namespaces a shared mount of its own,
// as iproute2 does before it adds one. If we left that to a later 'ip netns
// add', it would mount the folder over the namespaces that are there already,
// and those could not be removed any more.
func shareNamed() error {
	const dir = "/run/netns"
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	lock, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", dir, err)
	}
	share := func() error { return unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, "") }
	if err := share(); !errors.Is(err, unix.EINVAL) {
		return err
	}
	if err := unix.Mount(dir, dir, "none", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s on itself: %w", dir, err)
	}
	return share()
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
