package host

import (
	"context"
	"errors"
	"io/fs"
	"sync"
	"time"

	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental/sys"
	wsys "github.com/tetratelabs/wazero/sys"
	"golang.org/x/sys/unix"
)

// wazero opens listeners itself, by address. The agent's are already open,
// in another network namespace, so the socket part of WASI is ours: each
// listener is a mounted folder to wazero (which gives it a descriptor in the
// guest's one table), and accepting is opening a file in it.

// sockets are the guest's listeners and connections by guest descriptor.
// The guest's goroutine uses it, and drain from the control goroutine.
type sockets struct {
	mu        sync.Mutex
	listeners map[int32]*listener
	conns     map[int32]*conn
	accepted  *conn // by the OpenFile of the accept under way
	hidden    int32 // the descriptor of the dialFolder; -1 without one
}

func newSockets() *sockets {
	return &sockets{listeners: map[int32]*listener{}, conns: map[int32]*conn{}, hidden: -1}
}

// listener is one guest listener with one or more host sockets.
type listener struct {
	sys.UnimplementedFS
	set      *sockets
	fds      []int
	nonblock bool
	next     int   // round robin, so that no socket starves
	waiting  []int // accepted by drain for the guest; guarded by set
}

// waitingMost bounds what drain accepts for a guest that may never ask.
const waitingMost = 1024

// drain refuses new connections: what was accepted goes on, by the guest or
// by the kernel, whose queue would otherwise be reset although the clients
// were told that they are connected. Waiting accepts and polls return.
func (s *sockets) drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.listeners {
		for _, fd := range l.fds {
			for len(l.waiting) < waitingMost {
				c, err := acceptOn(fd)
				if err == nil {
					l.waiting = append(l.waiting, c)
				} else if !errors.Is(err, unix.EINTR) && !errors.Is(err, unix.ECONNABORTED) {
					break
				}
			}
			// On a listening socket this leaves the listening state at once
			// and wakes every waiter, without freeing the descriptor.
			_ = unix.Shutdown(fd, unix.SHUT_RDWR)
		}
	}
}

func (s *sockets) listener(fd int32) *listener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.listeners[fd]
}

func (s *sockets) conn(fd int32) *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns[fd]
}

func (s *sockets) closeListener(fd int32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.listeners[fd]
	if l == nil {
		return
	}
	delete(s.listeners, fd)
	for _, h := range append(l.fds, l.waiting...) {
		_ = unix.Close(h)
	}
	l.fds, l.waiting = nil, nil
}

