package node

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// MemoryStalls is where the kernel says that work waits for memory, and from
// when on it shall: 200 ms of any 2 s (Documentation/accounting/psi.rst). It
// says so once a window at most.
const (
	MemoryStalls = "/proc/pressure/memory"
	StallTrigger = "some 200000 2000000"
)

// WatchStalls calls wake whenever the trigger on a file of pressure stall
// information fires, until ctx ends. It holds one thread. The error says that
// this kernel has no such files, or that it may not be asked.
func WatchStalls(ctx context.Context, path, trigger string, wake func()) error {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("pressure: open %s: %w", path, err)
	}
	defer func() { _ = unix.Close(fd) }()
	if _, err := unix.Write(fd, append([]byte(trigger), 0)); err != nil {
		return fmt.Errorf("pressure: trigger %q on %s: %w", trigger, path, err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("pressure: %w", err)
	}
	defer func() { _ = r.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = w.Close() })
	defer func() {
		if stop() {
			_ = w.Close()
		}
	}()
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}, {Fd: int32(r.Fd()), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(fds, -1)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("pressure: poll %s: %w", path, err)
		case fds[1].Revents != 0:
			return nil
		case fds[0].Revents&(unix.POLLERR|unix.POLLNVAL) != 0:
			return fmt.Errorf("pressure: %s is gone", path)
		case fds[0].Revents&unix.POLLPRI != 0:
			wake()
		}
	}
}
