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
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/runtime/process"
)

// WriteHostRecord leaves in dir what identifies this process.
func WriteHostRecord(dir string) error {
	start, err := process.StartTime(os.Getpid())
	if err != nil {
		return err
	}
	b, err := json.Marshal(HostRecord{PID: os.Getpid(), StartTime: start, BootID: process.BootID(), StartedAt: time.Now().UTC()})
	if err != nil {
		return fmt.Errorf("host record: %w", err)
	}
	return atomicfile.Write(filepath.Join(dir, HostFile), b, 0o600)
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