// acceptOn never blocks.
func acceptOn(fd int) (int, error) {
	c, _, err := unix.Accept4(fd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
	if err == nil {
		// Requests are small and answered at once, as net.Conn does.
		_ = unix.SetsockoptInt(c, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	return c, err
}

// take is one of those that drain accepted; -1 is none.
func (l *listener) take() int {
	l.set.mu.Lock()
	defer l.set.mu.Unlock()
	if len(l.waiting) == 0 {
		return -1
	}
	fd := l.waiting[0]
	l.waiting = l.waiting[1:]
	return fd
}

// OpenFile implements sys.FS: "." is the folder that stands for the listener
// itself, anything else accepts a connection.
func (l *listener) OpenFile(path string, _ sys.Oflag, _ fs.FileMode) (sys.File, sys.Errno) {
	if path == "." || path == "/" || path == "" {
		return listenerDir{}, 0
	}
	if path != acceptPath || l.set.accepted != nil {
		return nil, sys.ENOENT
	}
	fd, errno := l.accept()
	if errno != 0 {
		return nil, errno
	}
	c := &conn{set: l.set, fd: fd, guest: -1}
	l.set.accepted = c
	return c, 0
}

// Stat and Lstat show a folder, which the guest never sees as one.
func (l *listener) Stat(string) (wsys.Stat_t, sys.Errno) {
	return wsys.Stat_t{Mode: fs.ModeDir | 0o500}, 0
}

// Lstat implements sys.FS.
func (l *listener) Lstat(path string) (wsys.Stat_t, sys.Errno) { return l.Stat(path) }

func (l *listener) accept() (int, sys.Errno) {
	for {
		l.set.mu.Lock()
		fds := l.fds
		l.set.mu.Unlock()
		if len(fds) == 0 {
			return -1, sys.EBADF
		}
		for range fds {
			l.next = (l.next + 1) % len(fds)
			fd, err := acceptOn(fds[l.next])
			switch {
			case err == nil:
				return fd, 0
			case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
			case errors.Is(err, unix.EINVAL): // drained
				if fd := l.take(); fd >= 0 {
					return fd, 0
				}
				return -1, sys.EINVAL
			default:
				return -1, errnoOf(err)
			}
		}
		if l.nonblock {
			return -1, sys.EAGAIN
		}
		p := make([]unix.PollFd, len(fds))
		for i, fd := range fds {
			p[i] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		}
		if _, err := unix.Poll(p, -1); err != nil && err != unix.EINTR {
			return -1, errnoOf(err)
		}
	}
}

// listenerDir is what wazero holds open for a listener.
type listenerDir struct {
	sys.UnimplementedFile
	sys.DirFile
}

func (listenerDir) Dev() (uint64, sys.Errno)                { return 0, 0 }
func (listenerDir) Ino() (wsys.Inode, sys.Errno)            { return 0, 0 }
func (listenerDir) IsDir() (bool, sys.Errno)                { return true, 0 }
func (listenerDir) IsAppend() bool                          { return false }
func (listenerDir) SetAppend(bool) sys.Errno                { return sys.EINVAL }
func (listenerDir) Stat() (wsys.Stat_t, sys.Errno)          { return wsys.Stat_t{Mode: fs.ModeDir}, 0 }
func (listenerDir) Read([]byte) (int, sys.Errno)            { return 0, sys.EINVAL }
func (listenerDir) Write([]byte) (int, sys.Errno)           { return 0, sys.EINVAL }
func (listenerDir) Pread([]byte, int64) (int, sys.Errno)    { return 0, sys.EINVAL }
func (listenerDir) Pwrite([]byte, int64) (int, sys.Errno)   { return 0, sys.EINVAL }
func (listenerDir) Truncate(int64) sys.Errno                { return sys.EINVAL }
func (listenerDir) Seek(fileOffset, int) (int64, sys.Errno) { return 0, sys.EINVAL }
func (listenerDir) Readdir(int) ([]sys.Dirent, sys.Errno)   { return nil, sys.EINVAL }
func (listenerDir) Close() sys.Errno                        { return 0 }

// conn is one connection, accepted or made by the guest. Its host socket never blocks; a guest in
// blocking mode waits in poll(2), on the guest's own thread.
type conn struct {
	sys.UnimplementedFile
	set      *sockets
	fd       int
	guest    int32
	nonblock bool
	closed   bool
	datagram bool
	// 0 is for ever; the guest's, for its own calls while it blocks.
	recvTimeout, sendTimeout time.Duration
}

// Stat implements sys.File.
func (c *conn) Stat() (wsys.Stat_t, sys.Errno) { return wsys.Stat_t{Mode: fs.ModeSocket | 0o600}, 0 }

// IsDir implements sys.File.
func (c *conn) IsDir() (bool, sys.Errno) { return false, 0 }

// Dev implements sys.File.
func (c *conn) Dev() (uint64, sys.Errno) { return 0, 0 }

// Ino implements sys.File.
func (c *conn) Ino() (wsys.Inode, sys.Errno) { return 0, 0 }

// IsNonblock implements sys.PollableFile.
func (c *conn) IsNonblock() bool { return c.nonblock }

// SetNonblock implements sys.PollableFile.
func (c *conn) SetNonblock(on bool) sys.Errno {
	c.nonblock = on
	return 0
}

// Poll implements sys.Pollable.
func (c *conn) Poll(flag sys.Pflag, timeoutMillis int32) (bool, sys.Errno) {
	var ev int16
	if flag&sys.POLLIN != 0 {
		ev |= unix.POLLIN
	}
	if flag&sys.POLLOUT != 0 {
		ev |= unix.POLLOUT
	}
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(c.fd), Events: ev}}, int(timeoutMillis))
	if err != nil && err != unix.EINTR {
		return false, errnoOf(err)
	}
	return n > 0, 0
}

// Read implements sys.File.
func (c *conn) Read(p []byte) (int, sys.Errno) {
	if len(p) == 0 {
		return 0, 0
	}
	return c.try(unix.POLLIN, c.recvTimeout, func() (int, error) { return unix.Read(c.fd, p) })
}

