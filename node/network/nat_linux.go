package network

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// NAT of container pods: out of the node their packets have its address, and
// host ports lead to them. All rules are in one table of nftables with the
// network's name, and each host port's has its pod's uid with it.

// publish makes the rules that a pod needs, which the host reaches by link. Out
// of the node IPv6 is routed only; its host ports need rules as IPv4's do.
func (n *Namespaced) publish(uid string, ips []netip.Addr, ports []HostPort, link string) error {
	var v4, v6 netip.Addr
	for _, ip := range ips {
		if ip.Is4() {
			v4 = ip
		} else {
			v6 = ip
		}
	}
	if err := n.free(uid, ports, v4.IsValid(), v6.IsValid()); err != nil {
		return err
	}
	var six error
	if v6.IsValid() && len(ports) > 0 {
		if six = n.rules6(uid, v6, ports); six != nil {
			six = fmt.Errorf("host ports of IPv6 need nftables (kernel modules nf_tables, nft_nat, nft_fib_ipv6): %w", six)
		}
	}
	if !v4.IsValid() {
		return six
	}
	err := n.rules(uid, v4, ports, link)
	if err == nil {
		n.natError = six // a small board's kernel may have IPv4's modules alone, and serves that
	}
	switch {
	case err == nil:
		return nil
	case len(ports) == 0:
		// Pods of this node reach each other without.
		n.natError = fmt.Errorf("containers reach nothing outside of the node, which needs nftables (kernel modules nf_tables, nft_nat, nft_masq): %w", err)
		return nil
	}
	return fmt.Errorf("host ports need nftables (kernel modules nf_tables, nft_nat, nft_masq): %w", err)
}

// NATError says why containers do not reach what is outside the node, or are
// not reached by IPv6's host ports; nil when they do, or were not asked to.
func (n *Namespaced) NATError() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.natError
}

func (n *Namespaced) table() *nftables.Table {
	return &nftables.Table{Name: n.name, Family: nftables.TableFamilyIPv4}
}

func (n *Namespaced) table6() *nftables.Table {
	return &nftables.Table{Name: n.name, Family: nftables.TableFamilyIPv6}
}

func (n *Namespaced) chains(t *nftables.Table) (pre, out, post *nftables.Chain) {
	chain := func(name string, hook *nftables.ChainHook, p *nftables.ChainPriority) *nftables.Chain {
		return &nftables.Chain{Name: name, Table: t, Type: nftables.ChainTypeNAT, Hooknum: hook, Priority: p}
	}
	return chain("prerouting", nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest),
		chain("output", nftables.ChainHookOutput, nftables.ChainPriorityNATDest),
		chain("postrouting", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource)
}

func (n *Namespaced) rules(uid string, ip netip.Addr, ports []HostPort, link string) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	t := n.table()
	pre, out, post := n.chains(t)
	c.AddTable(t)
	for _, ch := range []*nftables.Chain{pre, out, post} {
		c.AddChain(ch)
	}
	if err := c.Flush(); err != nil {
		return err
	}
	if !n.masqueraded {
		if err := n.switches.ipv4(); err != nil {
			return fmt.Errorf("forward packets: %w", err)
		}
		c.FlushChain(post)
		for _, r := range n.ranges {
			if r.prefix.Addr().Is4() {
				c.AddRule(&nftables.Rule{Table: t, Chain: post, Exprs: n.masquerade(r.prefix)})
			}
		}
		// Host ports on 127.0.0.1 come from there.
		c.AddRule(&nftables.Rule{Table: t, Chain: post, Exprs: fromLoopback()})
	}
	if err := n.dropRules(c, uid, pre, out, post); err != nil {
		return err
	}
	n.addPorts(c, uid, ip, ports, pre, out, post)
	if err := c.Flush(); err != nil {
		return err
	}
	n.masqueraded, n.natError = true, nil
	if len(ports) > 0 {
		return switchOn("ipv4/conf/" + link + "/route_localnet")
	}
	return nil
}

// rules6 are those of host ports on the node's IPv6 addresses; ::1 leads
// nowhere, since the kernel routes nothing from there.
func (n *Namespaced) rules6(uid string, ip netip.Addr, ports []HostPort) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	t := n.table6()
	pre, out, post := n.chains(t)
	c.AddTable(t)
	for _, ch := range []*nftables.Chain{pre, out, post} {
		c.AddChain(ch)
	}
	if err := c.Flush(); err != nil {
		return err
	}
	if err := n.dropRules(c, uid, pre, out, post); err != nil {
		return err
	}
	n.addPorts(c, uid, ip, ports, pre, out, post)
	return c.Flush()
}

