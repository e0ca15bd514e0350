package network

import (
	"fmt"
	"net/netip"
)

// allocator hands out the addresses of one range, lowest first after the
// last one given, so that an address is reused as late as possible.
type allocator struct {
	prefix netip.Prefix
	last   netip.Addr
	owner  map[netip.Addr]string // address -> pod uid
}

// unknownOwner has what was found in the namespace at start.
const unknownOwner = "?"

// gateway is the host's end of the veth pair: the first address.
func (a *allocator) gateway() netip.Addr { return a.prefix.Masked().Addr().Next() }

func newAllocator(p netip.Prefix) *allocator {
	return &allocator{prefix: p.Masked(), owner: map[netip.Addr]string{}}
}

// usable excludes the network, the gateway and, for IPv4, the broadcast
// address.
func (a *allocator) usable(ip netip.Addr) bool {
	if !a.prefix.Contains(ip) || ip == a.prefix.Addr() || ip == a.gateway() {
		return false
	}
	return !ip.Is4() || a.prefix.Contains(ip.Next())
}

// claim takes a known address for the pod; false if another has it or it is
// not of this range.
func (a *allocator) claim(ip netip.Addr, uid string) bool {
	if !a.usable(ip) {
		return false
	}
	if o, taken := a.owner[ip]; taken && o != uid && o != unknownOwner {
		return false
	}
	a.owner[ip] = uid
	return true
}

func (a *allocator) allocate(uid string) (netip.Addr, error) {
	for ip, o := range a.owner {
		if o == uid {
			return ip, nil
		}
	}
	ip := a.last
	if !a.prefix.Contains(ip) {
		ip = a.gateway()
	}
	// One round over a v4 range; a v6 range is never full, since a node has
	// fewer pods than tries.
	for range 1 << 16 {
		ip = ip.Next()
		if !a.prefix.Contains(ip) {
			ip = a.prefix.Addr()
			continue
		}
		if _, taken := a.owner[ip]; taken || !a.usable(ip) {
			continue
		}
		a.owner[ip], a.last = uid, ip
		return ip, nil
	}
	return netip.Addr{}, fmt.Errorf("%w (%s, %d in use)", ErrExhausted, a.prefix, len(a.owner))
}

func (a *allocator) release(uid string) (freed []netip.Addr) {
	for ip, o := range a.owner {
		if o == uid {
			delete(a.owner, ip)
			freed = append(freed, ip)
		}
	}
	return freed
}
