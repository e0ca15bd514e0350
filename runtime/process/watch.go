package process

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Watcher waits for the end of host processes, its own children and adopted
// ones alike, with one goroutine: pidfds in one epoll. Kernels before 5.3
// have no pidfds; there it looks once a second.
type Watcher struct {
	epoll int
	wake  int // eventfd: stop
	exits chan workload.ID
	done  chan struct{}

	mu     sync.Mutex
	next   int32
	byFD   map[int32]*Watched // by pidfd, or by a negative number without one
	byID   map[workload.ID]*Watched
	status map[workload.ID]syscall.WaitStatus
}

// Watched is one host process.
type Watched struct {
	PID   int
	id    workload.ID
	start uint64
	fd    int32
	ended chan struct{}
}

// NewWatcher makes a watcher of no process yet. Close ends it.
func NewWatcher() (*Watcher, error) {
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
	w := &Watcher{
		epoll: ep, wake: wake, exits: make(chan workload.ID, 64), done: make(chan struct{}), next: -2,
		byFD: map[int32]*Watched{}, byID: map[workload.ID]*Watched{}, status: map[workload.ID]syscall.WaitStatus{},
	}
	go w.run()
	return w, nil
}

// Add watches a process that was alive with that start time.
func (w *Watcher) Add(id workload.ID, pid int, start uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.byID[id] != nil {
		return
	}
	p := &Watched{id: id, PID: pid, start: start, ended: make(chan struct{})}
	fd, err := unix.PidfdOpen(pid, 0)
	if err == nil && !Alive(pid, start) {
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

// Exits delivers the ids of processes that ended.
func (w *Watcher) Exits() <-chan workload.ID { return w.exits }

// Get returns the watched process of an attempt, or nil.
func (w *Watcher) Get(id workload.ID) *Watched {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.byID[id]
}

// Forget drops what is remembered of an ended attempt.
func (w *Watcher) Forget(id workload.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.status, id)
}

// WaitStatus is how a child of ours ended, where known.
func (w *Watcher) WaitStatus(id workload.ID) (syscall.WaitStatus, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s, ok := w.status[id]
	return s, ok
}

// Signal sends a signal to exactly the watched process. Under the lock, so
// that its pidfd cannot be closed, and its number reused, meanwhile.
func (w *Watcher) Signal(p *Watched, sig unix.Signal) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.byFD[p.fd] != p {
		return nil // it has ended
	}
	var err error
	if p.fd > 0 {
		err = unix.PidfdSendSignal(int(p.fd), sig, nil, 0)
	} else if Alive(p.PID, p.start) {
		err = unix.Kill(p.PID, sig)
	}
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// Alive says that the process with that pid is still the one that started
// then, and not a zombie.
func Alive(pid int, start uint64) bool {
	t, err := StartTime(pid)
	return err == nil && t == start
}

func (w *Watcher) run() {
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
func (w *Watcher) deliver(pending []workload.ID) []workload.ID {
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

func (w *Watcher) polling() bool {
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
func (w *Watcher) sweep() (gone []workload.ID) {
	w.mu.Lock()
	var fds []int32
	for fd, p := range w.byFD {
		if fd < 0 && !Alive(p.PID, p.start) {
			fds = append(fds, fd)
		}
	}
	w.mu.Unlock()
	for _, fd := range fds {
		gone = append(gone, w.ended(fd)...)
	}
	return gone
}

func (w *Watcher) ended(fd int32) []workload.ID {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.byFD[fd]
	if p == nil {
		return nil
	}
	var ws syscall.WaitStatus
	if got, err := syscall.Wait4(p.PID, &ws, syscall.WNOHANG, nil); err == nil && got == p.PID {
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

// Close stops watching; the processes go on.
func (w *Watcher) Close() {
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
	w.byFD = map[int32]*Watched{}
	_ = unix.Close(w.epoll)
	_ = unix.Close(w.wake)
}

// Ended is closed when it has ended.
func (p *Watched) Ended() <-chan struct{} { return p.ended }

// WaitEnd waits until p has ended or d has passed.
func (p *Watched) WaitEnd(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-p.ended:
		return true
	case <-t.C:
		return false
	}
}
