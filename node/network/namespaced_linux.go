package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/node/network/cni"
)

// Namespaced keeps all Wasm pod addresses of the node in one network
// namespace, named like a container's (ip netns exec NAME ...), joined to
// the host by a veth pair. It needs root (CAP_NET_ADMIN, CAP_SYS_ADMIN).
type Namespaced struct {
	name    string
	nodeIPs atomic.Pointer[[]netip.Addr]
	second  atomic.Pointer[netip.Addr] // what SecondIP found

	mu       sync.Mutex
	ranges   []*allocator
	ready    bool // namespace and veth checked since start
	services []netip.Prefix

	switches    switches
	masqueraded bool  // the rules for pods of containers are there
	natError    error // why they are not
	plugins     *cni.Networks
}

var _ Network = (*Namespaced)(nil)

// NewNamespaced makes a network whose namespace has the given name (at most
// 12 bytes: it is also the prefix of the veth pair's names). Nothing is
// touched before the first SetCIDRs with a range.
func NewNamespaced(name string, nodeIPs []netip.Addr) (*Namespaced, error) {
	if name == "" || len(name) > 12 || filepath.Base(name) != name {
		return nil, fmt.Errorf("network namespace name %q: must be 1 to 12 bytes without '/'", name)
	}
	if len(nodeIPs) == 0 {
		return nil, errors.New("the node has no address")
	}
	n := &Namespaced{name: name}
	n.SetNodeIPs(nodeIPs)
	return n, nil
}

// Names of the two ends of the veth pair.
func (n *Namespaced) hostLink() string { return n.name + "0" }
func (n *Namespaced) podLink() string  { return n.name + "1" }

// Path of the namespace's handle.
func (n *Namespaced) Path() string { return filepath.Join("/run/netns", n.name) }

// NodeIPs implements Network.
func (n *Namespaced) NodeIPs() []netip.Addr {
	ips := *n.nodeIPs.Load()
	if p := n.second.Load(); p != nil && p.IsValid() {
		return append(slices.Clip(ips), *p)
	}
	return ips
}

// SetNodeIPs replaces the node's own addresses, but for the one that SecondIP
// found. Pods keep theirs.
func (n *Namespaced) SetNodeIPs(ips []netip.Addr) { n.nodeIPs.Store(&ips) }

// SetCIDRs implements Network. Ranges may be set again; pods keep addresses
// that still lie inside.
func (n *Namespaced) SetCIDRs(cidrs []string) error {
	var prefixes []netip.Prefix
	for _, c := range cidrs {
		p, err := netip.ParsePrefix(c)
		if err != nil {
			return fmt.Errorf("pod range %q: %w", c, err)
		}
		prefixes = append(prefixes, p.Masked())
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	same := len(prefixes) == len(n.ranges)
	for i := 0; same && i < len(prefixes); i++ {
		same = n.ranges[i].prefix == prefixes[i]
	}
	if same && n.ready {
		return nil
	}
	if !same {
		n.ranges = n.ranges[:0:0]
		for _, p := range prefixes {
			n.ranges = append(n.ranges, newAllocator(p))
		}
	}
	if len(n.ranges) == 0 {
		return nil
	}
	if err := n.ensure(); err != nil {
		return fmt.Errorf("set up network namespace %s: %w", n.name, err)
	}
	n.ready = true
	return nil
}

// ensure makes namespace, veth pair, addresses and routes what they shall
// be, from any half-done state.
func (n *Namespaced) ensure() error {
	if _, err := os.Stat(n.Path()); err != nil {
		if err := createNamed(n.name); err != nil {
			return err
		}
	}
	ns, err := netns.GetFromPath(n.Path())
	if err != nil {
		// A bare file without a mount: left by a crash or an earlier boot.
		_ = os.Remove(n.Path())
		if err := createNamed(n.name); err != nil {
			return err
		}
		if ns, err = netns.GetFromPath(n.Path()); err != nil {
			return fmt.Errorf("open %s: %w", n.Path(), err)
		}
	}
	defer func() { _ = ns.Close() }()
	inside, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink in %s (is %s left over from another boot? remove it): %w", n.name, n.Path(), err)
	}
	defer inside.Close()
	if err := n.ensurePair(inside, ns); err != nil {
		return err
	}
	if err := n.ensureRoutes(inside); err != nil {
		return err
	}
	return n.keepExisting(inside)
}

