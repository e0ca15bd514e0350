package network

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// SecondIP looks for the node's address of the family that its pods have
// besides the one that it is known by: other nodes route to those pods through
// it. missing is the range of pods that has no such address; not valid if there
// is none.
func (n *Namespaced) SecondIP() (changed bool, missing netip.Prefix, err error) {
	first := (*n.nodeIPs.Load())[0]
	n.mu.Lock()
	i := slices.IndexFunc(n.ranges, func(r *allocator) bool { return r.prefix.Addr().Is4() != first.Is4() })
	var own []netip.Prefix
	for _, r := range n.ranges {
		own = append(own, r.prefix)
	}
	own = append(own, n.services...)
	n.mu.Unlock()
	var before, now netip.Addr
	if p := n.second.Load(); p != nil {
		before = *p
	}
	if i >= 0 {
		if now, err = n.otherFamily(first, before, own); err != nil {
			return false, netip.Prefix{}, err
		}
		if !now.IsValid() {
			missing = own[i]
		}
	}
	n.second.Store(&now)
	return now != before, missing, nil
}

// otherFamily finds an address of the other family than first's that others
// may reach this machine by.
func (n *Namespaced) otherFamily(first, before netip.Addr, own []netip.Prefix) (netip.Addr, error) {
	family := netlink.FAMILY_V6
	if first.Is6() {
		family = netlink.FAMILY_V4
	}
	links, err := listed(netlink.LinkList)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("list links: %w", err)
	}
	at := -1 // the link that has the first address
	up := map[int]bool{}
	for _, l := range links {
		up[l.Attrs().Index] = !OwnLink(n.name, l.Attrs().Name)
	}
	all, err := listed(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return netip.Addr{}, fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range all {
		if ip, ok := netip.AddrFromSlice(a.IP); ok && ip.Unmap() == first {
			at = a.LinkIndex
		}
	}
	var best netip.Addr
	rank := 0
	for _, a := range all {
		ip, ok := netip.AddrFromSlice(a.IP)
		if ip = ip.Unmap(); !ok || ip.Is4() != (family == netlink.FAMILY_V4) || !up[a.LinkIndex] || !lasts(&a, ip) ||
			slices.ContainsFunc(own, func(p netip.Prefix) bool { return p.Contains(ip) }) {
			continue
		}
		r := 1
		if a.LinkIndex == at {
			r += 2
		}
		if ip == before {
			r++
		}
		if r > rank || r == rank && ip.Less(best) {
			best, rank = ip, r
		}
	}
	return best, nil
}

// lasts says whether an address is one to be known by: good beyond its link, in
// use, and not one of those that IPv6 changes by the day for privacy.
func lasts(a *netlink.Addr, ip netip.Addr) bool {
	if !ip.IsGlobalUnicast() || a.Scope != int(netlink.SCOPE_UNIVERSE) || a.Flags&(unix.IFA_F_DEPRECATED|unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 {
		return false
	}
	return ip.Is4() || a.Flags&unix.IFA_F_TEMPORARY == 0
}
