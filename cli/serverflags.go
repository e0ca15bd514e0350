package cli

import (
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
	"github.com/dunlin-project/dunlin/controlplane/scheduler"
	"github.com/dunlin-project/dunlin/pki"
)

// serverValues are a server's flags that are more than text.
type serverValues struct {
	pods, services []netip.Prefix
	profiles       []*scheduler.Profile
	join           *pki.JoinLine // nil is none
	peers          []string      // host:port
}

// values reads a server's flags, and the files that they name. It refuses what
// no server can have, before anything is made.
func (o serverOptions) values() (v serverValues, err error) {
	if err := checkAddress("listen", o.listen); err != nil {
		return v, err
	}
	for _, h := range o.advertise {
		if err := checkHost(h); err != nil {
			return v, err
		}
	}
	for _, n := range o.tlsNames {
		if !isHost(strings.TrimPrefix(n, "*.")) {
			return v, usagef("--tls-names=%s: names and addresses without a port are wanted, such as pi-1.lan,10.0.0.5", n)
		}
	}
	if o.unreachable < 0 {
		return v, usagef("--default-unreachable-toleration-seconds=%d: must not be negative", o.unreachable)
	}
	if v.pods, err = prefixes("pod-cidr", o.podCIDRs); err != nil {
		return v, err
	}
	if v.services, err = prefixes("service-cidr", o.svcCIDRs); err != nil {
		return v, err
	}
	if err := checkRanges(v.pods, v.services); err != nil {
		return v, err
	}
	if v.profiles, err = o.schedulerProfiles(); err != nil {
		return v, err
	}
	if err := o.checkTokenFile(); err != nil {
		return v, err
	}
	if v.join, err = o.joinServer(); err != nil {
		return v, err
	}
	for _, p := range o.peers {
		hp, err := pki.WithPort(p)
		if host, port, serr := net.SplitHostPort(hp); err != nil || serr != nil || !isHost(host) || !isPort(port) {
			return v, usagef("--peers=%s: an address or a name, with or without a port, is wanted: 10.0.0.5, [fd00::5]:6443 or pi-1.lan", p)
		}
		v.peers = append(v.peers, hp)
	}
	return v, nil
}

