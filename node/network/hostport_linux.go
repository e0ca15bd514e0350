package network

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// free refuses host ports that another process of the machine has: the rule
// would take what is for that one away from it, in silence. A pod whose rules
// are there keeps its ports.
func (n *Namespaced) free(uid string, ports []HostPort, v4, v6 bool) error {
	if len(ports) == 0 || n.published(uid) {
		return nil
	}
	for _, p := range ports {
		var err error
		if v4 && !p.IP.Is6() {
			err = bindable(p, false)
		}
		if err == nil && v6 && !p.IP.Is4() {
			err = bindable(p, true)
		}
		switch {
		case errors.Is(err, unix.EADDRINUSE):
			flag := "t"
			if p.Protocol == "UDP" {
				flag = "u"
			}
			at := ""
			if p.IP.IsValid() {
				at = p.IP.String()
			}
			if p.IP.Is6() {
				at = "[" + at + "]"
			}
			return fmt.Errorf("hostPort: %w; the pod waits until that one ends (ss -ln%sp sport = :%d), or give it another hostPort",
				&PortInUseError{Address: fmt.Sprintf("%s:%d/%s", at, p.Host, p.Protocol), Err: err}, flag, p.Host)
		case errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.EAFNOSUPPORT): // the machine may get the address yet, or has no IPv6 at all
		case err != nil:
			return fmt.Errorf("hostPort %d/%s: %w", p.Host, p.Protocol, err)
		}
	}
	return nil
}

// hasIPv6 says whether pods get addresses of it.
func (n *Namespaced) hasIPv6() bool {
	for _, r := range n.ranges {
		if r.prefix.Addr().Is6() {
			return true
		}
	}
	return false
}

// published says whether the rules of a pod's host ports are there.
func (n *Namespaced) published(uid string) bool {
	c, err := nftables.New()
	if err != nil {
		return false
	}
	for _, t := range []*nftables.Table{n.table(), n.table6()} {
		pre, _, _ := n.chains(t)
		rules, err := c.GetRules(t, pre)
		if err != nil {
			continue
		}
		for _, r := range rules {
			if bytes.Equal(r.UserData, mark(uid)) {
				return true
			}
		}
	}
	return false
}

// bindable tries a port without listening there, which nobody notices.
func bindable(p HostPort, v6 bool) error {
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	kind := unix.SOCK_STREAM
	if p.Protocol == "UDP" {
		kind = unix.SOCK_DGRAM
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if kind == unix.SOCK_STREAM {
		// Connections that are over, or go on, are in nobody's way; listeners are.
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
			return err
		}
	}
	if v6 {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return err
		}
		at := netip.IPv6Unspecified()
		if p.IP.IsValid() {
			at = p.IP
		}
		return unix.Bind(fd, &unix.SockaddrInet6{Port: int(p.Host), Addr: at.As16()})
	}
	at := netip.IPv4Unspecified()
	if p.IP.IsValid() {
		at = p.IP
	}
	return unix.Bind(fd, &unix.SockaddrInet4{Port: int(p.Host), Addr: at.As4()})
}
