package network

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// heal sees to it that the namespace has its name: somebody may take it away
// (`ip -all netns delete`) while pods and the proxy live on inside.
func (n *Namespaced) heal() error {
	if _, err := os.Stat(n.Path()); err == nil {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.ranges) == 0 {
		return ErrNoRange
	}
	if err := n.ensure(); err != nil {
		return fmt.Errorf("set up network namespace %s: %w", n.name, err)
	}
	return nil
}

// rebind gives a namespace that lost its name the name again, from a process
// that runs in it; the other end of our veth pair tells it from all others.
// False if there is none.
func (n *Namespaced) rebind() (bool, error) {
	host, err := netlink.LinkByName(n.hostLink())
	if err != nil {
		return false, nil //nolint:nilerr // no pair leads anywhere
	}
	holders, err := filepath.Glob("/proc/[0-9]*/ns/net")
	if err != nil {
		return false, err
	}
	seen := map[string]bool{}
	for _, holder := range holders {
		id, err := os.Readlink(holder)
		if err != nil || seen[id] {
			continue // gone by now
		}
		seen[id] = true
		if n.inside(holder, host) {
			return true, bindNamed(holder, n.Path())
		}
	}
	return false, nil
}

// inside says whether a namespace has the other end of our pair.
func (n *Namespaced) inside(at string, host netlink.Link) bool {
	ns, err := netns.GetFromPath(at)
	if err != nil {
		return false
	}
	defer func() { _ = ns.Close() }()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return false
	}
	defer h.Close()
	l, err := h.LinkByName(n.podLink())
	return err == nil && l.Type() == "veth" && l.Attrs().ParentIndex == host.Attrs().Index && host.Attrs().ParentIndex == l.Attrs().Index
}

// bindNamed gives the namespace of a process a name, as ip-netns(8) does.
func bindNamed(from, path string) error {
	unlock, err := lockNamed()
	if err != nil {
		return err
	}
	defer unlock()
	if err := shareNamed(); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("name a network namespace again: %w", err)
	}
	_ = f.Close()
	if err := unix.Mount(from, path, "none", unix.MS_BIND, ""); err != nil {
		_ = os.Remove(path)
		return fmt.Errorf("name a network namespace again: %w", err)
	}
	return nil
}
