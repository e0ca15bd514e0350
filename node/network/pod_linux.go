package network

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

var _ Namespacer = (*Namespaced)(nil)

// Names of a container pod's namespace and of the host's end of its veth
// pair. The alias of that end says whose it is.
func (n *Namespaced) podNamespace(uid string) string { return n.name + "-" + shortHash(uid) }
func (n *Namespaced) podVeth(uid string) string {
	return vethPrefix + shortHash(n.name + "/" + uid)[:11]
}
func (n *Namespaced) alias(uid string) string { return n.name + "/" + uid }

func shortHash(s string) string {
	h := fnv.New64a()
	_, _ = h.Write([]byte(s))
	return fmt.Sprintf("%016x", h.Sum64())
}

// SetupNamespace implements Namespacer. Without a CNI configuration the pod
// gets its address as a single host, the node's gateway address as its only
// neighbour, and the node a route to it: no bridge, no other pod on the same
// link.
func (n *Namespaced) SetupNamespace(ctx context.Context, pod Pod, previous *Allocation) (Allocation, error) {
	list, err := n.configured(pod.UID)
	if err != nil {
		return Allocation{}, err
	}
	if list != nil {
		return n.attach(ctx, list, pod, previous)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	a, err := n.allocate(pod.UID, previous)
	if err != nil {
		return Allocation{}, err
	}
	name := n.podNamespace(pod.UID)
	a.Namespace = filepath.Join("/run/netns", name)
	_, gone := os.Stat(a.Namespace)
	if err = n.ensurePod(pod.UID, name, a.IPs); err != nil {
		err = fmt.Errorf("set up pod namespace: %w", err)
	} else {
		err = n.publish(pod.UID, a.IPs, pod.Ports, n.podVeth(pod.UID))
	}
	if err != nil && previous == nil && gone != nil {
		// Nobody is told of what was made, so nobody would take it down. One that
		// was there is a pod's that runs, whose record was lost.
		err = errors.Join(err, n.teardownPod(pod.UID))
		for _, r := range n.ranges {
			r.release(pod.UID)
		}
	}
	if err != nil {
		return Allocation{}, err
	}
	return a, nil
}

// Retake implements Namespacer.
func (n *Namespaced) Retake(ctx context.Context, podUID string, previous Allocation) error {
	if n.plugins != nil && n.plugins.Has(n.podNamespace(podUID)) {
		return n.retakeAttached(ctx, podUID, previous)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	a, err := n.allocate(podUID, &previous)
	if err != nil {
		return err
	}
	if err := n.ensurePod(podUID, n.podNamespace(podUID), a.IPs); err != nil {
		return fmt.Errorf("set up pod namespace: %w", err)
	}
	return nil
}

// allocate takes or gives one address of each range. The lock is held.
func (n *Namespaced) allocate(podUID string, previous *Allocation) (Allocation, error) {
	if len(n.ranges) == 0 {
		return Allocation{}, ErrNoRange
	}
	if !n.ready {
		// It failed before; the pod that waits for it shows why.
		if err := n.ensure(); err != nil {
			return Allocation{}, fmt.Errorf("set up network namespace %s: %w", n.name, err)
		}
		n.ready = true
	}
	var a Allocation
	for i, r := range n.ranges {
		if previous != nil && i < len(previous.IPs) && r.claim(previous.IPs[i], podUID) {
			a.IPs = append(a.IPs, previous.IPs[i])
			continue
		}
		ip, err := r.allocate(podUID)
		if err != nil {
			return Allocation{}, err
		}
		a.IPs = append(a.IPs, ip)
	}
	a.IP = a.IPs[0]
	return a, nil
}

// ensureNamed opens the namespace, and makes it where it is not there.
func ensureNamed(name string) (ns netns.NsHandle, inside *netlink.Handle, err error) {
	p := filepath.Join("/run/netns", name)
	if ns, err = netns.GetFromPath(p); err != nil {
		_ = os.Remove(p) // a bare file without a mount: left by a crash
		if err := createNamed(name); err != nil {
			return ns, nil, err
		}
		if ns, err = netns.GetFromPath(p); err != nil {
			return ns, nil, fmt.Errorf("open %s: %w", p, err)
		}
	}
	if inside, err = netlink.NewHandleAt(ns, unix.NETLINK_ROUTE); err != nil {
		_ = ns.Close()
		return ns, nil, fmt.Errorf("netlink in %s: %w", name, err)
	}
	return ns, inside, nil
}

func (n *Namespaced) ensurePod(uid, name string, ips []netip.Addr) error {
	ns, inside, err := ensureNamed(name)
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	defer inside.Close()
	host, err := n.ensurePodPair(uid, inside, ns)
	if err != nil {
		return err
	}
	eth, err := inside.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("find eth0: %w", err)
	}
	for i, ip := range ips {
		if err := connect(inside, eth, host, ip, n.ranges[i].gateway()); err != nil {
			return fmt.Errorf("address %s: %w", ip, err)
		}
	}
	return errors.Join(n.forwarding(host.Attrs().Name, len(ips) > 1 || ips[0].Is6()), n.forwarding(n.hostLink(), len(ips) > 1 || ips[0].Is6()))
}

// ensurePodPair makes the veth pair, whole or not at all.
func (n *Namespaced) ensurePodPair(uid string, inside *netlink.Handle, ns netns.NsHandle) (netlink.Link, error) {
	name := n.podVeth(uid)
	host, hostErr := netlink.LinkByName(name)
	_, podErr := inside.LinkByName("eth0")
	if hostErr != nil || podErr != nil {
		if hostErr == nil {
			if err := netlink.LinkDel(host); err != nil {
				return nil, fmt.Errorf("remove half a veth pair: %w", err)
			}
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(ns))}); err != nil {
			return nil, fmt.Errorf("add veth pair %s: %w", name, err)
		}
		var err error
		if host, err = netlink.LinkByName(name); err != nil {
			return nil, fmt.Errorf("find %s: %w", name, err)
		}
	}
	if err := netlink.LinkSetAlias(host, n.alias(uid)); err != nil {
		return nil, fmt.Errorf("mark %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(host); err != nil {
		return nil, fmt.Errorf("bring up %s: %w", name, err)
	}
	for _, l := range []string{"lo", "eth0"} {
		link, err := inside.LinkByName(l)
		if err == nil {
			err = inside.LinkSetUp(link)
		}
		if err != nil {
			return nil, fmt.Errorf("bring up %s in the namespace: %w", l, err)
		}
	}
	return host, nil
}

