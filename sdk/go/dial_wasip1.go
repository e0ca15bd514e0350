//go:build wasip1

package dunlin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

//go:wasmimport wasi_snapshot_preview1 sock_open
//go:noescape
func sockOpen(family, kind uint32, fd unsafe.Pointer) uint32

//go:wasmimport wasi_snapshot_preview1 sock_connect
//go:noescape
func sockConnect(fd uint32, addr unsafe.Pointer, port uint32) uint32

//go:wasmimport wasi_snapshot_preview1 sock_getsockopt
//go:noescape
func sockGetsockopt(fd, level, name uint32, value, size unsafe.Pointer) uint32

//go:wasmimport wasi_snapshot_preview1 sock_getlocaladdr
//go:noescape
func sockGetlocaladdr(fd uint32, addr, kind, port unsafe.Pointer) uint32

//go:wasmimport wasi_snapshot_preview1 sock_getaddrinfo
//go:noescape
func sockGetaddrinfo(node unsafe.Pointer, nodeLen uint32, service unsafe.Pointer, serviceLen uint32, hint, result unsafe.Pointer, most uint32, count unsafe.Pointer) uint32

// Numbers of the host's interface.
const (
	family4, family6 = 1, 2
	datagram, stream = 1, 2
	optError         = 2
	answersMost      = 16
	einprogress      = 26
)

// DialContext is Dial with a context, which can end the attempt.
func DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := dial(ctx, network, address)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: fmt.Errorf("%s: %w", address, err)}
	}
	return c, nil
}

func dial(ctx context.Context, network, address string) (net.Conn, error) {
	kind, only := uint32(stream), 0
	switch network {
	case "tcp":
	case "tcp4":
		only = 4
	case "tcp6":
		only = 6
	case "udp":
		kind = datagram
	default:
		return nil, net.UnknownNetworkError(network)
	}
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(service, 10, 16)
	if err != nil {
		return nil, &net.AddrError{Err: "the port is no number", Addr: address}
	}
	list, err := lookup(host, service, kind)
	if err != nil {
		return nil, err
	}
	err = &net.DNSError{Err: "no address of the wanted kind", Name: host, IsNotFound: true}
	for _, a := range list {
		if only == 4 && !a.Is4() || only == 6 && a.Is4() {
			continue
		}
		var c net.Conn
		if c, err = connect(ctx, netip.AddrPortFrom(a, uint16(port)), kind); err == nil || ctx.Err() != nil {
			return c, err
		}
	}
	return nil, err
}

// wasiAddress is a pointer and a size, as the host reads them.
type wasiAddress struct {
	buf  uint32
	size uint32
}

// heap makes something that does not move: a stack may, while the host has
// only the number of a place in it.
//
//go:noinline
func heap[T any]() *T { return new(T) }

func pointer(p unsafe.Pointer) uint32 { return uint32(uintptr(p)) }

func connect(ctx context.Context, to netip.AddrPort, kind uint32) (net.Conn, error) {
	family, raw, size := uint32(family4), heap[[16]byte](), uint32(4)
	copy(raw[:], to.Addr().AsSlice())
	if to.Addr().Is6() {
		family, size = family6, 16
	}
	var fd uint32
	if e := sockOpen(family, kind, unsafe.Pointer(&fd)); e != 0 {
		return nil, syscall.Errno(e)
	}
	if err := syscall.SetNonblock(int(fd), true); err != nil {
		_ = syscall.Close(int(fd))
		return nil, err
	}
	at := wasiAddress{pointer(unsafe.Pointer(raw)), size}
	e := sockConnect(fd, unsafe.Pointer(&at), uint32(to.Port()))
	runtime.KeepAlive(raw)
	f := os.NewFile(uintptr(fd), to.String())
	defer func() { _ = f.Close() }() // the connection has the descriptor, too
	if e != 0 && e != einprogress {
		return nil, syscall.Errno(e)
	}
	if e == einprogress {
		if err := connected(ctx, f, fd); err != nil {
			return nil, err
		}
	}
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, remote: to, local: localOf(fd), udp: kind == datagram}, nil
}

