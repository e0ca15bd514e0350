package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Exec implements workload.Execer: the command gets the container's user,
// environment, folder and limits.
func (r *Runtime) Exec(ctx context.Context, id workload.ID, argv []string, s workload.Streams) (int, error) {
	dir := r.folder(id)
	rec, _, ok := r.alive(id)
	if !ok {
		return 0, fmt.Errorf("exec in %s: %w", id.Container, errNotRunning)
	}
	var b specs.Spec
	text, err := os.ReadFile(filepath.Join(dir, bundleFile))
	if err == nil {
		err = json.Unmarshal(text, &b)
	}
	if err != nil {
		return 0, fmt.Errorf("exec in %s: %w", id.Container, err)
	}
	p := *b.Process
	p.Args, p.Terminal = argv, s.TTY
	if s.TTY && !rec.TTY {
		p.Env = append(p.Env, "TERM=xterm")
	}
	var size workload.Size
	if s.TTY {
		// runc passes our terminal's size on only once the command runs.
		if size = firstSize(s.Resize); size != (workload.Size{}) {
			p.ConsoleSize = &specs.Box{Height: uint(size.Height), Width: uint(size.Width)}
		}
	}
	tmp, err := os.MkdirTemp(dir, "exec-")
	if err != nil {
		return 0, fmt.Errorf("exec in %s: %w", id.Container, err)
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	if text, err = json.Marshal(p); err == nil {
		err = os.WriteFile(filepath.Join(tmp, "process.json"), text, 0o600)
	}
	if err != nil {
		return 0, fmt.Errorf("exec in %s: %w", id.Container, err)
	}
	pidfile := filepath.Join(tmp, "pid")
	log := filepath.Join(tmp, "log")
	args := []string{"--log", log, "exec", "--process", filepath.Join(tmp, "process.json"), "--pid-file", pidfile}
	if s.TTY {
		args = append(args, "--tty")
	}
	c := command(ctx, rec.Runtime, r.rootDir(), append(args, rec.Name)...)
	c.Cancel = func() error {
		if killExec(pidfile) {
			return nil
		}
		// The command has ended, and the program waits for what that left behind
		// and still holds its output.
		return c.Process.Kill()
	}
	// For one that hangs before it has a child.
	c.WaitDelay = 2 * time.Second
	if s.TTY {
		err = runTTY(ctx, c, s, size)
	} else {
		err = runPipes(ctx, c, s)
	}
	if ctx.Err() != nil {
		return 0, fmt.Errorf("exec in %s: %w", id.Container, context.Cause(ctx))
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if code := exit.ExitCode(); code >= 0 {
			if _, err := os.Stat(pidfile); err == nil {
				return code, nil
			}
			return notExecuted(log), nil
		}
	}
	if err != nil {
		return 0, fmt.Errorf("exec in %s: %w", id.Container, err)
	}
	return 0, nil
}

// Exit codes of a shell for a command that cannot be executed, and for one that
// is not there (POSIX.1-2017, section 2.8.2).
const (
	exitCannotExecute = 126
	exitNotFound      = 127
)

// notExecuted is the code of a command that never ran, by the program's log:
// runc and crun say themselves why, where the command's own complaints would go,
// and in plain words only when their log is a file.
func notExecuted(log string) int {
	text, err := os.ReadFile(log)
	said := strings.ToLower(string(text))
	if err == nil && (strings.Contains(said, "no such file") || strings.Contains(said, "not found")) {
		return exitNotFound
	}
	return exitCannotExecute
}

// pidTries bounds, in units of 10 ms, how long a command that is to end is
// waited for to have a number: what is not found then is left behind.
const pidTries = 200

// killExec ends an exec's process inside the container, with which the
// program that waits for it ends, and what that process started and still
// has: a shell whose time is over must not leave its commands behind. False:
// the process has ended already.
func killExec(pidfile string) bool {
	var b []byte
	for range pidTries { // the command may run before runc says so
		var err error
		if b, err = os.ReadFile(pidfile); err == nil {
			break
		}
		<-time.After(10 * time.Millisecond)
	}
	if b == nil {
		return true // it has no child
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid <= 1 {
		return true
	}
	return killTree(pid)
}

// killTree ends a process and what it started. All are stopped before any is
// killed: one that runs may start another between the look and the kill. False:
// the process has ended already.
func killTree(pid int) bool {
	if unix.Kill(pid, unix.SIGSTOP) != nil {
		return false
	}
	var all []int
	settled := false // all stood still in the look before: what it missed is seen now
	for range stopTries {
		all = descendants(pid, nil)
		still := stopped(pid)
		for _, child := range all {
			if !stopped(child) {
				still = false
				_ = unix.Kill(child, unix.SIGSTOP)
			}
		}
		if still && settled {
			break
		}
		if settled = still; !still {
			<-time.After(time.Millisecond)
		}
	}
	for _, p := range append(all, pid) {
		_ = unix.Kill(p, unix.SIGKILL)
	}
	return true
}

// stopTries bounds, in milliseconds, how long processes are waited for that a
// system call keeps from stopping.
const stopTries = 200

// stopped says that a process starts nothing any more.
func stopped(pid int) bool {
	f := statOf(pid)
	return len(f) == 0 || strings.Contains("TtZX", f[0])
}

// statOf are the fields of a process's stat from its state on
// (proc_pid_stat(5)); none when it has ended.
func statOf(pid int) []string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	return strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])) // its name may hold anything
}

