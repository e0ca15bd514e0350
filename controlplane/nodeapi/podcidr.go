package nodeapi

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// cidrTries bounds how often the next free range is tried when other servers
// take ranges at the same time.
const cidrTries = 32

// cidrTaken says that the store refused a write since another Node has the
// range.
func cidrTaken(err error) bool {
	return apierrors.IsInvalid(err) && strings.Contains(err.Error(), "podCIDR")
}

const cidrClaim = "podcidr/" // as the registry writes it into a Node's header

// podRanges hands out ranges of pod addresses. The store has the last word;
// this only keeps joins through this server from trying the same range, and
// from looking through all that are taken each time.
type podRanges struct {
	mu   sync.Mutex
	next map[netip.Prefix]netip.Addr // where to look first, by range of the cluster
	held map[netip.Prefix]bool       // handed out, being written
}

// takeCIDRs hands out one range of each family that no Node claims. release
// is called when the write that uses them is over.
func (s *Server) takeCIDRs() (cidrs []string, release func(), err error) {
	r := &s.ranges
	r.mu.Lock()
	defer r.mu.Unlock()
	snap := s.cfg.Store.Reader(nodeGK).Snapshot()
	taken := func(p netip.Prefix) bool { return r.held[p] || snap.Claimed(cidrClaim+p.String()) }
	var got []netip.Prefix
	for _, p := range s.cfg.PodCIDRs {
		bits := s.nodeBits(p)
		c, ok := nextFree(p, bits, r.next[p], taken)
		if !ok {
			return nil, nil, apierrors.NewForbidden(corev1.Resource("nodes"), "", fmt.Errorf(
				"every /%d of the pod range %s is taken: no more nodes fit (start the servers with a larger --pod-cidr)", bits, p))
		}
		got, cidrs = append(got, c), append(cidrs, c.String())
	}
	for i, c := range got {
		r.held[c] = true
		p := s.cfg.PodCIDRs[i]
		r.next[p], _ = addBit(c.Addr(), c.Bits()) // past the end: from the start again
	}
	return cidrs, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, c := range got {
			delete(r.held, c)
		}
	}, nil
}

// nextFree walks the sub-ranges of p in order, from the one at an address,
// or from the first if that is not in p, and once around.
func nextFree(p netip.Prefix, bits int, from netip.Addr, taken func(netip.Prefix) bool) (netip.Prefix, bool) {
	if !p.Contains(from) {
		from = p.Addr()
	}
	sub := netip.PrefixFrom(from, bits)
	for {
		if !taken(sub) {
			return sub, true
		}
		next, ok := addBit(sub.Addr(), bits)
		if !ok || !p.Contains(next) {
			next = p.Addr()
		}
		if next == from {
			return netip.Prefix{}, false
		}
		sub = netip.PrefixFrom(next, bits)
	}
}

// givesRanges says whether every one is a range that this cluster would give.
func (s *Server) givesRanges(cidrs []string) bool {
	if len(cidrs) != len(s.cfg.PodCIDRs) {
		return false
	}
	for i, c := range cidrs {
		p, err := netip.ParsePrefix(c)
		if err != nil || p != p.Masked() || p.Bits() != s.nodeBits(s.cfg.PodCIDRs[i]) || !s.cfg.PodCIDRs[i].Contains(p.Addr()) {
			return false
		}
	}
	return true
}

// givesRange says whether it is a range that some node could be given.
func (s *Server) givesRange(c string) bool {
	p, err := netip.ParsePrefix(c)
	return err == nil && slices.ContainsFunc(s.cfg.PodCIDRs, func(of netip.Prefix) bool {
		return p.Bits() == s.nodeBits(of) && of.Contains(p.Addr())
	})
}

// TellRanges says, once, which nodes keep a range that the configuration does
// not give any more: a node's range is never changed.
func (s *Server) TellRanges() {
	var kept []string
	var example []string
	s.cfg.Store.Reader(nodeGK).Snapshot().Range(nodeGK.String(), "", state.Key{}, func(r *state.Record) bool {
		var ranges []string
		for _, c := range r.Header.Claims {
			if p, ok := strings.CutPrefix(c, cidrClaim); ok {
				ranges = append(ranges, p)
			}
		}
		// Claims are sorted, families as the configuration has them are not.
		if len(ranges) > 0 && slices.ContainsFunc(ranges, func(c string) bool { return !s.givesRange(c) }) {
			kept, example = append(kept, r.Header.Key.Name), ranges
		}
		return true
	})
	if len(kept) > 0 {
		s.log.Warn("--pod-cidr was changed, which is ignored for the nodes that have a range already; only new nodes get one of it",
			"pod_cidr", s.cfg.PodCIDRs, "nodes", len(kept), "node", kept[len(kept)-1], "its_range", example,
			"hint", "give all servers the old --pod-cidr again")
	}
}

func (s *Server) nodeBits(p netip.Prefix) int {
	if p.Addr().Is6() {
		return s.cfg.NodeBits6
	}
	return s.cfg.NodeBits
}

// addBit adds 1 to the first bits of an address; ok is false on overflow.
func addBit(a netip.Addr, bits int) (netip.Addr, bool) {
	b := a.AsSlice()
	carry := byte(1) << ((8 - bits%8) % 8)
	for i := (bits - 1) / 8; i >= 0; i-- {
		sum := uint16(b[i]) + uint16(carry)
		b[i] = byte(sum)
		if sum < 256 {
			out, ok := netip.AddrFromSlice(b)
			return out, ok
		}
		carry = 1
	}
	return netip.Addr{}, false
}