// Write implements sys.File.
func (c *conn) Write(p []byte) (int, sys.Errno) {
	if len(p) == 0 {
		return 0, 0
	}
	return c.try(unix.POLLOUT, c.sendTimeout, func() (int, error) {
		return unix.SendmsgN(c.fd, p, nil, nil, unix.MSG_NOSIGNAL)
	})
}

func (c *conn) peek(p []byte) (int, sys.Errno) {
	return c.try(unix.POLLIN, c.recvTimeout, func() (int, error) {
		n, _, err := unix.Recvfrom(c.fd, p, unix.MSG_PEEK)
		return n, err
	})
}

func (c *conn) try(events int16, timeout time.Duration, op func() (int, error)) (int, sys.Errno) {
	until := time.Time{}
	for {
		if c.closed {
			return 0, sys.EBADF
		}
		n, err := op()
		switch err {
		case nil:
			return n, 0
		case unix.EINTR: //nolint:errorlint // bare errno from package unix
		case unix.EAGAIN:
			if c.nonblock {
				return 0, sys.EAGAIN
			}
			if timeout > 0 && until.IsZero() {
				until = time.Now().Add(timeout)
			}
			if err := pollUntil(c.fd, events, until); err != nil {
				return 0, errnoOf(err)
			}
		default:
			return 0, errnoOf(err)
		}
	}
}

// Close implements sys.File.
func (c *conn) Close() sys.Errno {
	if c.closed {
		return 0
	}
	c.closed = true
	c.set.mu.Lock()
	if c.set.conns[c.guest] == c {
		delete(c.set.conns, c.guest)
	}
	c.set.mu.Unlock()
	if c.fd == noSocket {
		return 0
	}
	return errnoOf(unix.Close(c.fd))
}

// acceptPath is the file that accepting opens. One byte, so that it fits
// where the guest wants the new descriptor: the only memory of the guest
// that we may write before the call succeeds.
const acceptPath = "c"

// overrideSockets adds the socket functions of WASI to w.
func (s *sockets) override(w *wasiTable) {
	open := w.original("path_open")
	w.replace("sock_accept", func(ctx context.Context, mod api.Module, stack []uint64) uint32 {
		fd, flags, result := int32(stack[0]), uint32(stack[1]), uint32(stack[2])
		if s.listener(fd) == nil {
			return eBadf
		}
		if !mod.Memory().WriteByte(result, acceptPath[0]) {
			return eFault
		}
		s.accepted = nil
		args := [9]uint64{uint64(uint32(fd)), 0, uint64(result), 1, 0, rightsReadWrite, 0, 0, uint64(result)}
		open.Call(ctx, mod, args[:])
		c := s.accepted
		s.accepted = nil
		if e := uint32(args[0]); e != 0 {
			return e
		}
		guest, ok := mod.Memory().ReadUint32Le(result)
		if !ok || c == nil {
			return eFault
		}
		c.nonblock = flags&fdflagNonblock != 0
		s.mu.Lock()
		c.guest = int32(guest)
		s.conns[c.guest] = c
		s.mu.Unlock()
		return 0
	})
	w.replace("sock_shutdown", func(_ context.Context, _ api.Module, stack []uint64) uint32 {
		c := s.conn(int32(stack[0]))
		if c == nil {
			return eNotsock
		}
		switch stack[1] & 0xff {
		case 1:
			return wireOf(unix.Shutdown(c.fd, unix.SHUT_RD))
		case 2:
			return wireOf(unix.Shutdown(c.fd, unix.SHUT_WR))
		case 3:
			return wireOf(unix.Shutdown(c.fd, unix.SHUT_RDWR))
		}
		return eInval
	})
	read, write := w.original("fd_read"), w.original("fd_write")
	w.replace("sock_recv", func(ctx context.Context, mod api.Module, stack []uint64) uint32 {
		c := s.conn(int32(stack[0]))
		if c == nil {
			return eNotsock
		}
		if !mod.Memory().WriteUint16Le(uint32(stack[5]), 0) {
			return eFault
		}
		if stack[3]&1 != 0 {
			return peekInto(c, mod, stack)
		}
		args := [4]uint64{stack[0], stack[1], stack[2], stack[4]}
		read.Call(ctx, mod, args[:])
		return uint32(args[0])
	})
	w.replace("sock_send", func(ctx context.Context, mod api.Module, stack []uint64) uint32 {
		if s.conn(int32(stack[0])) == nil {
			return eNotsock
		}
		args := [4]uint64{stack[0], stack[1], stack[2], stack[4]}
		write.Call(ctx, mod, args[:])
		return uint32(args[0])
	})
	s.overrideDescriptors(w)
}

