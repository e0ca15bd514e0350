package network

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routeProtocol marks the routes to other nodes as this agent's, so that those
// of an earlier run are found, and those of another agent on the machine left
// alone.
func (n *Namespaced) routeProtocol() netlink.RouteProtocol {
	h := fnv.New32a()
	_, _ = h.Write([]byte(n.name))
	return netlink.RouteProtocol(100 + h.Sum32()%80) // what no routing daemon uses
}

// Peer is another node, whose pods are reached through its address.
type Peer struct {
	CIDR netip.Prefix
	Via  netip.Addr
}

// SetServiceCIDRs makes every address of the service ranges local to the
// namespace, where the proxy listens on those that are in use (AnyIP: one
// route, no address for each Service), and routes the ranges there from the
// host. Without ranges of pods there is no namespace yet: ErrNoRange.
func (n *Namespaced) SetServiceCIDRs(cidrs []netip.Prefix) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.ready {
		return ErrNoRange
	}
	n.services = cidrs
	return n.ensureServices()
}

func prefixNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

func (n *Namespaced) ensureServices() error {
	host, err := netlink.LinkByName(n.hostLink())
	if err != nil {
		return fmt.Errorf("find %s: %w", n.hostLink(), err)
	}
	return n.withPodLink(func(inside *netlink.Handle, pod netlink.Link) error {
		lo, err := inside.LinkByName("lo")
		if err != nil {
			return fmt.Errorf("find lo in the namespace: %w", err)
		}
		var errs []error
		for _, p := range n.services {
			dst := prefixNet(p)
			err := inside.RouteReplace(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: netlink.SCOPE_HOST})
			if err != nil {
				errs = append(errs, fmt.Errorf("make %s local to the namespace: %w", p, err))
				continue
			}
			if err := takenRoute(dst, host.Attrs().Index); err != nil {
				errs = append(errs, fmt.Errorf("processes of the host reach no Service: %w", errServiceRange(p, err)))
				continue
			}
			r := &netlink.Route{LinkIndex: host.Attrs().Index, Dst: dst, Scope: netlink.SCOPE_LINK}
			if p.Addr().Is6() {
				// Neighbour discovery knows no AnyIP: go through the link's own.
				via, err := linkLocal(inside, pod)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				r.Gw, r.Scope = via, netlink.SCOPE_UNIVERSE
			}
			if src := n.gatewayOf(p.Addr().Is6()); src.IsValid() {
				r.Src = src.AsSlice()
			}
			if err := netlink.RouteReplace(r); err != nil {
				errs = append(errs, fmt.Errorf("route %s to %s: %w", p, n.hostLink(), err))
			}
		}
		return errors.Join(errs...)
	})
}

// errServiceRange says of a range of Services what takenRoute says of pods'.
func errServiceRange(p netip.Prefix, err error) error {
	return fmt.Errorf("the service range %s: %w; give the server another range with --service-cidr", p, err)
}

func (n *Namespaced) gatewayOf(six bool) netip.Addr {
	for _, r := range n.ranges {
		if r.prefix.Addr().Is6() == six {
			return r.gateway()
		}
	}
	return netip.Addr{}
}

func linkLocal(h *netlink.Handle, l netlink.Link) (net.IP, error) {
	addrs, err := listed(func() ([]netlink.Addr, error) { return h.AddrList(l, netlink.FAMILY_V6) })
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", l.Attrs().Name, err)
	}
	for _, a := range addrs {
		if a.IP.IsLinkLocalUnicast() {
			return a.IP, nil
		}
	}
	return nil, fmt.Errorf("%s has no link-local address: IPv6 is off on this machine?", l.Attrs().Name)
}

// SetPeers routes the pods of other nodes through those nodes' addresses,
// where they are on a link of this machine; skipped are those that are not,
// with the reason. Routes of peers that are gone are removed, if these are all:
// what an earlier agent knew may be newer than a table that was saved.
func (n *Namespaced) SetPeers(peers []Peer, all bool) (skipped map[netip.Prefix]error, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	want := map[netip.Prefix]netip.Addr{}
	for _, p := range peers {
		if !n.ownRange(p.CIDR) {
			want[p.CIDR] = p.Via
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		have, err := listed(func() ([]netlink.Route, error) {
			return netlink.RouteListFiltered(family, &netlink.Route{Protocol: n.routeProtocol()}, netlink.RT_FILTER_PROTOCOL)
		})
		if err != nil {
			return nil, fmt.Errorf("list routes to other nodes: %w", err)
		}
		for i := range have {
			r := &have[i]
			dst, via := routePrefix(r), netip.Addr{}
			if a, ok := netip.AddrFromSlice(r.Gw); ok {
				via = a.Unmap()
			}
			switch {
			case want[dst] == via && via.IsValid(), !all:
				delete(want, dst)
			default:
				if err := netlink.RouteDel(r); err != nil && !errors.Is(err, syscall.ESRCH) {
					return nil, fmt.Errorf("remove the route to %s: %w", dst, err)
				}
			}
		}
	}
	skipped = map[netip.Prefix]error{}
	for dst, via := range want {
		if err := n.routePeer(dst, via); err != nil {
			skipped[dst] = err
		}
	}
	return skipped, nil
}

func routePrefix(r *netlink.Route) netip.Prefix {
	if r.Dst == nil {
		return netip.Prefix{}
	}
	a, ok := netip.AddrFromSlice(r.Dst.IP)
	if !ok {
		return netip.Prefix{}
	}
	ones, _ := r.Dst.Mask.Size()
	return netip.PrefixFrom(a.Unmap(), ones)
}

func (n *Namespaced) ownRange(p netip.Prefix) bool {
	return slices.ContainsFunc(n.ranges, func(a *allocator) bool { return a.prefix.Overlaps(p) })
}

func (n *Namespaced) routePeer(dst netip.Prefix, via netip.Addr) error {
	if dst.Addr().Is4() != via.Is4() {
		return fmt.Errorf("the node's address %s is of another family than its pods", via)
	}
	routes, err := netlink.RouteGet(via.AsSlice())
	if err != nil || len(routes) == 0 {
		return fmt.Errorf("no route to the node's address %s: %w", via, err)
	}
	switch r := &routes[0]; {
	case r.Type == unix.RTN_LOCAL:
		return nil // an agent on this very machine: its own route is here
	case r.Gw != nil:
		return fmt.Errorf("the node's address %s is behind the router %s, which knows no pods", via, r.Gw)
	}
	if err := takenRoute(prefixNet(dst), routes[0].LinkIndex); err != nil {
		return err
	}
	r := &netlink.Route{LinkIndex: routes[0].LinkIndex, Dst: prefixNet(dst), Gw: via.AsSlice(), Protocol: n.routeProtocol()}
	if err := netlink.RouteReplace(r); err != nil {
		return fmt.Errorf("route through %s: %w", via, err)
	}
	l, err := netlink.LinkByIndex(routes[0].LinkIndex)
	if err != nil {
		return fmt.Errorf("find interface %d: %w", routes[0].LinkIndex, err)
	}
	return errors.Join(n.forwarding(l.Attrs().Name, via.Is6()), n.forwarding(n.hostLink(), via.Is6()))
}
