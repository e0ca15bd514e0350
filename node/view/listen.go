package view

import (
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// Listen makes the socket at path, in place of what an agent that was killed
// left there. Only the agent's own user, and root, may connect: the file says
// so from its first moment (it is made in a private folder and moved), and
// the kernel is asked who is at the other end.
func Listen(path string, log *slog.Logger) (*Listener, error) {
	l, err := listen(path)
	if err != nil {
		return nil, err
	}
	return &Listener{path: path, own: os.Geteuid(), log: log, open: l, file: fileAt(path)}, nil
}

func listen(path string) (*net.UnixListener, error) {
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
	return l, nil
}

// fileAt is what has the name; nil is nothing.
func fileAt(path string) os.FileInfo {
	i, err := os.Lstat(path)
	if err != nil {
		return nil
	}
	return i
}

// Listener is the agent's socket.
type Listener struct {
	path string
	own  int
	log  *slog.Logger

	mu     sync.Mutex
	open   *net.UnixListener
	file   os.FileInfo // of the socket
	closed bool
}

func (l *Listener) current() *net.UnixListener {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.open
}

// inPlace says whether the name is still this socket's; l.mu is held.
func (l *Listener) inPlace() bool {
	i := fileAt(l.path)
	return i != nil && l.file != nil && os.SameFile(i, l.file)
}

// Restore makes the socket, and its folder, again if somebody removed them, and
// says whether it did. Connections that are open go on.
func (l *Listener) Restore() (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.inPlace() {
		return false, nil
	}
	again, err := listen(l.path)
	if err != nil {
		return false, err
	}
	_ = l.open.Close() // nobody can find it; Accept goes on with the other
	l.open, l.file = again, fileAt(l.path)
	return true, nil
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		open := l.current()
		c, err := open.AcceptUnix()
		if err != nil && open != l.current() {
			continue
		}
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

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// Close implements net.Listener.
func (l *Listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inPlace() { // not another agent's
		_ = os.Remove(l.path)
	}
	l.closed = true
	return l.open.Close()
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
