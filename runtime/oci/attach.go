package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Attach implements workload.Attacher over conmon's socket: packets of which
// the first byte names the stream (2 output, 3 error output), and raw input
// in the other direction (conmon, src/conn_sock.c).
func (r *Runtime) Attach(ctx context.Context, id workload.ID, s workload.Streams) error {
	rec, _, ok := r.alive(id)
	if !ok {
		return fmt.Errorf("attach to %s: %w", id.Container, errNotRunning)
	}
	conn, err := dialPackets(filepath.Join(r.socketDir(), rec.Name, "attach"))
	if err != nil {
		return fmt.Errorf("attach to %s: %w", id.Container, err)
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = unix.Shutdown(int(conn.Fd()), unix.SHUT_RDWR) })
	defer stop()
	if s.Resize != nil {
		go func() {
			for z := range s.Resize {
				r.resize(id, z)
			}
		}()
	}
	if s.Stdin != nil {
		go func() {
			if _, err := io.Copy(conn, s.Stdin); err == nil {
				_ = unix.Shutdown(int(conn.Fd()), unix.SHUT_WR)
			}
		}()
	}
	buf := make([]byte, 32<<10+1) // conmon sends at most 32 KiB at once
	for {
		n, err := conn.Read(buf)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("attach to %s: %w", id.Container, context.Cause(ctx))
		case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
			return nil
		case err != nil:
			return fmt.Errorf("attach to %s: %w", id.Container, err)
		}
		out := s.Stdout
		if n > 0 && buf[0] == 3 {
			out = s.Stderr
		}
		if n < 2 || out == nil {
			continue
		}
		if _, err := out.Write(buf[1:n]); err != nil {
			return fmt.Errorf("attach to %s: %w", id.Container, err)
		}
	}
}

// resize tells conmon the size of the container's terminal.
func (r *Runtime) resize(id workload.ID, z workload.Size) {
	// Never wait for a reader: there may be none any more.
	f, err := os.OpenFile(filepath.Join(r.folder(id), "ctl"), os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	_, _ = fmt.Fprintf(f, "1 %d %d\n", z.Height, z.Width)
}

// dialPackets connects to a socket of packets. The kernel finds it by a
// descriptor of its folder, since a path may be too long for an address.
func dialPackets(path string) (*os.File, error) {
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer func() { _ = d.Close() }()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), filepath.Base(path))}); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}
