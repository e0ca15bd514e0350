package host

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The control thread stops the guest: on request, on SIGTERM, and at the
// stop deadline. While a guest runs, the garbage collector runs only when the
// guest's own goroutine asks for it (collector), so this loop makes no
// garbage: fixed messages, no net package, no timers of Go.

// Wire form of a request on the control socket: a command byte and eight
// bytes of little-endian nanoseconds; the answer is one byte.
const (
	cmdPing   = 'p'
	cmdStop   = 's' // nanoseconds: grace
	cmdExtend = 'e' // nanoseconds: from now

	requestSize = 9

	answerOK  = 0
	answerBad = 1
)

// hardMargin is how much later than the control thread the kernel kills: it
// covers a process that cannot even schedule its control thread.
const hardMargin = 3 * time.Second

// termGrace is how long a guest has after SIGTERM: the machine goes down.
const termGrace = 10 * time.Second

// control owns the end of a guest's life.
type control struct {
	listen int // unix socket, -1 for none
	wake   int // eventfd: SIGTERM
	timer  int // timerfd on CLOCK_BOOTTIME, for the earlier of the two ends
	hard   hardTimer

	drain  func() // refuse new connections, end standard input
	expire func(reason, message string)

	impatient  bool // a second signal kills; see signalGrace
	stopping   bool
	grace      time.Duration
	graceEnd   int64 // CLOCK_BOOTTIME nanoseconds; math.MaxInt64 for none
	deadline   int64
	extendedBy time.Duration

	signals chan os.Signal
	wg      sync.WaitGroup
}

func boottime() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return nanotime()
	}
	return ts.Nano()
}

// newControl makes the control socket at path (empty: none) and the timers.
// It is called before privileges are dropped.
func newControl(path string, deadline time.Duration) (*control, error) {
	c := &control{listen: -1, graceEnd: math.MaxInt64, deadline: math.MaxInt64, extendedBy: deadline}
	var err error
	if c.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("control: %w", err)
	}
	if c.timer, err = unix.TimerfdCreate(unix.CLOCK_BOOTTIME, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("control: %w", err)
	}
	if err := c.hard.create(); err != nil {
		return nil, fmt.Errorf("control: %w", err)
	}
	if path != "" {
		if c.listen, err = listenUnix(path); err != nil {
			return nil, fmt.Errorf("control: %w", err)
		}
	}
	if deadline > 0 {
		c.deadline = boottime() + int64(deadline)
	}
	return c, nil
}

func listenUnix(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("socket: %w", err)
	}
	_ = unix.Unlink(path)
	old := unix.Umask(0o177)
	err = unix.Bind(fd, &unix.SockaddrUnix{Name: path})
	unix.Umask(old)
	if err == nil {
		err = unix.Listen(fd, 16)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, fmt.Errorf("listen on %s: %w", path, err)
	}
	return fd, nil
}

// start runs the control thread until the process ends.
func (c *control) start() {
	c.arm()
	c.signals = make(chan os.Signal, 1)
	signal.Notify(c.signals, syscall.SIGTERM, syscall.SIGINT)
	c.wg.Add(2)
	go func() {
		defer c.wg.Done()
		one := make([]byte, 8)
		binary.NativeEndian.PutUint64(one, 1)
		for range c.signals {
			_, _ = unix.Write(c.wake, one)
		}
	}()
	go func() {
		defer c.wg.Done()
		c.run()
	}()
}

func (c *control) run() {
	buf := make([]byte, 64)
	fds := []unix.PollFd{
		{Fd: int32(c.timer), Events: unix.POLLIN},
		{Fd: int32(c.wake), Events: unix.POLLIN},
		{Fd: int32(c.listen), Events: unix.POLLIN},
	}
	for {
		n, _, e := unix.Syscall(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fds[0])), uintptr(len(fds)), 0)
		if e != 0 || n == 0 {
			continue
		}
		if fds[1].Revents != 0 {
			_, _ = unix.Read(c.wake, buf)
			c.stop(c.signalGrace())
		}
		if fds[2].Revents != 0 {
			c.serve(buf)
		}
		if fds[0].Revents != 0 {
			_, _ = unix.Read(c.timer, buf)
		}
		c.check()
	}
}

