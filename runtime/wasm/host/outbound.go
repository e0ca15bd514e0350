package host

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/outbound"
)

// Outbound is what a guest may connect to. Nothing of it is nothing.
type Outbound struct {
	// Allow is the annotation dunlin.dev/outbound, as it is.
	Allow string `json:"allow,omitempty"`
	// DNS are the servers (ip:port) that know names, Search the domains that
	// short names are looked for in.
	DNS    []string `json:"dns,omitempty"`
	Search []string `json:"search,omitempty"`
}

// Refusal is one destination that a guest asked for and may not reach.
type Refusal struct {
	What string `json:"what"`
	Why  string `json:"why"`
	// Entry of the annotation that would allow it.
	Entry string `json:"entry"`
}

const (
	// complaints are how many different refusals are told in the guest's log.
	complaints = 8
	// namesMost and addressesMost bound what is remembered of names: of each
	// rule's name so many addresses, the oldest ones are forgotten.
	namesMost     = 64
	addressesMost = 64
)

// gate decides what a guest may connect to. It is the guest's thread's.
type gate struct {
	rules    outbound.Rules
	resolver resolver
	log      io.Writer // the guest's standard error; may be nil
	told     map[string]bool
	// note hears all refusals so far, each time there is another; may be nil.
	note    func([]Refusal)
	refuses []Refusal
	// known are the addresses that names stood for. What is connected to is an
	// address, so that is what is checked: a name that means something else by
	// now opens nothing that it did not open.
	known map[string][]netip.Addr
	names []string // of known, that which was asked for last at the end
	local func(netip.Addr) bool
}

func newGate(o Outbound, log io.Writer) (*gate, error) {
	rules, err := outbound.Parse(o.Allow)
	if err != nil {
		return nil, fmt.Errorf("annotation %s %w", outbound.Annotation, err)
	}
	g := &gate{rules: rules, log: log, told: map[string]bool{}, known: map[string][]netip.Addr{}, local: isLocal}
	g.resolver.search = o.Search
	for _, s := range o.DNS {
		a, err := netip.ParseAddrPort(s)
		if err != nil {
			return nil, fmt.Errorf("DNS server %q: %w", s, err)
		}
		g.resolver.servers = append(g.resolver.servers, a)
	}
	return g, nil
}

// refused tells the guest's user, once for each destination.
func (g *gate) refused(what, why, hint string) {
	if g.told[what] || len(g.told) > complaints {
		return
	}
	g.told[what] = true
	if g.note != nil && len(g.told) <= complaints {
		g.refuses = append(g.refuses, Refusal{what, why, hint})
		g.note(g.refuses)
	}
	if g.log == nil {
		return
	}
	text := fmt.Sprintf("dunlin: %s is refused: %s; to allow it, annotate the pod with %s: %q\n", what, why, outbound.Annotation, hint)
	if strings.Contains(hint, ":"+outbound.AnyPort) {
		text = strings.TrimSuffix(text, "\n") + ", where " + outbound.AnyPort + " is the one that it connects to\n"
	}
	if len(g.told) > complaints {
		text = fmt.Sprintf("dunlin: more destinations are refused, which are not told (annotation %s)\n", outbound.Annotation)
	}
	_, _ = io.WriteString(g.log, text)
}

// entry is what the annotation would have to say of a host; port 0 is one that
// is not known yet.
func entry(host string, port uint16, udp bool) string {
	p := outbound.AnyPort
	if port != 0 {
		p = strconv.Itoa(int(port))
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if udp {
		p += "/udp"
	}
	return host + ":" + p
}

// none says why nothing is allowed that no entry has.
func (g *gate) none() string {
	if len(g.rules) == 0 {
		return "the pod has no such annotation"
	}
	return "no entry of the annotation has it"
}

// localhost resolves the names of the loopback, which DNS is not asked for (RFC
// 6761): no name opens it, an entry for just its addresses does.
func (g *gate) localhost(name string, port uint16, udp bool) (out []netip.Addr, errno uint32) {
	for _, a := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
		if within, _, _ := outbound.Special(a); g.rules.Opens(a, within) {
			out = append(out, a)
		}
	}
	if len(out) == 0 {
		g.refused("the name "+clipName(name), "that is the node's loopback, which only an entry for its address opens", entry("127.0.0.1", port, udp))
		return nil, eAcces
	}
	return out, 0
}

