package host

import (
	"context"
	"io/fs"
	"net/netip"
	"strings"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental/sys"
	wsys "github.com/tetratelabs/wazero/sys"
	"golang.org/x/sys/unix"
)

// WASI preview 1 has no connect. Guest libraries that connect all the same
// (Rust's wasmedge_wasi_socket, Go's dispatchrun/net, our sdk) import further
// functions of the same module, which WasmEdge made known. There are two forms
// of some, told apart by how many parameters the guest's import has, and of
// addresses, told apart by the size of the buffer: 4 or 16 bytes are the
// address alone, 128 begin with its family.

// Numbers of the extension.
const (
	familyAny, family4, family6 = 0, 1, 2
	typeAny, typeDatagram       = 0, 1
	typeStream                  = 2

	filetypeSocketDgram = 5

	longAddress = 128 // bytes of the second form

	addrinfoSize = 28 // of __wasi_addrinfo_t

	eAfnosupport  = 5
	eAlready      = 7
	eConnrefused  = 14
	eHostunreach  = 23
	eInprogress   = 26
	eIsconn       = 30
	eNetunreach   = 40
	eDestaddrreq  = 17
	eMsgsize      = 35
	eNetdown      = 38
	eAddrnotavail = 4
)

// noSocket is the descriptor of a socket that goes nowhere.
const noSocket = -1

// dialPath is the file whose opening gives a socket its descriptor.
const dialPath = "d"

// dialFolder is mounted last, and never seen by the guest.
type dialFolder struct {
	sys.UnimplementedFS
	set *sockets
}

// OpenFile implements sys.FS.
func (d *dialFolder) OpenFile(path string, _ sys.Oflag, _ fs.FileMode) (sys.File, sys.Errno) {
	if path == "." || path == "/" || path == "" {
		return listenerDir{}, 0
	}
	if path != dialPath || d.set.accepted == nil {
		return nil, sys.ENOENT
	}
	return d.set.accepted, 0
}

// Stat implements sys.FS.
func (d *dialFolder) Stat(string) (wsys.Stat_t, sys.Errno) {
	return wsys.Stat_t{Mode: fs.ModeDir | 0o500}, 0
}

// Lstat implements sys.FS.
func (d *dialFolder) Lstat(path string) (wsys.Stat_t, sys.Errno) { return d.Stat(path) }

// dialer adds the functions that connect.
type dialer struct {
	s      *sockets
	gate   *gate
	folder int32 // the guest's descriptor of the dialFolder
	open   api.GoModuleFunction
	table  *wasiTable
}

// extension says with how many parameters a function may be imported.
var extension = map[string][]int{
	"sock_open": {3}, "sock_connect": {3}, "sock_bind": {3}, "sock_listen": {2}, "sock_accept": {2, 3},
	"sock_getpeeraddr": {4, 3}, "sock_getlocaladdr": {4, 3}, "sock_getsockopt": {5}, "sock_setsockopt": {5},
	"sock_getaddrinfo": {8}, "sock_send_to": {7}, "sock_recv_from": {8, 7}, "sock_recv": {6}, "sock_send": {5},
}

// Extends says whether a function of WASI's module is one of the extension.
func Extends(name string) bool { return extension[strings.TrimSuffix(name, "_v2")] != nil }

// connects says whether a module imports anything of the extension.
func connects(guest wazero.CompiledModule) bool {
	for _, f := range guest.ImportedFunctions() {
		if _, name, _ := f.Import(); extended(f) != "" && name != "sock_accept" && name != "sock_recv" && name != "sock_send" {
			return true
		}
	}
	return false
}

// extended names the function of the extension that an import means; "" is
// none.
func extended(f api.FunctionDefinition) string {
	_, full, _ := f.Import()
	name := strings.TrimSuffix(full, "_v2")
	counts := extension[name]
	for _, p := range f.ParamTypes() {
		if p != api.ValueTypeI32 {
			return ""
		}
	}
	if r := f.ResultTypes(); len(r) != 1 || r[0] != api.ValueTypeI32 {
		return ""
	}
	for _, n := range counts {
		if n == len(f.ParamTypes()) {
			return name
		}
	}
	return ""
}

