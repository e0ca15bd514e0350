package wasm

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/wasm/host"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// watcher waits for the end of host processes, its own children and adopted
// ones alike, with one goroutine: pidfds in one epoll. Kernels before 5.3
// have no pidfds; there it looks once a second.
type watcher struct {
	epoll int
	wake  int // eventfd: stop
	exits chan workload.ID
	done  chan struct{}

	mu     sync.Mutex
	next   int32
	byFD   map[int32]*watched // by pidfd, or by a negative number without one
	byID   map[workload.ID]*watched
	status map[workload.ID]syscall.WaitStatus
}

// watched is one host process.
type watched struct {
	id    workload.ID
	pid   int
	start uint64
	fd    int32
	ended chan struct{}
}

func newWatcher() (*watcher, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("watch processes: %w", err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err == nil {
		err = unix.EpollCtl(ep, unix.EPOLL_CTL_ADD, wake, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(wake)})
	}
	if err != nil {
		_ = unix.Close(ep)
		return nil, fmt.Errorf("watch processes: %w", err)
	}
	w := &watcher{
		epoll: ep, wake: wake, exits: make(chan workload.ID, 64), done: make(chan struct{}), next: -2,
		byFD: map[int32]*watched{}, byID: map[workload.ID]*watched{}, status: map[workload.ID]syscall.WaitStatus{},
	}
	go w.run()
	return w, nil
}

// add watches a process that was alive with that start time.
func (w *watcher) add(id workload.ID, pid int, start uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.byID[id] != nil {
		return
	}
	p := &watched{id: id, pid: pid, start: start, ended: make(chan struct{})}
	fd, err := unix.PidfdOpen(pid, 0)
	if err == nil && !alive(pid, start) {
		// Recycled between the look and the open, or gone.
		_ = unix.Close(fd)
		err = unix.ESRCH
	}
	if err == nil {
		p.fd = int32(fd)
		if err := unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: p.fd}); err != nil {
			_ = unix.Close(fd)
			p.fd = 0
		}
	}
	if p.fd == 0 {
		p.fd = w.next
		w.next--
		_, _ = unix.Write(w.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	w.byFD[p.fd], w.byID[id] = p, p
}

// get returns the watched process of an attempt, or nil.
func (w *watcher) get(id workload.ID) *watched {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.byID[id]
}

// forget drops what is remembered of an ended attempt.
func (w *watcher) forget(id workload.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.status, id)
}

// waitStatus is how a child of ours ended, where known.
func (w *watcher) waitStatus(id workload.ID) (syscall.WaitStatus, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s, ok := w.status[id]
	return s, ok
}

// signal sends a signal to exactly the watched process. Under the lock, so
// that its pidfd cannot be closed, and its number reused, meanwhile.
func (w *watcher) signal(p *watched, sig unix.Signal) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.byFD[p.fd] != p {
		return nil // it has ended
	}
	var err error
	if p.fd > 0 {
		err = unix.PidfdSendSignal(int(p.fd), sig, nil, 0)
	} else if alive(p.pid, p.start) {
		err = unix.Kill(p.pid, sig)
	}
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// alive says that the process with that pid is still the one that started
// then, and not a zombie.
func alive(pid int, start uint64) bool {
	t, err := host.StartTime(pid)
	return err == nil && t == start
}

func (w *watcher) run() {
	defer close(w.done)
	events := make([]unix.EpollEvent, 64)
	var pending []workload.ID
	for {
		timeout := -1
		if w.polling() {
			timeout = 1000
		}
		if len(pending) > 0 {
			timeout = 100
		}
		n, err := unix.EpollWait(w.epoll, events, timeout)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
		for _, e := range events[:max(n, 0)] {
			if int(e.Fd) != w.wake {
				pending = append(pending, w.ended(e.Fd)...)
				continue
			}
			var b [8]byte
			_, _ = unix.Read(w.wake, b[:])
			w.mu.Lock()
			stop := w.next == 0
			w.mu.Unlock()
			if stop {
				return
			}
		}
		pending = append(pending, w.sweep()...)
		pending = w.deliver(pending)
	}
}

// deliver hands on as many hints as the reader takes; the rest wait. There
// are never more than attempts that ended.
func (w *watcher) deliver(pending []workload.ID) []workload.ID {
	for len(pending) > 0 {
		select {
		case w.exits <- pending[0]:
			pending = pending[1:]
		default:
			return pending
		}
	}
	return nil
}

func (w *watcher) polling() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for fd := range w.byFD {
		if fd < 0 {
			return true
		}
	}
	return false
}

// sweep looks at the processes without a pidfd.
func (w *watcher) sweep() (gone []workload.ID) {
	w.mu.Lock()
	var fds []int32
	for fd, p := range w.byFD {
		if fd < 0 && !alive(p.pid, p.start) {
			fds = append(fds, fd)
		}
	}
	w.mu.Unlock()
	for _, fd := range fds {
		gone = append(gone, w.ended(fd)...)
	}
	return gone
}

func (w *watcher) ended(fd int32) []workload.ID {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.byFD[fd]
	if p == nil {
		return nil
	}
	var ws syscall.WaitStatus
	if got, err := syscall.Wait4(p.pid, &ws, syscall.WNOHANG, nil); err == nil && got == p.pid {
		w.status[p.id] = ws
	}
	delete(w.byFD, fd)
	delete(w.byID, p.id)
	if fd > 0 {
		_ = unix.Close(int(fd)) // leaves the epoll by itself
	}
	close(p.ended)
	return []workload.ID{p.id}
}

// close stops watching; the processes go on.
func (w *watcher) close() {
	w.mu.Lock()
	w.next = 0
	w.mu.Unlock()
	_, _ = unix.Write(w.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	<-w.done
	w.mu.Lock()
	defer w.mu.Unlock()
	for fd := range w.byFD {
		if fd > 0 {
			_ = unix.Close(int(fd))
		}
	}
	w.byFD = map[int32]*watched{}
	_ = unix.Close(w.epoll)
	_ = unix.Close(w.wake)
}

// waitEnd waits until p has ended or d has passed.
func (p *watched) waitEnd(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-p.ended:
		return true
	case <-t.C:
		return false
	}
}