// descendantsMost bounds what is looked for below one process.
const descendantsMost = 1000

// descendants are the processes that a process started, and those started by
// them, as far as their parents are there.
func descendants(pid int, all []int) []int {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return all // the pattern is constant
	}
	for _, f := range tasks {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it ended
		}
		for _, w := range strings.Fields(string(b)) {
			if child, err := strconv.Atoi(w); err == nil && len(all) < descendantsMost {
				all = descendants(child, append(all, child))
			}
		}
	}
	return all
}

// endExecs ends the commands that an agent which was killed had started: who
// asked for them is gone. It is called before this agent starts any.
func (r *Runtime) endExecs() {
	left, err := filepath.Glob(filepath.Join(r.containers(), "*", "exec-*"))
	if err != nil {
		return // the pattern is constant
	}
	for _, tmp := range left {
		if b, err := os.ReadFile(filepath.Join(tmp, "pid")); err == nil {
			// Its parent is the program that we told to run it, by name; another
			// process that has its number by now has another.
			if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && ranBy(pid, tmp) {
				r.log.Info("command of an earlier agent ended", "folder", tmp, "pid", pid)
				_ = killTree(pid)
			}
		}
		_ = os.RemoveAll(tmp)
	}
}

// ranBy says whether a process was started by an exec with this folder.
func ranBy(pid int, tmp string) bool {
	f := statOf(pid)
	if len(f) < 2 {
		return false
	}
	b, err := os.ReadFile("/proc/" + f[1] + "/cmdline")
	return err == nil && strings.Contains(string(b), filepath.Join(tmp, "pid")+"\x00")
}

// runPipes runs the program over pipes.
func runPipes(ctx context.Context, c *exec.Cmd, s workload.Streams) error {
	var outs outlets
	var err error
	if s.Stdout != nil {
		c.Stdout, err = outs.pipe(s.Stdout)
	}
	switch {
	case err != nil:
	case s.Stderr != nil && same(s.Stdout, s.Stderr):
		c.Stderr = c.Stdout
	case s.Stderr != nil:
		c.Stderr, err = outs.pipe(s.Stderr)
	}
	var in io.WriteCloser
	if err == nil && s.Stdin != nil {
		// Not c.Stdin: Wait would then wait for input that never comes.
		in, err = c.StdinPipe()
	}
	if err == nil {
		err = c.Start()
	}
	outs.started()
	if err != nil {
		outs.end(ctx)
		return err
	}
	if in != nil {
		go func() {
			_, _ = io.Copy(in, s.Stdin)
			_ = in.Close()
		}()
	}
	err = c.Wait()
	outs.end(ctx)
	return err
}

// same says whether two outputs are one, whose writes must not meet.
func same(a, b io.Writer) (yes bool) {
	defer func() { _ = recover() }() // types that cannot be compared
	return a == b
}

// firstSize is the terminal's size as it comes at once where there is a
// terminal at all; else nothing.
func firstSize(sizes <-chan workload.Size) (z workload.Size) {
	if sizes == nil {
		return z
	}
	t := time.NewTimer(200 * time.Millisecond)
	defer t.Stop()
	select {
	case z = <-sizes:
	case <-t.C:
	}
	return z
}

// runTTY gives the program a terminal of ours, whose size it passes on.
func runTTY(ctx context.Context, c *exec.Cmd, s workload.Streams, first workload.Size) error {
	master, slave, err := openTerminal()
	if err != nil {
		return err
	}
	c.Stdin, c.Stdout, c.Stderr = slave, slave, slave
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
	resize := func(z workload.Size) {
		if raw, err := master.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) {
				_ = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: z.Height, Col: z.Width})
			})
		}
	}
	if first != (workload.Size{}) {
		resize(first)
	}
	err = c.Start()
	_ = slave.Close()
	if err != nil {
		_ = master.Close()
		return err
	}
	if s.Resize != nil {
		go func() {
			for z := range s.Resize {
				resize(z)
			}
		}()
	}
	if s.Stdin != nil {
		go func() {
			if _, err := io.Copy(master, s.Stdin); err == nil {
				_, _ = master.Write([]byte{4}) // end of input, as a terminal has it
			}
		}()
	}
	out := s.Stdout
	if out == nil {
		out = io.Discard
	}
	var outs outlets
	outs.copy(master, out) // ends with EIO when the slave is closed
	err = c.Wait()
	outs.end(ctx) // what was printed last is still in the terminal
	return err
}

// openTerminal makes a pseudo-terminal (pts(4)).
func openTerminal() (master, slave *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("terminal: %w", err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		slave, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|syscall.O_NOCTTY, 0)
	}
	if err == nil {
		if err = passKeys(slave); err != nil {
			_ = slave.Close()
		}
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, nil, fmt.Errorf("terminal: %w", err)
	}
	return os.NewFile(uintptr(fd), "/dev/ptmx"), slave, nil
}

// passKeys lets what is typed through as it is (cfmakeraw(3), but for output).
// runc does so too, but late: what came before would be echoed twice, and a ^C
// or an end of input would be this terminal's and not the container's.
func passKeys(tty *os.File) error {
	t, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		return err
	}
	t.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP | unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
	return unix.IoctlSetTermios(int(tty.Fd()), unix.TCSETS, t)
}
