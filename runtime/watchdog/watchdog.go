// Package watchdog stops an OCI container by itself when nobody has moved its
// deadline: conmon, which survives the agent as well, cannot. A watchdog is one
// small process for one container; it is the Wasm host program under another
// command, so that nothing more is installed.
//
// The deadline is eight bytes in a file of the attempt's run folder, which is
// in memory: nanoseconds of CLOCK_BOOTTIME, so that a machine that slept has
// lost them. The agent overwrites them (Set); the watchdog looks again when
// they are over.
package watchdog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/process"
)

// Command is the first argument of the host program that makes it a watchdog.
const Command = "watchdog"

// Files in the attempt's run folder.
const (
	deadlineFile = "stop-at"
	// FiredFile says that the watchdog stopped the container.
	FiredFile = "stopped-by-deadline"
)

// lookAgain bounds a sleep: a machine that was suspended has lost time that
// poll(2) does not count.
const lookAgain = 5 * time.Second

func boottime() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	return time.Duration(ts.Nano())
}

// Set moves the deadline to d from now.
func Set(dir string, d time.Duration) error {
	f, err := os.OpenFile(filepath.Join(dir, deadlineFile), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("stop deadline: %w", err)
	}
	defer func() { _ = f.Close() }()
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(boottime()+d))
	if _, err := f.WriteAt(b[:], 0); err != nil {
		return fmt.Errorf("stop deadline: %w", err)
	}
	return nil
}

// Has says whether an attempt has a deadline.
func Has(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, deadlineFile))
	return err == nil
}

func deadline(dir string) (time.Duration, bool) {
	b, err := os.ReadFile(filepath.Join(dir, deadlineFile))
	if err != nil || len(b) != 8 {
		return 0, false
	}
	return time.Duration(binary.LittleEndian.Uint64(b)), true
}

// Target is the first process of a container, and how it is stopped.
type Target struct {
	Dir    string
	PID    int
	Start  uint64 // its start time, which tells it from a later one
	Signal unix.Signal
	Grace  time.Duration // between the signal and the end
}

// Spawn starts a watchdog; binary is the host program.
func Spawn(binary string, t Target) (*os.Process, error) {
	cmd := exec.Command(binary, Command, t.Dir, strconv.Itoa(t.PID), strconv.FormatUint(t.Start, 10), strconv.Itoa(int(t.Signal)), strconv.FormatInt(int64(t.Grace), 10)) //nolint:noctx // it outlives every context
	cmd.Args[0] = "dunlin-wasm"                                                                                                                                           // a re-executed main program looks for that
	cmd.Dir, cmd.Env = "/", []string{"GOMAXPROCS=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start watchdog: %w", err)
	}
	return cmd.Process, nil
}

// Main is the watchdog; args are those after Command. It returns when the
// container has ended.
func Main(args []string) int {
	t, err := parse(args)
	if err == nil {
		err = t.watch()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "watchdog:", err)
		return 1
	}
	return 0
}

func parse(args []string) (t Target, err error) {
	if len(args) != 5 {
		return t, errors.New("it is started by dunlin")
	}
	var errs [4]error
	var sig int
	var grace int64
	t.Dir = args[0]
	t.PID, errs[0] = strconv.Atoi(args[1])
	t.Start, errs[1] = strconv.ParseUint(args[2], 10, 64)
	sig, errs[2] = strconv.Atoi(args[3])
	grace, errs[3] = strconv.ParseInt(args[4], 10, 64)
	t.Signal, t.Grace = unix.Signal(sig), time.Duration(grace)
	return t, errors.Join(errs[:]...)
}

func (t *Target) watch() error {
	fd, err := unix.PidfdOpen(t.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		fd = -1 // no pidfds before Linux 5.3: looked at now and then
	} else {
		defer func() { _ = unix.Close(fd) }()
	}
	for process.Alive(t.PID, t.Start) {
		at, ok := deadline(t.Dir)
		if !ok {
			return nil // the attempt is being removed
		}
		left := at - boottime()
		if left > 0 {
			t.wait(fd, min(left, lookAgain))
			continue
		}
		if err := os.WriteFile(filepath.Join(t.Dir, FiredFile), nil, 0o600); err != nil && !errors.Is(err, os.ErrNotExist) {
			fmt.Fprintln(os.Stderr, "watchdog:", err) // it is stopped all the same
		}
		if t.Grace > 0 {
			t.signal(fd, t.Signal)
			for end := boottime() + t.Grace; process.Alive(t.PID, t.Start) && boottime() < end; {
				t.wait(fd, min(end-boottime(), lookAgain))
			}
		}
		t.signal(fd, unix.SIGKILL)
		t.wait(fd, lookAgain) // and once more, if a disk held it
	}
	return nil
}

// wait until the process has ended, for d at most.
func (t *Target) wait(fd int, d time.Duration) {
	var fds []unix.PollFd
	if fd >= 0 {
		fds = []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	} else {
		d = min(d, time.Second)
	}
	_, _ = unix.Poll(fds, int(d/time.Millisecond)+1)
}

func (t *Target) signal(fd int, sig unix.Signal) {
	if fd >= 0 {
		_ = unix.PidfdSendSignal(fd, sig, nil, 0)
	} else if process.Alive(t.PID, t.Start) {
		_ = unix.Kill(t.PID, sig)
	}
}
