package host

import (
	"context"
	"net/netip"
	"time"

	"github.com/tetratelabs/wazero/api"
	"golang.org/x/sys/unix"
)

// Options of SOL_SOCKET, as the extension numbers them.
const (
	optReuseaddr = 0
	optType      = 1
	optError     = 2
	optBroadcast = 4
	optSndbuf    = 5
	optRcvbuf    = 6
	optKeepalive = 7
	optLinger    = 9
	optRcvtimeo  = 11
	optSndtimeo  = 12
)

// bufferMost bounds what a guest may have the kernel hold for it, bytes.
const bufferMost = 1 << 20

func (d *dialer) getOption(_ context.Context, mod api.Module, stack []uint64) uint32 {
	c := d.s.conn(int32(stack[0]))
	if c == nil {
		return eNotsock
	}
	mem := mod.Memory()
	size, ok := mem.ReadUint32Le(uint32(stack[4]))
	if !ok {
		return eFault
	}
	put := func(v uint64, n uint32) uint32 {
		b := le.AppendUint64(nil, v)[:n]
		if size < n {
			return eInval
		}
		if !mem.Write(uint32(stack[3]), b) || !mem.WriteUint32Le(uint32(stack[4]), n) {
			return eFault
		}
		return 0
	}
	if uint32(stack[1]) != 0 {
		return eNotsup
	}
	native := 0
	switch uint32(stack[2]) {
	case optError:
		n, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			return wireOf(err)
		}
		if n != 0 {
			n = int(wireOf(unix.Errno(n)))
		}
		return put(uint64(n), 4)
	case optType:
		kind := uint64(typeStream)
		if c.datagram {
			kind = typeDatagram
		}
		return put(kind, 4)
	case optRcvtimeo, optSndtimeo:
		t := c.recvTimeout
		if uint32(stack[2]) == optSndtimeo {
			t = c.sendTimeout
		}
		b := le.AppendUint64(le.AppendUint64(nil, uint64(t/time.Second)), uint64(t%time.Second/time.Microsecond))
		if size < uint32(len(b)) {
			return eInval
		}
		if !mem.Write(uint32(stack[3]), b) {
			return eFault
		}
		return 0
	case optReuseaddr:
		native = unix.SO_REUSEADDR
	case optKeepalive:
		native = unix.SO_KEEPALIVE
	case optSndbuf:
		native = unix.SO_SNDBUF
	case optRcvbuf:
		native = unix.SO_RCVBUF
	default:
		return eNotsup
	}
	n, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, native)
	if err != nil {
		return wireOf(err)
	}
	return put(uint64(n), 4)
}

func (d *dialer) setOption(_ context.Context, mod api.Module, stack []uint64) uint32 {
	c := d.s.conn(int32(stack[0]))
	if c == nil {
		return eNotsock
	}
	if uint32(stack[4]) > 64 {
		return eInval
	}
	b, ok := mod.Memory().Read(uint32(stack[3]), uint32(stack[4]))
	if !ok {
		return eFault
	}
	if uint32(stack[1]) != 0 {
		return eNotsup
	}
	if c.fd == noSocket {
		return 0
	}
	if name := uint32(stack[2]); name == optRcvtimeo || name == optSndtimeo {
		t, ok := timevalOf(b)
		if !ok {
			return eInval
		}
		if name == optRcvtimeo {
			c.recvTimeout = t
		} else {
			c.sendTimeout = t
		}
		return 0
	}
	if len(b) < 4 {
		return eInval
	}
	v := int(int32(le.Uint32(b)))
	native := 0
	switch uint32(stack[2]) {
	case optReuseaddr:
		native = unix.SO_REUSEADDR
	case optKeepalive:
		native = unix.SO_KEEPALIVE
	case optSndbuf:
		native, v = unix.SO_SNDBUF, min(v, bufferMost)
	case optRcvbuf:
		native, v = unix.SO_RCVBUF, min(v, bufferMost)
	case optBroadcast:
		return eAcces
	case optLinger:
		if len(b) < 8 {
			return eInval
		}
		return wireOf(unix.SetsockoptLinger(c.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: int32(v), Linger: int32(le.Uint32(b[4:]))}))
	default:
		return eNotsup
	}
	return wireOf(unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, native, v))
}

