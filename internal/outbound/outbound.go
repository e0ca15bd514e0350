// Package outbound is what a Wasm guest may connect to: the rules of the
// annotation dunlin.dev/outbound. Admission and the guest's host process read
// them the same way. Everything is pure.
package outbound

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Annotation holds the rules: HOST:PORT, separated by commas or white space.
// HOST is a name, a name behind "*.", an address, or a range (10.0.0.0/8;
// IPv6 in brackets); PORT a number, a range (8000-8010) or "*"; "/udp" behind
// it means datagrams, "/tcp" or nothing connections.
const Annotation = "dunlin.dev/outbound"

// AnyPort stands for a port that is not known, where an entry is only
// suggested; no entry may have it.
const AnyPort = "PORT"

// Bounds of the annotation.
const (
	maxText  = 4096
	maxRules = 64
)

// Rule allows some addresses and ports.
type Rule struct {
	Name        string       // lower case, without a dot at its end; "" has a Prefix
	Wild        bool         // names one or more labels below Name
	Prefix      netip.Prefix // valid without a Name
	First, Last uint16       // ports
	UDP         bool
}

// Rules are what is allowed; none is nothing.
type Rules []Rule

// Parse reads the annotation. An error names the entry.
func Parse(text string) (Rules, error) {
	if len(text) > maxText {
		return nil, fmt.Errorf("is longer than %d bytes", maxText)
	}
	var out Rules
	for _, f := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == ' ' || r == '\n' || r == '\t' }) {
		if len(out) == maxRules {
			return nil, fmt.Errorf("has more than %d entries", maxRules)
		}
		r, err := parseRule(f)
		if err != nil {
			return nil, fmt.Errorf("entry %q: %w", f, err)
		}
		out = append(out, r)
	}
	return out, nil
}

func parseRule(s string) (r Rule, err error) {
	if scheme, _, found := strings.Cut(s, "://"); found {
		return r, fmt.Errorf("%q is a URL: write where it leads, HOST:PORT, without %s:// and path", s, scheme)
	}
	s, r.UDP = strings.CutSuffix(s, "/udp")
	if !r.UDP {
		s = strings.TrimSuffix(s, "/tcp") // as without it
	}
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return r, fmt.Errorf("a port is missing: want HOST:PORT, such as api.example.com:443, 10.0.0.0/8:5432 or [fd00::/8]:*")
	}
	host, port := s[:i], s[i+1:]
	if r.First, r.Last, err = parsePorts(port); err != nil {
		return r, err
	}
	inner, bracketed := strings.CutPrefix(host, "[")
	if bracketed {
		var closed bool
		if inner, closed = strings.CutSuffix(inner, "]"); !closed {
			return r, fmt.Errorf("a bracket is not closed")
		}
	} else if strings.Contains(host, ":") {
		return r, fmt.Errorf("an IPv6 address stands in brackets: [%s]:%s", host, port)
	}
	if strings.Contains(inner, "/") {
		p, err := netip.ParsePrefix(inner)
		if err != nil || p.Addr().Is4In6() {
			return r, fmt.Errorf("%s is not a range such as 10.0.0.0/8", inner)
		}
		if p != p.Masked() {
			return r, fmt.Errorf("%s is an address in a range; the range is %s", inner, p.Masked())
		}
		r.Prefix = p
		return r, nil
	}
	if a, err := netip.ParseAddr(inner); err == nil && a.Zone() == "" {
		a = a.Unmap()
		r.Prefix = netip.PrefixFrom(a, a.BitLen())
		return r, nil
	}
	if bracketed {
		return r, fmt.Errorf("%s is no IPv6 address", inner)
	}
	name, wild := strings.CutPrefix(host, "*.")
	if r.Wild = wild; !validName(name) {
		return r, fmt.Errorf("%q is neither a name, nor an address, nor a range", host)
	}
	r.Name = canonical(name)
	return r, nil
}

func parsePorts(s string) (first, last uint16, err error) {
	if s == "*" {
		return 1, 65535, nil
	}
	a, b, ranged := strings.Cut(s, "-")
	if !ranged {
		b = a
	}
	x, err1 := strconv.ParseUint(a, 10, 16)
	y, err2 := strconv.ParseUint(b, 10, 16)
	if err1 != nil || err2 != nil || x == 0 || y < x {
		return 0, 0, fmt.Errorf("%q is no port: want a number from 1 to 65535, a range such as 8000-8010, or *", s)
	}
	return uint16(x), uint16(y), nil
}