// addPorts makes the rules of the host ports that lead to ip.
func (n *Namespaced) addPorts(c *nftables.Conn, uid string, ip netip.Addr, ports []HostPort, pre, out, post *nftables.Chain) {
	led := false
	for _, p := range ports {
		if p.IP.IsValid() && p.IP.Is4() != ip.Is4() {
			continue
		}
		led = true
		for _, ch := range []*nftables.Chain{pre, out} {
			c.AddRule(&nftables.Rule{Table: ch.Table, Chain: ch, UserData: mark(uid), Exprs: dnat(p, ip)})
		}
	}
	if led {
		c.AddRule(&nftables.Rule{Table: post.Table, Chain: post, UserData: mark(uid), Exprs: toItself(ip)})
	}
}

// mark is a rule's comment, as nft shows it (libnftnl's udata, type 0).
func mark(uid string) []byte {
	text := append([]byte("pod "+uid), 0)
	return append([]byte{0, byte(len(text))}, text...)
}

// dropRules takes a pod's rules away in the same transaction.
func (n *Namespaced) dropRules(c *nftables.Conn, uid string, chains ...*nftables.Chain) error {
	for _, ch := range chains {
		rules, err := c.GetRules(ch.Table, ch)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return err
		}
		for _, r := range rules {
			if bytes.Equal(r.UserData, mark(uid)) {
				if err := c.DelRule(r); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// unpublish takes a pod's host ports away.
func (n *Namespaced) unpublish(uid string) error {
	c, err := nftables.New()
	if err != nil {
		return nil //nolint:nilerr // there can be no rules then
	}
	for _, t := range []*nftables.Table{n.table(), n.table6()} {
		pre, out, post := n.chains(t)
		err := n.dropRules(c, uid, pre, out, post)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) || err != nil && strings.Contains(err.Error(), "no such file") {
			continue
		}
		if err != nil {
			return fmt.Errorf("remove host ports: %w", err)
		}
		if err := c.Flush(); err != nil {
			return fmt.Errorf("remove host ports: %w", err)
		}
	}
	return nil
}

// removeRules removes the whole tables.
func (n *Namespaced) removeRules() error {
	c, err := nftables.New()
	if err != nil {
		return nil //nolint:nilerr // there can be no rules then
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		tables, err := c.ListTablesOfFamily(family)
		if err != nil {
			continue // a kernel without nftables
		}
		for _, t := range tables {
			if t.Name != n.name {
				continue
			}
			c.DelTable(t)
			if err := c.Flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

func ifname(s string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, s)
	return b
}

func saddr(reg uint32) expr.Any {
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4}
}

func from(p netip.Prefix) []expr.Any {
	return []expr.Any{
		saddr(1), &expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask(p), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Masked().Addr().AsSlice()},
	}
}

func notTo(p netip.Prefix) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask(p), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: p.Masked().Addr().AsSlice()},
	}
}

func mask(p netip.Prefix) []byte {
	m := make([]byte, 4)
	for i := range p.Bits() {
		m[i/8] |= 0x80 >> (i % 8)
	}
	return m
}

// masquerade: from a pod, to none of this node, and out by a link that is none
// of ours.
func (n *Namespaced) masquerade(p netip.Prefix) []expr.Any {
	return append(append(from(p), notTo(p)...),
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte(vethPrefix)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: ifname(n.hostLink())},
		&expr.Masq{})
}

// fromLoopback: a host port on 127.0.0.1 leads to a pod, by our link or by that
// of a CNI plugin.
func fromLoopback() []expr.Any {
	return append(from(netip.MustParsePrefix("127.0.0.0/8")),
		&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: ifname("lo")},
		&expr.Masq{})
}

// toItself: a pod that asks for its own host port must not see its own address
// as the one that asks: it would answer past the node.
func toItself(ip netip.Addr) []expr.Any {
	offset, size := uint32(12), uint32(4)
	if ip.Is6() {
		offset, size = 8, 16
	}
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ip.AsSlice()},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset + size, Len: size},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ip.AsSlice()},
		&expr.Masq{},
	}
}

// dnat: what is for this node's port goes to the pod's.
func dnat(p HostPort, ip netip.Addr) []expr.Any {
	proto := byte(unix.IPPROTO_TCP)
	if p.Protocol == "UDP" {
		proto = unix.IPPROTO_UDP
	}
	port := func(n int32) []byte { return []byte{byte(n >> 8), byte(n)} }
	local := make([]byte, 4)
	local[0] = unix.RTN_LOCAL // host byte order, of the machines that this runs on
	var one []expr.Any
	family, offset, size := uint32(unix.NFPROTO_IPV4), uint32(16), uint32(4)
	if ip.Is6() {
		family, offset, size = unix.NFPROTO_IPV6, 24, 16
	}
	if p.IP.IsValid() {
		one = []expr.Any{
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: size},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.IP.AsSlice()},
		}
	}
	return append(one,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: port(p.Host)},
		&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: local},
		&expr.Immediate{Register: 1, Data: ip.AsSlice()},
		&expr.Immediate{Register: 2, Data: port(p.Container)},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: 1, RegProtoMin: 2, Specified: true})
}
