package host

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// WriteHostRecord leaves in dir what identifies this process.
func WriteHostRecord(dir string) error {
	start, err := StartTime(os.Getpid())
	if err != nil {
		return err
	}
	b, err := json.Marshal(HostRecord{PID: os.Getpid(), StartTime: start, BootID: BootID(), StartedAt: time.Now().UTC()})
	if err != nil {
		return fmt.Errorf("host record: %w", err)
	}
	return atomicfile.Write(filepath.Join(dir, HostFile), b, 0o600)
}

// StartTime is when a process started, in clock ticks since boot
// (proc_pid_stat(5), field 22). fs.ErrNotExist if there is none.
func StartTime(pid int) (uint64, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		if errors.Is(err, unix.ESRCH) {
			err = os.ErrNotExist
		}
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	// The command, in parentheses, may hold anything.
	s := string(b)
	i := strings.LastIndexByte(s, ')')
	fields := strings.Fields(s[i+1:])
	if i < 0 || len(fields) < 20 {
		return 0, fmt.Errorf("process %d: stat is %q", pid, s)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, fmt.Errorf("process %d: %w", pid, os.ErrNotExist)
	}
	t, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return 0, fmt.Errorf("process %d: %w", pid, err)
	}
	return t, nil
}

// BootID changes with every boot; empty when it cannot be read.
func BootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// castagnoli is computed by the CPU where it can.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// SumDir is a checksum over the names and contents of the files below dir
// that the engine put there.
func SumDir(dir string) (string, error) {
	var names []string
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("checksum: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		files, err := os.ReadDir(filepath.Join(dir, e.Name()))
		if err != nil {
			return "", fmt.Errorf("checksum: %w", err)
		}
		for _, f := range files {
			names = append(names, filepath.Join(e.Name(), f.Name()))
		}
	}
	if len(names) == 0 {
		return "", errors.New("checksum: no compiled code")
	}
	sort.Strings(names)
	h := crc32.New(castagnoli)
	buf := make([]byte, 64<<10)
	for _, n := range names {
		_, _ = io.WriteString(h, n+"\x00")
		f, err := os.Open(filepath.Join(dir, n))
		if err != nil {
			return "", fmt.Errorf("checksum: %w", err)
		}
		_, err = io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{f}, buf)
		_ = f.Close()
		if err != nil {
			return "", fmt.Errorf("checksum: %w", err)
		}
	}
	return fmt.Sprintf("crc32c:%08x", h.Sum32()), nil
}

// Send sends one request to the control socket in the run folder and waits
// for the answer. The folder is a descriptor's path where its own is too
// long for a socket address.
func Send(dir string, cmd Request, timeout time.Duration) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("control: %w", err)
	}
	defer func() { _ = d.Close() }()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("control: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	tv := unix.NsecToTimeval(int64(timeout))
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), ControlSocket)}); err != nil {
		return fmt.Errorf("control: %w", err)
	}
	var msg [requestSize]byte
	switch cmd.Command {
	case "stop":
		msg[0] = cmdStop
		le.PutUint64(msg[1:], uint64(cmd.Grace))
	case "extend":
		msg[0] = cmdExtend
		le.PutUint64(msg[1:], uint64(cmd.Until))
	case "ping":
		msg[0] = cmdPing
	default:
		return fmt.Errorf("control: no command %q", cmd.Command)
	}
	if _, err := unix.Write(fd, msg[:]); err != nil {
		return fmt.Errorf("control: %w", err)
	}
	n, err := unix.Read(fd, msg[:1])
	if err != nil {
		return fmt.Errorf("control: %w", err)
	}
	if n == 0 || msg[0] != answerOK {
		return errors.New("control: the host refused the request")
	}
	return nil
}
