package proxy

import (
	"encoding/binary"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// A UDP socket for all addresses has to answer from the one that was asked, or
// clients would not know the answer for theirs. The kernel says with each
// datagram where it was sent to, and takes that back with the answer.

// oobRoom is what the kernel needs for what it says: one of either family.
var oobRoom = unix.CmsgSpace(unix.SizeofInet6Pktinfo) + unix.CmsgSpace(unix.SizeofInet4Pktinfo)

// tellAddresses has a socket say where datagrams were sent to. One of IPv6 says
// so for both families.
func tellAddresses(network string, c syscall.RawConn) (err error) {
	cerr := c.Control(func(fd uintptr) {
		if network == "udp4" {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_PKTINFO, 1)
			return
		}
		err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1)
	})
	if cerr != nil {
		return cerr
	}
	return err
}

// asked is the address that a datagram was sent to, and what makes the answer
// come from there; neither if the kernel did not say. Pure.
func asked(oob []byte) (local netip.Addr, from []byte) {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.Addr{}, nil
	}
	for i := range msgs {
		m := &msgs[i]
		switch {
		case m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
			a := netip.AddrFrom16([16]byte(m.Data[:16]))
			if a.IsMulticast() {
				return netip.Addr{}, nil // the kernel chooses
			}
			info := unix.Inet6Pktinfo{Addr: a.As16()}
			if a.IsLinkLocalUnicast() && !a.Is4In6() {
				info.Ifindex = binary.NativeEndian.Uint32(m.Data[16:])
			}
			return a.Unmap(), unix.PktInfo6(&info)
		case m.Header.Level == unix.SOL_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
			spec := [4]byte(m.Data[4:8]) // this machine's, also where a broadcast was sent to
			return netip.AddrFrom4(spec), unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: spec})
		}
	}
	return netip.Addr{}, nil
}