// connect gives the pod's end its address and routes, and the host its route.
func connect(inside *netlink.Handle, eth, host netlink.Link, ip, gw netip.Addr) error {
	if ip.Is6() {
		// A neighbour of IPv6 answers only for the addresses of that link.
		if err := netlink.AddrReplace(host, hostAddr(gw)); err != nil {
			return fmt.Errorf("gateway: %w", err)
		}
	}
	if err := inside.AddrReplace(eth, hostAddr(ip)); err != nil {
		return err
	}
	only := func(a netip.Addr) *net.IPNet {
		return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
	}
	if err := inside.RouteReplace(&netlink.Route{LinkIndex: eth.Attrs().Index, Dst: only(gw), Scope: netlink.SCOPE_LINK}); err != nil {
		return fmt.Errorf("route to the host: %w", err)
	}
	all := &net.IPNet{IP: make(net.IP, len(gw.AsSlice())), Mask: net.CIDRMask(0, gw.BitLen())}
	if err := inside.RouteReplace(&netlink.Route{LinkIndex: eth.Attrs().Index, Dst: all, Gw: gw.AsSlice()}); err != nil {
		return fmt.Errorf("default route: %w", err)
	}
	r := &netlink.Route{LinkIndex: host.Attrs().Index, Dst: only(ip), Scope: netlink.SCOPE_LINK}
	if ip.Is4() {
		r.Src = gw.AsSlice()
	}
	if err := netlink.RouteReplace(r); err != nil {
		return fmt.Errorf("route to the pod: %w", err)
	}
	return nil
}

// forwarding lets the host pass on what comes in by one of our links. IPv6
// has no such thing for one link (ip6_forward looks at all.forwarding).
func (n *Namespaced) forwarding(link string, v6 bool) error {
	if err := n.switches.link(link, OwnLink(n.name, link)); err != nil {
		return fmt.Errorf("forward packets of %s: %w", link, err)
	}
	if !v6 {
		return nil
	}
	if err := n.switches.ipv6(); err != nil {
		return fmt.Errorf("forward packets of IPv6: %w", err)
	}
	return nil
}

// teardownPod removes a container pod's namespace, link and rules.
func (n *Namespaced) teardownPod(uid string) error {
	var errs []error
	name := n.podNamespace(uid)
	if _, err := os.Stat(filepath.Join("/run/netns", name)); err == nil {
		errs = append(errs, n.unpublish(uid))
		if l, err := netlink.LinkByName(n.podVeth(uid)); err == nil {
			errs = append(errs, netlink.LinkDel(l)) // its routes go with it
		}
		errs = append(errs, netns.DeleteNamed(name))
	}
	return errors.Join(errs...)
}

// keepPods does for container pods what keepExisting does for Wasm pods: an
// address that the host has a route to is taken.
func (n *Namespaced) keepPods() error {
	links, err := n.podLinks()
	if err != nil {
		return err
	}
	for _, l := range links {
		routes, err := listed(func() ([]netlink.Route, error) { return netlink.RouteList(l, netlink.FAMILY_ALL) })
		if err != nil {
			return fmt.Errorf("list routes of %s: %w", l.Attrs().Name, err)
		}
		for _, r := range routes {
			if r.Dst != nil {
				n.keep(r.Dst.IP)
			}
		}
	}
	return nil
}

// podLinks are the host's ends of all container pods with this node's mark.
func (n *Namespaced) podLinks() (out []netlink.Link, err error) {
	links, err := listed(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, vethPrefix) && strings.HasPrefix(l.Attrs().Alias, n.name+"/") {
			out = append(out, l)
		}
	}
	return out, nil
}

// destroyPods removes all namespaces and links that carry this node's mark.
func (n *Namespaced) destroyPods() error {
	links, err := n.podLinks()
	errs := []error{err}
	for _, l := range links {
		errs = append(errs, netlink.LinkDel(l))
	}
	names, err := filepath.Glob(filepath.Join("/run/netns", n.name+"-"+strings.Repeat("[0-9a-f]", 16)))
	errs = append(errs, err)
	for _, p := range names {
		errs = append(errs, netns.DeleteNamed(filepath.Base(p)))
	}
	return errors.Join(append(errs, n.removeRules())...)
}
