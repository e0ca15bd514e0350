package proxy

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// silenceLook is how often connections are looked at for a silent side.
	silenceLook = 10 * time.Second
	// silentGone is how long a side may acknowledge nothing where no Service
	// counts on the endpoint any more: its machine is off, as the cluster noticed.
	silentGone = 30 * time.Second
	// silentMost is so whatever the tables say. The kernel's keepalive gives up a
	// connection on which nothing is under way after as long (Go's 15 s and nine
	// times 15 s), and one with bytes under way after a quarter of an hour.
	silentMost = 150 * time.Second
	// silentAsked is how often a side must have been asked in vain: one that
	// reads nothing is asked every two minutes, and answers.
	silentAsked = 2
	// tcpClosed is TCP_CLOSE of the kernel's tcp_states.h.
	tcpClosed = 7
)

// tcpInfo is what the kernel says of a connection; nil without one.
func tcpInfo(fd uintptr) *unix.TCPInfo {
	i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return nil
	}
	return i
}

// silent says whether the other side has acknowledged nothing for so long,
// though the kernel asked more than once: with bytes, with probes of a full
// window, or to keep the connection alive.
func silent(c *net.TCPConn, after time.Duration) bool {
	rc, err := c.SyscallConn()
	if err != nil {
		return false
	}
	is := false
	_ = rc.Control(func(fd uintptr) {
		i := tcpInfo(fd)
		is = i != nil && max(i.Retransmits, i.Probes) >= silentAsked &&
			time.Duration(min(i.Last_ack_recv, i.Last_data_recv))*time.Millisecond >= after
	})
	return is
}

// waitReset returns once the other side, which has sent its last byte, is not
// there any more, or the connection was closed here. It costs nothing while it
// waits: the kernel wakes it.
func waitReset(c *net.TCPConn) {
	rc, err := c.SyscallConn()
	if err != nil {
		return
	}
	_ = rc.Read(func(fd uintptr) bool { return isReset(fd) })
}

func isReset(fd uintptr) bool {
	i := tcpInfo(fd)
	return i == nil || i.State == tcpClosed
}