func peekInto(c *conn, mod api.Module, stack []uint64) uint32 {
	mem := mod.Memory()
	iov := uint32(stack[1])
	at, ok1 := mem.ReadUint32Le(iov)
	n, ok2 := mem.ReadUint32Le(iov + 4)
	buf, ok3 := mem.Read(at, n)
	if !ok1 || !ok2 || !ok3 || uint32(stack[2]) == 0 {
		return eFault
	}
	got, errno := c.peek(buf)
	if errno != 0 {
		return wire(errno)
	}
	if !mem.WriteUint32Le(uint32(stack[4]), uint32(got)) {
		return eFault
	}
	return 0
}

// overrideDescriptors makes listeners look like sockets, not folders.
func (s *sockets) overrideDescriptors(w *wasiTable) {
	w.wrap("fd_fdstat_get", func(mod api.Module, stack []uint64) (uint32, bool) {
		fd := int32(stack[0])
		if fd == s.hidden {
			return eBadf, true
		}
		var nonblock bool
		if l := s.listener(fd); l != nil {
			nonblock = l.nonblock
		} else if c := s.conn(fd); c != nil {
			nonblock = c.nonblock
		} else {
			return 0, false
		}
		buf, ok := mod.Memory().Read(uint32(stack[1]), 24)
		if !ok {
			return eFault, true
		}
		clear(buf)
		buf[0] = filetypeSocketStream
		if c := s.conn(fd); c != nil && c.datagram {
			buf[0] = filetypeSocketDgram
		}
		if nonblock {
			buf[2] = fdflagNonblock
		}
		le.PutUint64(buf[8:], rightsSocket)
		le.PutUint64(buf[16:], rightsSocket)
		return 0, true
	})
	w.wrap("fd_fdstat_set_flags", func(_ api.Module, stack []uint64) (uint32, bool) {
		fd, on := int32(stack[0]), stack[1]&fdflagNonblock != 0
		if l := s.listener(fd); l != nil {
			l.nonblock = on
			return 0, true
		}
		if c := s.conn(fd); c != nil {
			c.nonblock = on
			return 0, true
		}
		return 0, false
	})
	notFolder := func(_ api.Module, stack []uint64) (uint32, bool) {
		if fd := int32(stack[0]); s.listener(fd) != nil || fd == s.hidden {
			return eBadf, true // how libc's scan of preopens ends
		}
		return 0, false
	}
	w.wrap("fd_prestat_get", notFolder)
	w.wrap("fd_prestat_dir_name", notFolder)
	w.wrap("fd_readdir", notFolder)
	for _, f := range []string{
		"path_open", "path_create_directory", "path_filestat_get", "path_filestat_set_times",
		"path_link", "path_readlink", "path_remove_directory", "path_rename", "path_symlink", "path_unlink_file",
	} {
		w.wrap(f, func(_ api.Module, stack []uint64) (uint32, bool) {
			at := 0
			if f == "path_symlink" {
				at = 2
			}
			if fd := int32(stack[at]); s.listener(fd) != nil || fd == s.hidden {
				return eNotdir, true
			}
			return 0, false
		})
	}
	closing := w.original("fd_close")
	w.replace("fd_close", func(ctx context.Context, mod api.Module, stack []uint64) uint32 {
		fd := int32(stack[0])
		if fd == s.hidden {
			return eBadf
		}
		args := [1]uint64{stack[0]}
		closing.Call(ctx, mod, args[:])
		if args[0] == 0 {
			s.closeListener(fd)
		}
		return uint32(args[0])
	})
	renumber := w.original("fd_renumber")
	w.replace("fd_renumber", func(ctx context.Context, mod api.Module, stack []uint64) uint32 {
		from, to := int32(stack[0]), int32(stack[1])
		if from == s.hidden || to == s.hidden {
			return eBadf
		}
		c := s.conn(from)
		args := [2]uint64{stack[0], stack[1]}
		renumber.Call(ctx, mod, args[:])
		if args[0] == 0 && c != nil {
			s.mu.Lock()
			delete(s.conns, from)
			c.guest = to
			s.conns[to] = c
			s.mu.Unlock()
		}
		return uint32(args[0])
	})
}
