package network

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The second address is one of the other family that lasts, on the link of the
// first if that has any, and no address of pods; without pods of that family
// there is none.
func TestSecondIP(t *testing.T) {
	alone(t, func() {
		link := func(name string) netlink.Link {
			t.Helper()
			if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}); err != nil {
				t.Error(err)
			}
			l, err := netlink.LinkByName(name)
			if err != nil {
				t.Error(err)
				return nil
			}
			if err := netlink.LinkSetUp(l); err != nil {
				t.Error(err)
			}
			return l
		}
		add := func(l netlink.Link, s string, flags int) *netlink.Addr {
			t.Helper()
			a, err := netlink.ParseAddr(s)
			if err != nil {
				t.Error(err)
				return nil
			}
			a.Flags = flags | unix.IFA_F_NODAD
			if flags&unix.IFA_F_DEPRECATED != 0 {
				a.PreferedLft, a.ValidLft = 0, 3600
			}
			if err := netlink.AddrAdd(l, a); err != nil {
				t.Errorf("%s: %v", s, err)
			}
			return a
		}
		n, err := NewNamespaced("two", []netip.Addr{netip.MustParseAddr("192.0.2.1")})
		if err != nil {
			t.Error(err)
			return
		}
		want := func(when string, changed bool, missing, second string) {
			t.Helper()
			c, m, err := n.SecondIP()
			got := ""
			if ips := n.NodeIPs(); len(ips) > 1 {
				got = ips[1].String()
			}
			if err != nil || c != changed || (m.IsValid() || missing != "") && m.String() != missing || got != second || n.NodeIPs()[0].String() != "192.0.2.1" {
				t.Errorf("%s: changed %v, missing %v, second %q, %v", when, c, m, got, err)
			}
		}
		eth, other, own := link("eth0"), link("eth1"), link("two0")
		add(eth, "192.0.2.1/24", 0)
		add(own, "fd42::1/128", 0)
		add(other, "fd31::9/64", 0)
		n.ranges = []*allocator{newAllocator(netip.MustParsePrefix("10.42.0.0/24"))}
		want("pods of one family", false, "", "")
		n.ranges = append(n.ranges, newAllocator(netip.MustParsePrefix("fd42::/64")))
		want("another link's", true, "", "fd31::9")
		add(eth, "fd31::1/64", 0)
		add(eth, "fd42::7/64", 0)
		want("the first address's link", true, "", "fd31::1")
		add(eth, "fd30::1/64", 0)
		want("it stays", false, "", "fd31::1")
		n.SetNodeIPs([]netip.Addr{netip.MustParseAddr("192.0.2.1")})
		want("the first is set again", false, "", "fd31::1")
		for _, l := range []netlink.Link{eth, other} {
			addrs, err := netlink.AddrList(l, netlink.FAMILY_V6)
			if err != nil {
				t.Error(err)
			}
			for i := range addrs {
				if err := netlink.AddrDel(l, &addrs[i]); err != nil {
					t.Error(err)
				}
			}
		}
		add(eth, "fd31::5/64", unix.IFA_F_DEPRECATED)
		want("none that lasts", true, "fd42::/64", "")
	})
}
