package host

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// Names are asked of the node's DNS, on the guest's own thread: the guest
// waits for the answer. package net's resolver would need files that the
// sandbox does not show, and goroutines.

const (
	dnsWait    = 2 * time.Second // for one server
	dnsTries   = 2               // of each server
	dnsAnswer  = 4096            // bytes
	dnsAnswers = 16              // addresses of one name
)

// Errors of a lookup.
var (
	errNoName  = errors.New("no such name")
	errNoReply = errors.New("no DNS server answers")
)

// resolver asks servers in turn.
type resolver struct {
	servers []netip.AddrPort
	search  []string
}

// lookup finds the addresses of a name, IPv4 first.
func (r *resolver) lookup(name string) ([]netip.Addr, error) {
	if len(r.servers) == 0 {
		return nil, errNoReply
	}
	rooted := strings.HasSuffix(name, ".")
	var list []string
	for _, s := range r.search {
		list = append(list, name+"."+strings.TrimSuffix(s, ".")+".")
	}
	switch {
	case rooted:
		list = []string{name}
	case strings.Contains(name, "."):
		list = append([]string{name + "."}, list...)
	default:
		list = append(list, name+".")
	}
	failed := errNoName
	for _, full := range list {
		out, err := r.absolute(full)
		if len(out) > 0 {
			return out, nil
		}
		if err != nil && !errors.Is(err, errNoName) {
			failed = err
		}
	}
	return nil, failed
}

func (r *resolver) absolute(name string) (out []netip.Addr, failed error) {
	for _, kind := range []dnsmessage.Type{dnsmessage.TypeA, dnsmessage.TypeAAAA} {
		found, err := r.ask(name, kind)
		if err != nil {
			failed = err
		}
		out = append(out, found...)
	}
	return out[:min(len(out), dnsAnswers)], failed
}

func (r *resolver) ask(name string, kind dnsmessage.Type) ([]netip.Addr, error) {
	n, err := dnsmessage.NewName(name)
	if err != nil {
		return nil, errNoName
	}
	var id [2]byte
	if _, err := rand.Read(id[:]); err != nil {
		return nil, err
	}
	q := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: binary.BigEndian.Uint16(id[:]), RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: n, Type: kind, Class: dnsmessage.ClassINET}},
	}
	packet, err := q.Pack()
	if err != nil {
		return nil, errNoName
	}
	for range dnsTries {
		for _, s := range r.servers {
			b, err := exchange(s, packet)
			if err != nil {
				continue
			}
			out, err := addressesIn(b, &q)
			if err == nil || errors.Is(err, errNoName) {
				return out, err
			}
		}
	}
	return nil, errNoReply
}

// addressesIn reads an answer to q.
func addressesIn(b []byte, q *dnsmessage.Message) (out []netip.Addr, err error) {
	var p dnsmessage.Parser
	h, err := p.Start(b)
	if err != nil {
		return nil, fmt.Errorf("answer of DNS: %w", err)
	}
	asked, err := p.Question()
	if err != nil || !h.Response || h.ID != q.ID || asked.Type != q.Questions[0].Type || !strings.EqualFold(asked.Name.String(), q.Questions[0].Name.String()) {
		return nil, errors.New("an answer to another question")
	}
	switch h.RCode {
	case dnsmessage.RCodeSuccess:
	case dnsmessage.RCodeNameError:
		return nil, errNoName
	default:
		return nil, fmt.Errorf("DNS says %s", h.RCode)
	}
	if err := p.SkipAllQuestions(); err != nil {
		return nil, err
	}
	for len(out) < dnsAnswers {
		rh, err := p.AnswerHeader()
		if err != nil {
			break // the end, or damage: what came before is good
		}
		switch rh.Type {
		case dnsmessage.TypeA:
			if a, err := p.AResource(); err == nil {
				out = append(out, netip.AddrFrom4(a.A))
			}
		case dnsmessage.TypeAAAA:
			if a, err := p.AAAAResource(); err == nil {
				out = append(out, netip.AddrFrom16(a.AAAA).Unmap())
			}
		default:
			if p.SkipAnswer() != nil {
				return out, nil
			}
		}
	}
	return out, nil
}

// exchange sends a packet and waits for one: from that server alone, since the
// socket is connected. An answer that does not fit is cut off; so many
// addresses nobody needs.
func exchange(server netip.AddrPort, packet []byte) ([]byte, error) {
	fd, err := socketTo(server, unix.SOCK_DGRAM)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Connect(fd, sockaddrOf(server)); err != nil {
		return nil, err
	}
	if _, err := unix.Write(fd, packet); err != nil {
		return nil, err
	}
	until := time.Now().Add(dnsWait)
	b := make([]byte, dnsAnswer)
	for {
		if err := pollUntil(fd, unix.POLLIN, until); err != nil {
			return nil, err
		}
		n, err := unix.Read(fd, b)
		if err == unix.EAGAIN || err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n >= 2 && b[0] == packet[0] && b[1] == packet[1] {
			return b[:n], nil
		}
	}
}

// pollUntil waits for a descriptor; the zero time is for ever.
func pollUntil(fd int, events int16, until time.Time) error {
	for {
		ms := -1
		if !until.IsZero() {
			left := time.Until(until)
			if left <= 0 {
				return unix.EAGAIN
			}
			ms = int(left/time.Millisecond) + 1
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, ms)
		switch {
		case err == unix.EINTR, err == nil && n == 0:
		default:
			return err
		}
	}
}

func socketTo(a netip.AddrPort, kind int) (int, error) {
	family := unix.AF_INET6
	if a.Addr().Is4() {
		family = unix.AF_INET
	}
	return unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
}

func sockaddrOf(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// addrPortOf is the address of a socket; false if it is of no IP family.
func addrPortOf(sa unix.Sockaddr) (netip.AddrPort, bool) {
	switch s := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), uint16(s.Port)), true
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(s.Addr), uint16(s.Port)), true
	}
	return netip.AddrPort{}, false
}