// function is what an import of the extension does; nil is what WASI does.
func (d *dialer) function(f api.FunctionDefinition) wasiFunc {
	n := len(f.ParamTypes())
	switch _, full, _ := f.Import(); extended(f) {
	case "sock_open":
		return d.socket
	case "sock_connect":
		return d.connect
	case "sock_bind":
		return d.bind
	case "sock_listen":
		return func(context.Context, api.Module, []uint64) uint32 { return eNotsup } // the agent listens
	case "sock_accept":
		if n == 2 {
			return d.passing("sock_accept", func(stack []uint64) []uint64 { return []uint64{stack[0], 0, stack[1]} })
		}
		if full != "sock_accept" {
			return d.passing("sock_accept", func(stack []uint64) []uint64 { return stack[:3] })
		}
	case "sock_recv", "sock_send":
		if name := strings.TrimSuffix(full, "_v2"); name != full {
			return d.passing(name, func(stack []uint64) []uint64 { return stack[:n] })
		}
	case "sock_getpeeraddr":
		return d.address(n, unix.Getpeername)
	case "sock_getlocaladdr":
		return d.address(n, unix.Getsockname)
	case "sock_getsockopt":
		return d.getOption
	case "sock_setsockopt":
		return d.setOption
	case "sock_getaddrinfo":
		return d.addrinfo
	case "sock_send_to":
		return d.sendTo
	case "sock_recv_from":
		return func(ctx context.Context, mod api.Module, stack []uint64) uint32 {
			return d.recvFrom(ctx, mod, stack, n == 8)
		}
	}
	return nil
}

// passing calls the function of WASI with other arguments.
func (d *dialer) passing(name string, args func(stack []uint64) []uint64) wasiFunc {
	fn := d.table.original(name)
	return func(ctx context.Context, mod api.Module, stack []uint64) uint32 {
		var own [8]uint64
		n := copy(own[:], args(stack))
		fn.Call(ctx, mod, own[:max(n, 1)])
		return uint32(own[0])
	}
}