// signalGrace is how long the guest has after a signal: in the foreground
// nothing if it serves nobody, and nothing after a second Ctrl-C.
func (c *control) signalGrace() time.Duration {
	if c.impatient && c.stopping {
		return 0
	}
	return termGrace
}

// check ends the guest when its time has come.
func (c *control) check() {
	now := boottime()
	switch {
	case now >= c.deadline:
		c.expire(ReasonDeadline, fmt.Sprintf("stopped by itself: no word from the control plane for %s", c.extendedBy))
	case now >= c.graceEnd:
		c.expire(ReasonError, fmt.Sprintf("did not end within the grace period of %s and was killed", c.grace))
	default:
		c.arm()
	}
}

// arm sets both timers to the earlier end.
func (c *control) arm() {
	end := min(c.graceEnd, c.deadline)
	var spec unix.ItimerSpec
	if end != math.MaxInt64 {
		spec.Value = unix.NsecToTimespec(max(end, 1))
	}
	_ = unix.TimerfdSettime(c.timer, unix.TFD_TIMER_ABSTIME, &spec, nil)
	c.hard.set(end)
}

func (c *control) stop(grace time.Duration) {
	end := boottime() + int64(max(grace, 0))
	if end < c.graceEnd {
		c.graceEnd, c.grace = end, grace
	}
	if !c.stopping {
		c.stopping = true
		if grace > 0 {
			c.drain()
		}
	}
}

// serve answers one connection; whoever connects sends at once, or is cut.
func (c *control) serve(buf []byte) {
	r, _, e := unix.Syscall6(unix.SYS_ACCEPT4, uintptr(c.listen), 0, 0, unix.SOCK_CLOEXEC, 0, 0)
	if e != 0 {
		return
	}
	fd := int(r)
	defer func() { _ = unix.Close(fd) }()
	tv := unix.NsecToTimeval(int64(500 * time.Millisecond))
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	for got := 0; got < requestSize; {
		n, err := unix.Read(fd, buf[got:requestSize])
		if err == unix.EINTR {
			continue
		}
		if err != nil || n == 0 {
			return
		}
		got += n
	}
	d := time.Duration(le.Uint64(buf[1:]))
	buf[0] = c.command(buf[0], d)
	_, _ = unix.Write(fd, buf[:1])
}

func (c *control) command(cmd byte, d time.Duration) byte {
	switch cmd {
	case cmdPing:
	case cmdStop:
		c.stop(d)
	case cmdExtend:
		if d <= 0 || c.deadline == math.MaxInt64 {
			return answerBad
		}
		c.deadline, c.extendedBy = boottime()+int64(d), d
		c.arm()
	default:
		return answerBad
	}
	return answerOK
}

// hardTimer is a POSIX timer on CLOCK_BOOTTIME whose signal is SIGKILL: the
// kernel's own guarantee of the end, whatever state the process is in.
type hardTimer struct {
	id int32
	ok bool
}

// sigevent of timer_create(2).
type sigevent struct {
	value  uintptr
	signo  int32
	notify int32
	_      [64 - 8 - unsafe.Sizeof(uintptr(0))]byte
}

func (h *hardTimer) create() error {
	ev := sigevent{signo: int32(unix.SIGKILL)}
	_, _, e := unix.Syscall(unix.SYS_TIMER_CREATE, unix.CLOCK_BOOTTIME, uintptr(unsafe.Pointer(&ev)), uintptr(unsafe.Pointer(&h.id)))
	if e != 0 {
		return fmt.Errorf("timer: %w", e)
	}
	h.ok = true
	return nil
}

// set arms the timer hardMargin after end; math.MaxInt64 disarms it.
func (h *hardTimer) set(end int64) {
	if !h.ok {
		return
	}
	var spec struct{ interval, value unix.Timespec }
	if end != math.MaxInt64 {
		spec.value = unix.NsecToTimespec(max(end, 1) + int64(hardMargin))
	}
	const absolute = 1
	_, _, _ = unix.Syscall6(unix.SYS_TIMER_SETTIME, uintptr(h.id), absolute, uintptr(unsafe.Pointer(&spec)), 0, 0, 0)
}
