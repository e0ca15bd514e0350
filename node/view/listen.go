package view

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Listen makes the socket at path, in place of what an agent that was killed
// left there. Only the agent's own user, and root, may connect: the file says
// so from its first moment (it is made in a private folder and moved), and
// the kernel is asked who is at the other end.
func Listen(path string, log *slog.Logger) (net.Listener, error) {
	dir := filepath.Join(filepath.Dir(path), ".new")
	if err := os.RemoveAll(dir); err != nil {
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o711); err != nil {
		return nil, fmt.Errorf("agent socket: make run-time folder: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	made := filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: made, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	l.SetUnlinkOnClose(false) // its name changes
	if err = os.Chmod(made, 0o600); err == nil {
		err = os.Rename(made, path)
	}
	if err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("agent socket: %w", err)
	}
	return &listener{UnixListener: l, path: path, own: os.Geteuid(), log: log}, nil
}

type listener struct {
	*net.UnixListener
	path string
	own  int
	log  *slog.Logger
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		uid, err := peer(c)
		if err == nil && mayRead(uid, l.own) {
			return c, nil
		}
		l.log.Warn("a connection to the agent's socket was refused", "uid", uid, "err", err)
		_ = c.Close()
	}
}

// Close implements net.Listener.
func (l *listener) Close() error {
	_ = os.Remove(l.path)
	return l.UnixListener.Close()
}

// mayRead: root, and the user that the agent runs as.
func mayRead(uid, own int) bool { return uid == 0 || uid == own }

// peer is the user at the other end (unix(7), SO_PEERCRED).
func peer(c *net.UnixConn) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	uid := -1
	cerr := raw.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			uid = int(cred.Uid)
		}
	})
	if cerr != nil {
		err = cerr
	}
	return uid, err
}