// keepExisting marks the addresses that an earlier agent gave out as taken
// by nobody known: only the pod that had one (Setup with its previous
// allocation) gets it again while it is there.
func (n *Namespaced) keepExisting(inside *netlink.Handle) error {
	l, err := inside.LinkByName(n.podLink())
	if err != nil {
		return fmt.Errorf("find %s: %w", n.podLink(), err)
	}
	addrs, err := listed(func() ([]netlink.Addr, error) { return inside.AddrList(l, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("list addresses of %s: %w", n.podLink(), err)
	}
	for _, a := range addrs {
		n.keep(a.IP)
	}
	return n.keepPods()
}

func (n *Namespaced) keep(given net.IP) {
	ip, ok := netip.AddrFromSlice(given)
	if !ok {
		return
	}
	ip = ip.Unmap()
	for _, r := range n.ranges {
		if _, known := r.owner[ip]; !known && r.usable(ip) {
			r.owner[ip] = unknownOwner
		}
	}
}

// ReleaseUnknown gives back the addresses that no pod claimed: the agent
// calls it once all pods that it knows are set up.
func (n *Namespaced) ReleaseUnknown(ctx context.Context) error {
	return n.Teardown(ctx, unknownOwner)
}

func (n *Namespaced) ensurePair(inside *netlink.Handle, ns netns.NsHandle) error {
	_, hostErr := netlink.LinkByName(n.hostLink())
	_, podErr := inside.LinkByName(n.podLink())
	if hostErr != nil || podErr != nil {
		if old, err := netlink.LinkByName(n.hostLink()); err == nil {
			if err := netlink.LinkDel(old); err != nil {
				return fmt.Errorf("remove half a veth pair: %w", err)
			}
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name = n.hostLink()
		pair := &netlink.Veth{LinkAttrs: attrs, PeerName: n.podLink(), PeerNamespace: netlink.NsFd(int(ns))}
		if err := netlink.LinkAdd(pair); err != nil {
			return fmt.Errorf("add veth pair %s: %w", n.hostLink(), err)
		}
	}
	host, err := netlink.LinkByName(n.hostLink())
	if err != nil {
		return fmt.Errorf("find %s: %w", n.hostLink(), err)
	}
	if err := netlink.LinkSetUp(host); err != nil {
		return fmt.Errorf("bring up %s: %w", n.hostLink(), err)
	}
	for _, name := range []string{"lo", n.podLink()} {
		l, err := inside.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find %s in the namespace: %w", name, err)
		}
		if err := inside.LinkSetUp(l); err != nil {
			return fmt.Errorf("bring up %s in the namespace: %w", name, err)
		}
	}
	return nil
}

func (n *Namespaced) ensureRoutes(inside *netlink.Handle) error {
	host, err := netlink.LinkByName(n.hostLink())
	if err != nil {
		return fmt.Errorf("find %s: %w", n.hostLink(), err)
	}
	pod, err := inside.LinkByName(n.podLink())
	if err != nil {
		return fmt.Errorf("find %s: %w", n.podLink(), err)
	}
	for _, r := range n.ranges {
		gw := r.gateway()
		ones, bits := r.prefix.Bits(), r.prefix.Addr().BitLen()
		dst := &net.IPNet{IP: r.prefix.Addr().AsSlice(), Mask: net.CIDRMask(ones, bits)}
		if err := takenRoute(dst, host.Attrs().Index); err != nil {
			return fmt.Errorf("the pod range %w; give the server another range with --pod-cidr", err)
		}
		if err := netlink.AddrReplace(host, hostAddr(gw)); err != nil {
			return fmt.Errorf("add %s to %s: %w", gw, n.hostLink(), err)
		}
		if err := netlink.RouteReplace(&netlink.Route{LinkIndex: host.Attrs().Index, Dst: dst, Scope: netlink.SCOPE_LINK, Src: gw.AsSlice()}); err != nil {
			return fmt.Errorf("route %s to %s: %w", r.prefix, n.hostLink(), err)
		}
		if err := keepRoutes(inside, pod, r.prefix.Addr()); err != nil {
			return err
		}
		gwNet := &net.IPNet{IP: gw.AsSlice(), Mask: net.CIDRMask(bits, bits)}
		if err := inside.RouteReplace(&netlink.Route{LinkIndex: pod.Attrs().Index, Dst: gwNet, Scope: netlink.SCOPE_LINK}); err != nil {
			return fmt.Errorf("route to the host in the namespace: %w", err)
		}
		any4or6 := &net.IPNet{IP: make(net.IP, len(gw.AsSlice())), Mask: net.CIDRMask(0, bits)}
		if err := inside.RouteReplace(&netlink.Route{LinkIndex: pod.Attrs().Index, Dst: any4or6, Gw: gw.AsSlice()}); err != nil {
			return fmt.Errorf("default route in the namespace: %w", err)
		}
	}
	return nil
}

// keepRoutes gives a link an address that stays. With a link's last IPv4
// address the kernel takes its routes away too: once the last Wasm pod had
// gone, nothing that answers in the namespace (Services, DNS) would find its
// way back to the node's containers. The network's own address is no pod's,
// and of host scope it is never chosen as a source.
func keepRoutes(h *netlink.Handle, l netlink.Link, network netip.Addr) error {
	if !network.Is4() {
		return nil
	}
	a := hostAddr(network)
	a.Scope = int(netlink.SCOPE_HOST)
	if err := h.AddrReplace(l, a); err != nil {
		return fmt.Errorf("add %s to %s: %w", network, l.Attrs().Name, err)
	}
	return nil
}

// takenRoute refuses a range that this machine already routes elsewhere:
// replacing the route would cut off somebody's pods without a word.
func takenRoute(dst *net.IPNet, own int) error {
	family := netlink.FAMILY_V4
	if dst.IP.To4() == nil {
		family = netlink.FAMILY_V6
	}
	routes, err := listed(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(family, &netlink.Route{Dst: dst}, netlink.RT_FILTER_DST)
	})
	if err != nil {
		return fmt.Errorf("list routes to %s: %w", dst, err)
	}
	for _, r := range routes {
		if r.LinkIndex == own {
			continue
		}
		name := fmt.Sprintf("interface %d", r.LinkIndex)
		if l, err := netlink.LinkByIndex(r.LinkIndex); err == nil {
			name = l.Attrs().Name
		}
		return fmt.Errorf("%s is already routed to %s (another cluster on this machine?)", dst, name)
	}
	return nil
}

// hostAddr is ip as a single-host address, without duplicate address
// detection (whose second of waiting would delay every IPv6 pod).
func hostAddr(ip netip.Addr) *netlink.Addr {
	a := &netlink.Addr{IPNet: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ip.BitLen(), ip.BitLen())}}
	if ip.Is6() {
		a.Flags = syscall.IFA_F_NODAD
	}
	return a
}