// timevalOf reads a timeval of the guest's libc: two words of 64 bits, or of
// 32 in older ones.
func timevalOf(b []byte) (time.Duration, bool) {
	var sec, usec int64
	switch {
	case len(b) >= 16:
		sec, usec = int64(le.Uint64(b)), int64(le.Uint64(b[8:]))
	case len(b) >= 8:
		sec, usec = int64(int32(le.Uint32(b))), int64(int32(le.Uint32(b[4:])))
	default:
		return 0, false
	}
	if sec < 0 || usec < 0 || sec > 1<<31 || usec >= 1e6 {
		return 0, false
	}
	return time.Duration(sec)*time.Second + time.Duration(usec)*time.Microsecond, true
}

// iovec reads the first buffer of a list.
func iovec(mem api.Memory, at, count uint32) ([]byte, bool) {
	if count == 0 {
		return nil, false
	}
	p, ok1 := mem.ReadUint32Le(at)
	n, ok2 := mem.ReadUint32Le(at + 4)
	if !ok1 || !ok2 {
		return nil, false
	}
	return mem.Read(p, n)
}

// sendTo sends a datagram; each one's address is checked.
func (d *dialer) sendTo(_ context.Context, mod api.Module, stack []uint64) uint32 {
	c, mem := d.s.conn(int32(stack[0])), mod.Memory()
	if c == nil || !c.datagram {
		return eNotsock
	}
	b, ok := iovec(mem, uint32(stack[1]), uint32(stack[2]))
	a, known := addressAt(mem, uint32(stack[3]))
	if port := uint32(stack[4]); !ok || !known || port == 0 || port > 65535 {
		return eInval
	}
	to := netip.AddrPortFrom(a, uint16(stack[4]))
	if !d.gate.may(to, true) {
		return eAcces
	}
	n, errno := c.try(unix.POLLOUT, c.sendTimeout, func() (int, error) {
		return len(b), unix.Sendto(c.fd, b, unix.MSG_NOSIGNAL, sockaddrFor(c.fd, to))
	})
	if errno != 0 {
		return wire(errno)
	}
	if !mem.WriteUint32Le(uint32(stack[6]), uint32(n)) {
		return eFault
	}
	return 0
}

// recvFrom waits for a datagram: of anybody, as UDP is; a socket that sent
// nothing has no port yet, and one that was connected gets its peer's alone.
func (d *dialer) recvFrom(_ context.Context, mod api.Module, stack []uint64, withPort bool) uint32 {
	c, mem := d.s.conn(int32(stack[0])), mod.Memory()
	if c == nil {
		return eNotsock
	}
	b, ok := iovec(mem, uint32(stack[1]), uint32(stack[2]))
	if !ok {
		return eFault
	}
	var from unix.Sockaddr
	n, errno := c.try(unix.POLLIN, c.recvTimeout, func() (n int, err error) {
		n, from, err = unix.Recvfrom(c.fd, b, 0)
		return n, err
	})
	if errno != 0 {
		return wire(errno)
	}
	rest := stack[5:]
	if a, ok := addrPortOf(from); ok && uint32(stack[3]) != 0 {
		if _, e := putAddress(mem, uint32(stack[3]), a.Addr()); e != 0 {
			return e
		}
		if withPort && !mem.WriteUint32Le(uint32(stack[5]), uint32(a.Port())) {
			return eFault
		}
	}
	if withPort {
		rest = stack[6:]
	}
	if !mem.WriteUint32Le(uint32(rest[0]), uint32(n)) || !mem.WriteUint32Le(uint32(rest[1]), 0) {
		return eFault
	}
	return 0
}
