package network

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
)

// onALink is a node with the address NET.1 on a link.
func onALink(t *testing.T, prefix, net string) *Namespaced {
	t.Helper()
	name := fmt.Sprintf("%s%d", prefix, os.Getpid()%100000)
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
	addr, err := netlink.ParseAddr(net + ".1/29")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(netlink.LinkAdd(link), netlink.AddrAdd(link, addr), netlink.LinkSetUp(link)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	if peer, err := netlink.LinkByName(link.PeerName); err != nil || netlink.LinkSetUp(peer) != nil {
		t.Fatal(err)
	}
	n, err := NewNamespaced(name, []netip.Addr{netip.MustParseAddr(net + ".1")})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.SetCIDRs([]string{"10.242.14.0/24"}); err != nil {
		t.Fatal(err)
	}
	return n
}

// routesOf are those to other nodes' pods.
func routesOf(t *testing.T, n *Namespaced) []netlink.Route {
	t.Helper()
	list, err := netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Protocol: n.routeProtocol()}, netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// An agent that is started while no server can be reached knows what it saved:
// a node that came later, or moved, is reached all the same by the routes that
// the agent before made. The word of a server then decides.
func TestAnOldTableTakesNoRoute(t *testing.T) {
	if err := Usable(); err != nil {
		t.Skipf("SKIPPED: no network namespaces here: %v", err)
	}
	n := onALink(t, "dlo", "198.18.251")
	t.Cleanup(func() {
		if err := n.Destroy(); err != nil {
			t.Error(err)
		}
	})
	peer := func(third, host int) Peer {
		return Peer{CIDR: netip.MustParsePrefix(fmt.Sprintf("10.242.%d.0/24", third)), Via: netip.MustParseAddr(fmt.Sprintf("198.18.251.%d", host))}
	}
	set := func(all bool, peers ...Peer) {
		t.Helper()
		if skipped, err := n.SetPeers(peers, all); err != nil || len(skipped) > 0 {
			t.Fatal(skipped, err)
		}
	}
	want := func(when string, peers ...Peer) {
		t.Helper()
		var got, list []string
		for _, r := range routesOf(t, n) {
			got = append(got, fmt.Sprint(routePrefix(&r), " ", r.Gw))
		}
		for _, p := range peers {
			list = append(list, fmt.Sprint(p.CIDR, " ", p.Via))
		}
		slices.Sort(got)
		slices.Sort(list)
		if !slices.Equal(got, list) {
			t.Errorf("%s: routes %q, want %q", when, got, list)
		}
	}
	set(true, peer(15, 2), peer(16, 3))
	want("at first", peer(15, 2), peer(16, 3))
	set(false, peer(15, 5), peer(17, 4)) // as saved: 15 was elsewhere, 16 not there yet, 17 is gone since
	want("by an old table", peer(15, 2), peer(16, 3), peer(17, 4))
	set(true, peer(15, 2), peer(16, 5))
	want("by a server's word", peer(15, 2), peer(16, 5))
}