// socket makes one; it goes nowhere yet.
func (d *dialer) socket(ctx context.Context, mod api.Module, stack []uint64) uint32 {
	family, kind, result := unix.AF_INET, unix.SOCK_STREAM, uint32(stack[2])
	switch stack[0] & 0xff {
	case familyAny, family4:
	case family6:
		family = unix.AF_INET6
	default:
		return eAfnosupport
	}
	switch stack[1] & 0xff {
	case typeAny, typeStream:
	case typeDatagram:
		kind = unix.SOCK_DGRAM
	default:
		return eNotsup
	}
	if !mod.Memory().WriteByte(result, dialPath[0]) {
		return eFault
	}
	// Without the annotation the process may make none. The guest gets one that
	// goes nowhere, so that it is told what it lacks where it says whereto.
	fd, err := noSocket, error(nil)
	if len(d.gate.rules) > 0 {
		fd, err = unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	}
	if err != nil {
		return wireOf(err)
	}
	if kind == unix.SOCK_STREAM {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	c := &conn{set: d.s, fd: fd, guest: -1, datagram: kind == unix.SOCK_DGRAM}
	d.s.accepted = c
	args := [9]uint64{uint64(uint32(d.folder)), 0, uint64(result), 1, 0, rightsReadWrite, 0, 0, uint64(result)}
	d.open.Call(ctx, mod, args[:])
	d.s.accepted = nil
	if e := uint32(args[0]); e != 0 {
		_ = unix.Close(fd)
		return e
	}
	guest, ok := mod.Memory().ReadUint32Le(result)
	if !ok {
		return eFault
	}
	d.s.mu.Lock()
	c.guest = int32(guest)
	d.s.conns[c.guest] = c
	d.s.mu.Unlock()
	return 0
}

// addressAt reads a WasiAddress: a pointer and a size.
func addressAt(mem api.Memory, at uint32) (netip.Addr, bool) {
	buf, ok1 := mem.ReadUint32Le(at)
	size, ok2 := mem.ReadUint32Le(at + 4)
	if !ok1 || !ok2 || size > longAddress {
		return netip.Addr{}, false
	}
	b, ok := mem.Read(buf, size)
	if !ok {
		return netip.Addr{}, false
	}
	switch {
	case size == 4 || size == 16:
		return fromBytes(b)
	case size >= 18 && le.Uint16(b) == family4:
		return fromBytes(b[2:6])
	case size >= 18 && le.Uint16(b) == family6:
		return fromBytes(b[2:18])
	}
	return netip.Addr{}, false
}

func fromBytes(b []byte) (netip.Addr, bool) {
	a, ok := netip.AddrFromSlice(b)
	return a.Unmap(), ok
}

// connect checks the very address that it connects to.
func (d *dialer) connect(_ context.Context, mod api.Module, stack []uint64) uint32 {
	c := d.s.conn(int32(stack[0]))
	if c == nil {
		return eNotsock
	}
	a, ok := addressAt(mod.Memory(), uint32(stack[1]))
	if port := uint32(stack[2]); !ok || port == 0 || port > 65535 { // the upper halves of the stack's words mean nothing
		return eInval
	}
	to := netip.AddrPortFrom(a, uint16(stack[2]))
	if !d.gate.may(to, c.datagram) {
		return eAcces
	}
	err := unix.Connect(c.fd, sockaddrFor(c.fd, to))
	if err == unix.EINPROGRESS && !c.nonblock {
		until := time.Time{}
		if c.sendTimeout > 0 {
			until = time.Now().Add(c.sendTimeout)
		}
		if err := pollUntil(c.fd, unix.POLLOUT, until); err != nil {
			return eTimedout
		}
		n, gerr := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err = gerr; gerr == nil && n != 0 {
			err = unix.Errno(n)
		}
	}
	return wireOf(err)
}

// sockaddrFor is the address in the socket's own family.
func sockaddrFor(fd int, a netip.AddrPort) unix.Sockaddr {
	if domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN); err == nil && domain == unix.AF_INET6 {
		return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	}
	return sockaddrOf(a)
}

// bind is for clients that bind to nothing before they connect.
func (d *dialer) bind(_ context.Context, mod api.Module, stack []uint64) uint32 {
	if d.s.conn(int32(stack[0])) == nil {
		return eNotsock
	}
	if a, ok := addressAt(mod.Memory(), uint32(stack[1])); !ok || !a.IsUnspecified() || uint32(stack[2]) != 0 {
		return eAcces
	}
	return 0
}

// putAddress writes an address in the form that the buffer has room for.
func putAddress(mem api.Memory, at uint32, a netip.Addr) (kind uint32, errno uint32) {
	buf, ok1 := mem.ReadUint32Le(at)
	size, ok2 := mem.ReadUint32Le(at + 4)
	if !ok1 || !ok2 {
		return 0, eFault
	}
	a = a.Unmap()
	b, family := a.AsSlice(), uint16(family4)
	if kind = 4; a.Is6() {
		kind, family = 6, family6
	}
	if size >= longAddress {
		b = append(le.AppendUint16(nil, family), b...)
	}
	if int(size) < len(b) {
		return 0, eInval
	}
	if !mem.Write(buf, b) {
		return 0, eFault
	}
	return kind, 0
}

