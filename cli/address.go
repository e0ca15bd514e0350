package cli

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/dunlin-project/dunlin/node/network"
)

// addressEvery is how often a machine's own address is looked at. It costs two
// system calls; no packet is sent.
const addressEvery = 2 * time.Second

// watchAddress calls moved, from its own goroutine, when the address that
// routes elsewhere is another one than before. A machine without any keeps
// the last: the cable may be out.
func watchAddress(ctx context.Context, now netip.Addr, find func(now netip.Addr) (netip.Addr, bool), moved func(netip.Addr)) {
	t := time.NewTicker(addressEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if a, ok := find(now); ok && a != now {
			now = a
			moved(a)
		}
	}
}

// ownAddress is the local address that routes to a server ("host:port"; "" is
// anywhere), if there is one. netns is the name that this node's own links
// begin with. A network of a switch and nothing else has no route to anywhere:
// there now stays as long as the machine has it, and loopback until there is
// any other.
func ownAddress(server, netns string, now netip.Addr) (netip.Addr, bool) {
	a, err := routeTo(server)
	if err != nil || !a.IsValid() {
		return a, false
	}
	if !a.IsLoopback() {
		return forOthers(a, netns), true
	}
	if !now.IsLoopback() && has(now) {
		return now, true
	}
	next := unrouted(netns)
	return next, !next.IsLoopback()
}

// has says whether the machine has an address; it may be without a link.
func has(a netip.Addr) bool {
	all, err := net.InterfaceAddrs()
	return err != nil || slices.ContainsFunc(all, func(o net.Addr) bool {
		p, err := netip.ParsePrefix(o.String())
		return err == nil && p.Addr().Unmap().WithZone("") == a
	})
}

// forOthers is the address to tell for one that routes to a server: a
// link-local one is good on one link only, and with a zone that each machine
// names by itself, so another of the machine's is taken where it has one.
func forOthers(a netip.Addr, netns string) netip.Addr {
	if a.IsLinkLocalUnicast() {
		if other := unrouted(netns); !other.IsLoopback() {
			return other
		}
	}
	return a.WithZone("")
}

// nic is a network interface with an address that others may reach.
type nic struct {
	name     string
	hardware bool // a device, and not a bridge or a tunnel
	addrs    []netip.Addr
}

// unrouted is the address of a machine without a route to elsewhere: on a
// network of a switch and nothing else its neighbours can still be reached.
// netns is the name that this node's own links begin with.
func unrouted(netns string) netip.Addr {
	var list []nic
	all, _ := net.Interfaces() // none is as good as an error: loopback is left
	for _, i := range all {
		if i.Flags&(net.FlagUp|net.FlagRunning) != net.FlagUp|net.FlagRunning || network.OwnLink(netns, i.Name) {
			continue
		}
		n := nic{name: i.Name}
		_, err := os.Stat(filepath.Join("/sys/class/net", i.Name, "device"))
		n.hardware = err == nil
		addrs, _ := i.Addrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				n.addrs = append(n.addrs, p.Addr().Unmap())
			}
		}
		list = append(list, n)
	}
	return choose(list)
}

// choose takes a device's address before a bridge's, IPv4 before IPv6, and the
// first among equals; 127.0.0.1 if there is none that others could reach.
func choose(list []nic) netip.Addr {
	best, rank := netip.MustParseAddr("127.0.0.1"), 0
	for _, n := range list {
		for _, a := range n.addrs {
			r := 1
			if !a.IsGlobalUnicast() {
				continue
			}
			if n.hardware {
				r += 2
			}
			if a.Is4() {
				r++
			}
			if r > rank {
				best, rank = a, r
			}
		}
	}
	return best
}

// follow watches the address of a server that was not told one, and lets it
// and its pool move along.
func (o serverOptions) follow(ctx context.Context, port int, moved func(advertise []string, fallback string), gossip func(netip.Addr), log *slog.Logger) {
	host, _, _ := net.SplitHostPort(o.listen)
	if ip, err := netip.ParseAddr(host); o.fixedAddress || (err == nil && !ip.IsUnspecified()) {
		return // it listens there, or was told what it is
	}
	now, err := netip.ParseAddr(o.address)
	if err != nil {
		return
	}
	watchAddress(ctx, now, func(now netip.Addr) (netip.Addr, bool) { return ownAddress("", o.netns, now) }, func(a netip.Addr) {
		log.Info("the address of this machine changed", "to", a)
		gossip(a)
		advertise := slices.Clone(o.advertise)
		if len(advertise) == 0 {
			advertise = []string{net.JoinHostPort(a.String(), strconv.Itoa(port))}
		}
		moved(advertise, a.String())
	})
}