// connected waits until the attempt is over; other goroutines go on.
func connected(ctx context.Context, f *os.File, fd uint32) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	first := true
	err = rc.Write(func(uintptr) bool {
		done := !first
		first = false
		return done
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return err
	}
	var value, size uint32 = 0, 4
	if e := sockGetsockopt(fd, 0, optError, unsafe.Pointer(&value), unsafe.Pointer(&size)); e != 0 {
		return syscall.Errno(e)
	}
	if value != 0 {
		return syscall.Errno(value)
	}
	return nil
}

func localOf(fd uint32) netip.AddrPort {
	buf := heap[[16]byte]()
	at := wasiAddress{pointer(unsafe.Pointer(buf)), uint32(len(buf))}
	var kind, port uint32
	e := sockGetlocaladdr(fd, unsafe.Pointer(&at), unsafe.Pointer(&kind), unsafe.Pointer(&port))
	runtime.KeepAlive(buf)
	if e != 0 {
		return netip.AddrPort{}
	}
	if kind == 4 {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(buf[:4])), uint16(port))
	}
	return netip.AddrPortFrom(netip.AddrFrom16(*buf), uint16(port))
}

// What the host fills in (all pointers are 32 bits).
type addrinfo struct {
	flags                  uint16
	family, kind, protocol uint8
	_                      [3]byte
	addrLen, addr          uint32
	canon, canonLen        uint32
	next                   uint32
}

type sockaddr struct {
	family  uint8
	_       [3]byte
	dataLen uint32
	data    uint32
}

// lookup asks the node's DNS. The whole guest waits for it, some seconds at
// most. What it will connect to is for the message of a refusal.
func lookup(host, port string, kind uint32) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{a.Unmap()}, nil
	}
	infos, addrs, data := heap[[answersMost]addrinfo](), heap[[answersMost]sockaddr](), heap[[answersMost][26]byte]()
	for i := range infos {
		infos[i].addr = pointer(unsafe.Pointer(&addrs[i]))
		addrs[i].data = pointer(unsafe.Pointer(&data[i]))
		if i > 0 {
			infos[i-1].next = pointer(unsafe.Pointer(&infos[i]))
		}
	}
	node := append([]byte(host), 0)
	service := append([]byte(port), 0)
	hint := addrinfo{kind: uint8(kind)}
	result, count := pointer(unsafe.Pointer(&infos[0])), uint32(0)
	e := sockGetaddrinfo(unsafe.Pointer(&node[0]), uint32(len(node)), unsafe.Pointer(&service[0]), uint32(len(service)),
		unsafe.Pointer(&hint), unsafe.Pointer(&result), answersMost, unsafe.Pointer(&count))
	runtime.KeepAlive(infos)
	runtime.KeepAlive(addrs)
	runtime.KeepAlive(data)
	switch {
	case e == uint32(syscall.ENOENT):
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	case e == uint32(syscall.EAGAIN):
		return nil, &net.DNSError{Err: "no DNS server answers", Name: host, IsTemporary: true, IsTimeout: true}
	case e != 0:
		return nil, syscall.Errno(e)
	}
	var out []netip.Addr
	for i := range min(count, answersMost) {
		if addrs[i].family == family4 {
			out = append(out, netip.AddrFrom4([4]byte(data[i][2:6])))
		} else {
			out = append(out, netip.AddrFrom16([16]byte(data[i][6:22])))
		}
	}
	if len(out) == 0 {
		return nil, errors.New("no addresses")
	}
	return out, nil
}

// conn knows its addresses, which package net does not on this platform.
type conn struct {
	net.Conn
	remote, local netip.AddrPort
	udp           bool
}

// RemoteAddr implements net.Conn.
func (c *conn) RemoteAddr() net.Addr { return c.addr(c.remote) }

// LocalAddr implements net.Conn.
func (c *conn) LocalAddr() net.Addr { return c.addr(c.local) }

func (c *conn) addr(a netip.AddrPort) net.Addr {
	if c.udp {
		return net.UDPAddrFromAddrPort(a)
	}
	return net.TCPAddrFromAddrPort(a)
}

// CloseWrite ends this side of a TCP connection.
func (c *conn) CloseWrite() error {
	if t, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return t.CloseWrite()
	}
	return errors.ErrUnsupported
}