// address answers in the form with (n 4) or without a word for the kind.
func (d *dialer) address(n int, of func(int) (unix.Sockaddr, error)) wasiFunc {
	return func(_ context.Context, mod api.Module, stack []uint64) uint32 {
		c := d.s.conn(int32(stack[0]))
		if c == nil {
			return eNotsock
		}
		sa, err := of(c.fd)
		if err != nil {
			return wireOf(err)
		}
		a, ok := addrPortOf(sa)
		if !ok {
			return eAfnosupport
		}
		mem := mod.Memory()
		kind, errno := putAddress(mem, uint32(stack[1]), a.Addr())
		if errno != 0 {
			return errno
		}
		if n == 4 && !mem.WriteUint32Le(uint32(stack[2]), kind) || !mem.WriteUint32Le(uint32(stack[n-1]), uint32(a.Port())) {
			return eFault
		}
		return 0
	}
}

// addrinfo looks a name up and fills in the list that the guest made.
func (d *dialer) addrinfo(_ context.Context, mod api.Module, stack []uint64) uint32 {
	mem := mod.Memory()
	node, ok1 := mem.Read(uint32(stack[0]), uint32(stack[1]))
	service, ok2 := mem.Read(uint32(stack[2]), uint32(stack[3]))
	if !ok1 || !ok2 || len(node) > 256 || len(service) > 64 {
		return eInval
	}
	name := strings.TrimRight(string(node), "\x00")
	port, ok := portOf(strings.TrimRight(string(service), "\x00"))
	if name == "" || !ok {
		return eInval
	}
	hint, ok1 := mem.Read(uint32(stack[4]), 4)
	at, ok2 := mem.ReadUint32Le(uint32(stack[5]))
	if !ok1 || !ok2 {
		return eFault
	}
	family, kind := hint[2], hint[3]
	list, errno := d.gate.resolve(name, port, kind == typeDatagram)
	if errno != 0 {
		return errno
	}
	count := uint32(0)
	for _, a := range list {
		if count == uint32(stack[6]) || at == 0 {
			break
		}
		if family == family4 && !a.Is4() || family == family6 && a.Is4() {
			continue
		}
		next, errno := putAddrinfo(mem, at, a, port, kind)
		if errno != 0 {
			return errno
		}
		at = next
		count++
	}
	if !mem.WriteUint32Le(uint32(stack[7]), count) {
		return eFault
	}
	if count == 0 {
		return eNoent
	}
	return 0
}

// putAddrinfo fills in one element: ai_flags u16, ai_family u8, ai_socktype u8,
// ai_protocol u8, then at 8 ai_addrlen, ai_addr, ai_canonname, its length and
// ai_next, u32 each. ai_addr is a family u8, at 4 a length and a pointer to
// what follows the family in a sockaddr.
func putAddrinfo(mem api.Memory, at uint32, a netip.Addr, port uint16, kind byte) (next, errno uint32) {
	b, ok := mem.Read(at, addrinfoSize)
	if !ok {
		return 0, eFault
	}
	if kind != typeDatagram {
		kind = typeStream
	}
	data := append([]byte{byte(port >> 8), byte(port)}, a.AsSlice()...)
	family := byte(family4)
	if a.Is4() {
		data = append(data, make([]byte, 8)...)
	} else {
		family = family6
		data = append(append([]byte{data[0], data[1], 0, 0, 0, 0}, data[2:]...), 0, 0, 0, 0)
	}
	b[2], b[3], b[4] = family, kind, 3-kind // stream and TCP, datagram and UDP
	le.PutUint32(b[8:], uint32(len(data)+2))
	le.PutUint32(b[20:], 0)
	addr := le.Uint32(b[12:])
	next = le.Uint32(b[24:])
	sa, ok := mem.Read(addr, 12)
	if !ok {
		return 0, eFault
	}
	sa[0] = family
	le.PutUint32(sa[4:], uint32(len(data)))
	if !mem.Write(le.Uint32(sa[8:]), data) {
		return 0, eFault
	}
	return next, 0
}

func portOf(service string) (uint16, bool) {
	switch service {
	case "":
		return 0, true
	case "http":
		return 80, true
	case "https":
		return 443, true
	}
	n := 0
	for _, c := range []byte(service) {
		if c < '0' || c > '9' || n > 6553 {
			return 0, false
		}
		n = n*10 + int(c-'0')
	}
	return uint16(n), n <= 65535
}