// inNamespace runs f on a thread inside the namespace.
func (n *Namespaced) inNamespace(f func() error) error { return within(n.Path(), f) }

// Setup implements Network.
func (n *Namespaced) Setup(_ context.Context, podUID string, hostNetwork bool, previous *Allocation) (Allocation, error) {
	if hostNetwork {
		ips := n.NodeIPs()
		return Allocation{IP: ips[0], IPs: ips[:1], HostNetwork: true}, nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	a, err := n.allocate(podUID, previous)
	if err != nil {
		return Allocation{}, err
	}
	err = n.withPodLink(func(h *netlink.Handle, l netlink.Link) error {
		for _, ip := range a.IPs {
			if err := h.AddrReplace(l, hostAddr(ip)); err != nil {
				return fmt.Errorf("add %s: %w", ip, err)
			}
		}
		return nil
	})
	if err != nil {
		return Allocation{}, fmt.Errorf("set up pod address: %w", err)
	}
	return a, nil
}

func (n *Namespaced) withPodLink(f func(*netlink.Handle, netlink.Link) error) error {
	ns, err := netns.GetFromPath(n.Path())
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", n.name, err)
	}
	defer func() { _ = ns.Close() }()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink in %s: %w", n.name, err)
	}
	defer h.Close()
	l, err := h.LinkByName(n.podLink())
	if err != nil {
		return fmt.Errorf("find %s: %w", n.podLink(), err)
	}
	return f(h, l)
}

