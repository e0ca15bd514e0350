package proxy

import (
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// io.Copy between two TCP connections holds a pipe (two descriptors) for each
// direction while it waits for bytes. With thousands of connections that wait,
// descriptors are what runs out first; so here a pipe is taken when there is
// something to move, and given back when it is empty again.

// spliceMost is what one call moves at most: what a pipe of pipeSize holds.
const (
	spliceMost = 1 << 20
	pipeSize   = 256 << 10
)

type pipe struct{ r, w int }

// pipes are those that are not in use; few, since they are needed only while
// bytes are on their way.
type pipePool struct {
	mu   sync.Mutex
	free []*pipe
	idle int // of free, how many nobody needed since the last trim
}

const freePipes = 64

func (p *pipePool) get() (*pipe, error) {
	p.mu.Lock()
	if n := len(p.free); n > 0 {
		x := p.free[n-1]
		p.free = p.free[:n-1]
		p.idle = min(p.idle, n-1)
		p.mu.Unlock()
		return x, nil
	}
	p.mu.Unlock()
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, err
	}
	_, _ = unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, pipeSize) // slower without
	return &pipe{fds[0], fds[1]}, nil
}

// put takes a pipe back, which must be empty.
func (p *pipePool) put(x *pipe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) < freePipes {
		p.free = append(p.free, x)
		return
	}
	x.close()
}

// trim closes half of the pipes that nobody needed since it was last called: a
// burst is not paid for with descriptors for ever.
func (p *pipePool) trim() {
	p.mu.Lock()
	n := len(p.free) - (p.idle+1)/2
	out := p.free[n:]
	p.free = p.free[:n:n]
	p.idle = n
	p.mu.Unlock()
	for _, x := range out {
		x.close()
	}
}

func (x *pipe) close() {
	_ = unix.Close(x.r)
	_ = unix.Close(x.w)
}

// forward moves bytes from one connection to the other until the first ends,
// then ends the other's direction too. held is called before bytes are passed
// on, and passed once they were. Without descriptors for a pipe they go through
// memory.
func (p *pipePool) forward(dst, src *net.TCPConn, held, passed func()) error {
	rc, err := src.SyscallConn()
	if err != nil {
		return err
	}
	wc, err := dst.SyscallConn()
	if err != nil {
		return err
	}
	for {
		x, n, err := p.fill(rc)
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
			if n, err = copyOnce(dst, src, held, passed); err == nil && n > 0 {
				continue
			}
		}
		if err != nil || n == 0 {
			_ = dst.CloseWrite()
			return err
		}
		held()
		err = x.drain(wc, n)
		passed()
		if err != nil {
			x.close()
			return err
		}
		p.put(x)
	}
}

// copies are for who gets no pipe.
var copies = sync.Pool{New: func() any { return new([16 << 10]byte) }}

// copyOnce moves what is there through memory; nothing, without an error, at
// the end.
func copyOnce(dst, src *net.TCPConn, held, passed func()) (int, error) {
	b := copies.Get().(*[16 << 10]byte)
	defer copies.Put(b)
	n, err := src.Read(b[:])
	if n > 0 {
		held()
		defer passed()
		if _, err := dst.Write(b[:n]); err != nil {
			return n, err
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// fill waits until there is something to read and moves it into a pipe.
func (p *pipePool) fill(rc syscall.RawConn) (x *pipe, n int, err error) {
	var serr error
	err = rc.Read(func(fd uintptr) bool {
		if x, serr = p.get(); serr != nil {
			return true
		}
		for {
			m, err := unix.Splice(int(fd), nil, x.w, nil, spliceMost, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
			n, serr = int(m), err // an int64, and on 32 bits an int
			if errors.Is(serr, unix.EINTR) {
				continue
			}
			break
		}
		if serr == nil && n > 0 {
			return true
		}
		p.put(x) // nothing is in it
		x = nil
		return !errors.Is(serr, unix.EAGAIN)
	})
	if err == nil {
		err = serr
	}
	if err != nil && x != nil {
		p.put(x)
	}
	return x, max(n, 0), err
}

// drain moves n bytes from the pipe to the connection.
func (x *pipe) drain(wc syscall.RawConn, n int) error {
	var serr error
	err := wc.Write(func(fd uintptr) bool {
		for n > 0 {
			m, err := unix.Splice(x.r, nil, int(fd), nil, n, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
			serr = err
			switch {
			case errors.Is(serr, unix.EINTR):
			case errors.Is(serr, unix.EAGAIN):
				return false
			case serr != nil:
				return true
			case m == 0:
				serr = io.ErrUnexpectedEOF
				return true
			default:
				n -= int(m)
			}
		}
		return true
	})
	if err == nil && n > 0 {
		err = serr
	}
	return err
}