func isLocalhost(name string) bool {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	return name == "localhost" || strings.HasSuffix(name, ".localhost")
}

// resolve finds the addresses of a name that may be looked up. What they must
// not be reached by that name at is left out. The port is what the guest means
// to connect to, 0 if it did not say.
func (g *gate) resolve(name string, port uint16, udp bool) ([]netip.Addr, uint32) {
	if a, err := netip.ParseAddr(name); err == nil {
		return []netip.Addr{a.Unmap()}, 0
	}
	if isLocalhost(name) {
		return g.localhost(name, port, udp)
	}
	if !g.rules.Resolves(name) {
		g.refused("the name "+clipName(name), g.none(), entry(clipName(name), port, udp))
		return nil, eAcces
	}
	list, err := g.resolver.lookup(name)
	switch {
	case err == errNoName: //nolint:errorlint // a sentinel of this file's neighbour, never wrapped
		return nil, eNoent
	case err != nil:
		return nil, eAgain
	}
	var out []netip.Addr
	for _, a := range list {
		if within, what, special := g.special(a); special && !g.rules.Opens(a, within) {
			g.refused(fmt.Sprintf("the name %s for %s", clipName(name), a), "that is "+what+", which no name opens", entry(a.String(), port, udp))
			continue
		}
		out = append(out, a)
	}
	if len(out) == 0 {
		return nil, eAcces
	}
	g.remember(name, out)
	return out, 0
}

func (g *gate) remember(name string, list []netip.Addr) {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if i := slices.Index(g.names, name); i >= 0 {
		g.names = slices.Delete(g.names, i, i+1)
	} else if len(g.names) >= namesMost {
		delete(g.known, g.names[0])
		g.names = g.names[1:]
	}
	g.names = append(g.names, name)
	var all []netip.Addr
	for _, a := range g.known[name] {
		if !containsAddr(list, a) {
			all = append(all, a)
		}
	}
	all = append(all, list...)
	g.known[name] = all[max(0, len(all)-addressesMost):]
}

func containsAddr(list []netip.Addr, a netip.Addr) bool {
	for _, x := range list {
		if x == a {
			return true
		}
	}
	return false
}

// special says what an address is that no name and no wide range opens.
func (g *gate) special(a netip.Addr) (within netip.Prefix, what string, ok bool) {
	if within, what, ok = outbound.Special(a); ok {
		return within, what, true
	}
	return netip.PrefixFrom(a, a.BitLen()), "an address of the node", g.local(a)
}

// may says whether an address may be connected to, and tells if not.
func (g *gate) may(to netip.AddrPort, udp bool) bool {
	a := to.Addr().Unmap()
	within, what, special := g.special(a)
	if !special {
		within = netip.Prefix{}
	}
	if g.rules.ByAddress(a, to.Port(), udp, within) {
		return true
	}
	why, host, of := g.none(), a.String(), ""
	switch {
	case special && len(g.rules) > 0:
		why = "that is " + what + ", which only an entry for just that range opens"
	case !special:
		for i := len(g.names) - 1; i >= 0; i-- { // the newest name is what was most likely meant
			name := g.names[i]
			if !containsAddr(g.known[name], a) {
				continue
			}
			if g.rules.ByName(name, to.Port(), udp) {
				return true
			}
			if of == "" {
				host, of = name, a.String()+", "
			}
		}
	}
	protocol := "tcp"
	if udp {
		protocol = "udp"
	}
	g.refused(fmt.Sprintf("a connection to %s (%s%s)", entry(host, to.Port(), false), of, protocol), why, entry(host, to.Port(), udp))
	return false
}

func clipName(s string) string { return s[:min(len(s), 253)] }

// isLocal asks the kernel whether an address is one of this machine's: then it
// is also the one that it would be reached from. No packet is sent.
func isLocal(a netip.Addr) bool {
	to := netip.AddrPortFrom(a, 9)
	fd, err := socketTo(to, unix.SOCK_DGRAM)
	if err != nil {
		return false // then nothing can be reached at all
	}
	defer func() { _ = unix.Close(fd) }()
	if unix.Connect(fd, sockaddrOf(to)) != nil {
		return false
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return true
	}
	from, ok := addrPortOf(sa)
	return !ok || from.Addr().Unmap() == a
}