// Listen implements Network.
func (n *Namespaced) Listen(ctx context.Context, a *Allocation, containerPort, hostPort int32, protocol string) (files []*os.File, err error) {
	if err := checkProtocol(protocol); err != nil {
		return nil, err
	}
	if a.HostNetwork {
		f, _, err := listenOn(ctx, "tcp", fmt.Sprintf(":%d", containerPort))
		if err != nil {
			return nil, err
		}
		return []*os.File{f}, nil
	}
	defer func() {
		if err != nil {
			closeAll(files)
			files = nil
		}
	}()
	ips := a.IPs
	if len(ips) == 0 {
		ips = []netip.Addr{a.IP}
	}
	err = n.inNamespace(func() error {
		for _, ip := range ips {
			f, _, err := listenTCP(ctx, netip.AddrPortFrom(ip, uint16(containerPort)))
			if err != nil {
				return err
			}
			files = append(files, f)
		}
		return nil
	})
	if err != nil || hostPort == 0 {
		return files, err
	}
	f, _, err := listenOn(ctx, "tcp", fmt.Sprintf(":%d", hostPort))
	if err != nil {
		return files, err
	}
	return append(files, f), nil
}

// Dial implements Network: the host reaches pod addresses through the veth.
func (n *Namespaced) Dial(ctx context.Context, a Allocation, network string, port int32) (net.Conn, error) {
	return dial(ctx, network, a.IP, a.Reached(port))
}

// Forward implements Network. A container may listen on the loopback of its
// pod's namespace only; a Wasm guest's listeners are on the pod's address.
func (n *Namespaced) Forward(ctx context.Context, a Allocation, port int32) (c net.Conn, err error) {
	switch {
	case a.Namespace != "":
		err = within(a.Namespace, func() error {
			c, err = dialLoopback(ctx, port)
			return err
		})
		return c, err
	case a.HostNetwork:
		return dialLoopback(ctx, a.Reached(port))
	}
	return n.Dial(ctx, a, "tcp", port)
}

// Teardown implements Network.
func (n *Namespaced) Teardown(ctx context.Context, podUID string) error {
	if err := n.detach(ctx, podUID); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.teardownPod(podUID); err != nil {
		return fmt.Errorf("remove pod namespace: %w", err)
	}
	var freed []netip.Addr
	for _, r := range n.ranges {
		freed = append(freed, r.release(podUID)...)
	}
	if len(freed) == 0 {
		return nil
	}
	slices.SortFunc(freed, netip.Addr.Compare)
	err := n.withPodLink(func(h *netlink.Handle, l netlink.Link) error {
		for _, ip := range freed {
			if err := h.AddrDel(l, hostAddr(ip)); err != nil && !errors.Is(err, syscall.EADDRNOTAVAIL) {
				return fmt.Errorf("remove %s: %w", ip, err)
			}
		}
		return nil
	})
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// Destroy removes the namespace and the veth pair: for uninstall, and for
// clusters that leave nothing behind.
func (n *Namespaced) Destroy() error {
	errs := []error{n.detachAll(), n.destroyPods()}
	_, err := n.SetPeers(nil, true)
	errs = append(errs, err)
	if l, err := netlink.LinkByName(n.hostLink()); err == nil {
		errs = append(errs, netlink.LinkDel(l))
	}
	if _, err := os.Stat(n.Path()); err == nil {
		errs = append(errs, netns.DeleteNamed(n.name))
	}
	return errors.Join(append(errs, unshareNamed())...)
}