// checkHost refuses what nodes cannot reach a server at.
func checkHost(h string) error {
	host := h
	if name, port, err := net.SplitHostPort(h); err == nil {
		if host = name; !isPort(port) {
			return usagef("--advertise=%s: %q is no port: a number from 1 to 65535 is wanted", h, port)
		}
	}
	host = trimBrackets(host)
	if ip, err := netip.ParseAddr(host); err == nil && ip.IsUnspecified() {
		return usagef("--advertise=%s: %s stands for all addresses of a machine; one that nodes can reach is wanted", h, host)
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.Zone() != "" {
		return usagef("--advertise=%s: the zone %q is this machine's name for its card, and nothing to others: give another address or a name. A node on the same link can still join by this one, with its own card's name: --join LINE, where behind the @ stands [%s%%CARD]:6443", h, ip.Zone(), ip.WithZone(""))
	}
	if !isHost(host) {
		return usagef("--advertise=%s: an address or a name, with or without a port: 10.0.0.5, [fd00::5]:6443 or pi-1.lan", h)
	}
	return nil
}

// isHost says whether it is an address or a name. A name does not end in a
// number (RFC 1123 2.1), so 300.1.1.1 is an address with a slip in it.
func isHost(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	_, err := strconv.Atoi(host[strings.LastIndexByte(host, '.')+1:])
	return err != nil && len(validation.IsDNS1123Subdomain(strings.ToLower(host))) == 0
}

// isPort says whether it is one that can be dialled.
func isPort(port string) bool {
	n, err := strconv.ParseUint(port, 10, 16)
	return err == nil && n > 0
}

// checkTokenFile reads the file of tokens as the server does later.
func (o serverOptions) checkTokenFile() error {
	if o.tokenFile == "" {
		return nil
	}
	text, err := os.ReadFile(o.tokenFile)
	if err != nil {
		return usagef("--token-file: %w", err)
	}
	if _, err := auth.ParseTokenFile(text); err != nil {
		return usagef("--token-file=%s: %w", o.tokenFile, err)
	}
	return nil
}

// schedulerProfiles reads the file of profiles; none without one.
func (o serverOptions) schedulerProfiles() ([]*scheduler.Profile, error) {
	if o.profiles == "" {
		return nil, nil
	}
	text, err := os.ReadFile(o.profiles)
	if err != nil {
		return nil, usagef("--scheduler-profiles: %w", err)
	}
	list, err := scheduler.ParseProfiles(text)
	if err != nil {
		return nil, usagef("--scheduler-profiles=%s: %w", o.profiles, err)
	}
	return list, nil
}

// joinServer reads the join line; nil is none.
func (o serverOptions) joinServer() (*pki.JoinLine, error) {
	if o.join == "" {
		return nil, nil
	}
	jl, err := pki.ParseJoinLine(o.join)
	if err != nil {
		return nil, usagef("--join: %w", err)
	}
	return &jl, nil
}

func trimBrackets(h string) string {
	if len(h) > 1 && h[0] == '[' && h[len(h)-1] == ']' {
		return h[1 : len(h)-1]
	}
	return h
}

func prefixes(flag string, list []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return nil, usagef("--%s=%s: not a range such as 10.42.0.0/16", flag, s)
		}
		if p != p.Masked() {
			return nil, usagef("--%s=%s: %s is an address in a range; the range is %s", flag, s, p.Addr(), p.Masked())
		}
		out = append(out, p)
	}
	return out, nil
}

// The longest prefixes of ranges. A node gets a /24 of the pods' (/64 in IPv6);
// of the services', the first address is the API server's and the tenth that
// of DNS.
const (
	podBits4, podBits6         = 24, 64
	serviceBits4, serviceBits6 = 28, 124
)

// checkRanges refuses ranges that are too small, more than one of a family,
// and those that share addresses.
func checkRanges(pods, services []netip.Prefix) error {
	if err := apart(pods, services); err != nil {
		return err
	}
	for _, l := range []struct {
		flag, why    string
		list         []netip.Prefix
		bits4, bits6 int
	}{
		{"--pod-cidr", "each node gets so many addresses of it", pods, podBits4, podBits6},
		{"--service-cidr", "its first address is the API server's, its tenth that of DNS", services, serviceBits4, serviceBits6},
	} {
		seen := map[bool]netip.Prefix{}
		for _, p := range l.list {
			most := l.bits6
			if p.Addr().Is4() {
				most = l.bits4
			}
			if p.Bits() > most {
				return usagef("%s=%s: the range is too small: a /%d is the least, since %s", l.flag, p, most, l.why)
			}
			if other, twice := seen[p.Addr().Is4()]; twice {
				return usagef("%s=%s,%s: one range of IPv4, one of IPv6 or one of each is wanted", l.flag, other, p)
			}
			seen[p.Addr().Is4()] = p
		}
		if len(l.list) == 0 {
			return usagef("%s=: a range is wanted; leave the flag out for the usual one", l.flag)
		}
	}
	return nil
}

// apart refuses ranges that share addresses, in one list or two.
func apart(pods, services []netip.Prefix) error {
	type named struct {
		flag string
		p    netip.Prefix
	}
	var all []named
	for _, p := range pods {
		all = append(all, named{"--pod-cidr", p})
	}
	for _, p := range services {
		all = append(all, named{"--service-cidr", p})
	}
	for i, a := range all {
		for _, b := range all[i+1:] {
			if a.p.Overlaps(b.p) {
				return usagef("%s=%s and %s=%s share addresses: they must lie apart", a.flag, a.p, b.flag, b.p)
			}
		}
	}
	return nil
}