// canonical is how names are compared.
func canonical(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

func validName(name string) bool {
	name = canonical(name)
	if name == "" || len(name) > 253 {
		return false
	}
	digits := true
	for l := range strings.SplitSeq(name, ".") {
		if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
			return false
		}
		for _, c := range []byte(l) {
			letter := c >= 'a' && c <= 'z' || c == '_' || c == '-'
			if !letter && (c < '0' || c > '9') {
				return false
			}
			digits = digits && !letter
		}
	}
	return !digits // 1.2.3 or 10.0.0.256 was meant as an address
}

func (r *Rule) port(p uint16, udp bool) bool { return r.UDP == udp && r.First <= p && p <= r.Last }

func (r *Rule) names(name string) bool {
	switch {
	case r.Name == "":
		return false
	case r.Wild:
		return strings.HasSuffix(name, "."+r.Name)
	}
	return name == r.Name
}

// Resolves says whether a name may be looked up: what is asked of DNS leaves
// the node, too.
func (r Rules) Resolves(name string) bool {
	name = canonical(name)
	return slices.ContainsFunc(r, func(x Rule) bool { return x.names(name) })
}

// ByName says whether an address that a name stood for may be connected to.
func (r Rules) ByName(name string, port uint16, udp bool) bool {
	name = canonical(name)
	return slices.ContainsFunc(r, func(x Rule) bool { return x.names(name) && x.port(port, udp) })
}

// ByAddress says whether a rule has the address. within, if valid, is a range
// that is never reached by accident: only a rule inside it counts.
func (r Rules) ByAddress(a netip.Addr, port uint16, udp bool, within netip.Prefix) bool {
	return slices.ContainsFunc(r, func(x Rule) bool {
		if !x.Prefix.IsValid() || !x.Prefix.Contains(a) || !x.port(port, udp) {
			return false
		}
		return !within.IsValid() || (within.Contains(x.Prefix.Addr()) && x.Prefix.Bits() >= within.Bits())
	})
}

// Opens says whether a rule is for just that range, whatever the port.
func (r Rules) Opens(a netip.Addr, within netip.Prefix) bool {
	return slices.ContainsFunc(r, func(x Rule) bool {
		return x.Prefix.IsValid() && x.Prefix.Contains(a) && within.Contains(x.Prefix.Addr()) && x.Prefix.Bits() >= within.Bits()
	})
}

// special are ranges that no name and no wider range leads to.
var special = []struct {
	prefix netip.Prefix
	what   string
}{
	{netip.MustParsePrefix("127.0.0.0/8"), "the node's loopback"},
	{netip.MustParsePrefix("::1/128"), "the node's loopback"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local, where clouds have their metadata"},
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("fd00:ec2::254/128"), "a cloud's metadata"},
	{netip.MustParsePrefix("0.0.0.0/8"), "this network"},
	{netip.MustParsePrefix("::/128"), "unspecified"},
	{netip.MustParsePrefix("224.0.0.0/3"), "multicast or reserved"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
	{netip.MustParsePrefix("64:ff9b::/96"), "a way to IPv4 that hides the address"},
	{netip.MustParsePrefix("2002::/16"), "a way to IPv4 that hides the address"},
}

// Special says whether an address (unmapped) is in a range that only an
// explicit rule opens, and what it is.
func Special(a netip.Addr) (within netip.Prefix, what string, ok bool) {
	for _, s := range special {
		if s.prefix.Contains(a) {
			return s.prefix, s.what, true
		}
	}
	return netip.Prefix{}, "", false
}

// Ports are the TCP ports that the rules name; all says that it is every one.
// The kernel can be told these.
func (r Rules) Ports() (list []uint16, all bool) {
	for _, x := range r {
		if x.UDP {
			continue
		}
		if x.Last-x.First > 1024 {
			return nil, true
		}
		for p := int(x.First); p <= int(x.Last); p++ {
			if !slices.Contains(list, uint16(p)) {
				list = append(list, uint16(p))
			}
		}
	}
	return list, len(list) > 4096
}
