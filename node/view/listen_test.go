package view

import (
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

const dialEnv = "DUNLIN_TEST_DIAL"

// TestMain is also the other user that tries to connect.
func TestMain(m *testing.M) {
	if path := os.Getenv(dialEnv); path != "" {
		if _, err := net.Dial("unix", path); err != nil {
			os.Exit(7)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestSocketIsOfItsUserAlone(t *testing.T) {
	dir, err := os.MkdirTemp("", "dv") // t.TempDir's parents may not be entered by others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "agent.sock")
	if err := os.WriteFile(path, nil, 0o666); err != nil { // what a killed agent left
		t.Fatal(err)
	}
	old := syscall.Umask(0) // the most open one there is
	l, err := Listen(path, slog.New(slog.DiscardHandler))
	syscall.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", info.Mode(), err)
	}
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			accepted <- c
		}
		close(accepted)
	}()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if s := <-accepted; s == nil {
		t.Fatal("its own user was refused")
	}
	if os.Geteuid() == 0 {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(self)
		if err != nil {
			t.Fatal(err)
		}
		bin := filepath.Join(dir, "dial")
		if err := os.WriteFile(bin, b, 0o755); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(bin)
		cmd.Env = []string{dialEnv + "=" + path}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		_ = cmd.Run()
		if code := cmd.ProcessState.ExitCode(); code != 7 {
			t.Errorf("another user's connection: exit code %d, want a refusal (7)", code)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("the socket is left behind")
	}
}

// TestPeerDecides: what the kernel says of the other end counts, too.
func TestPeerDecides(t *testing.T) {
	for _, f := range []struct {
		uid, own int
		may      bool
	}{{0, 0, true}, {0, 1000, true}, {1000, 1000, true}, {1000, 0, false}, {1001, 1000, false}, {-1, 0, false}} {
		if mayRead(f.uid, f.own) != f.may {
			t.Errorf("uid %d at an agent of %d: want %v", f.uid, f.own, f.may)
		}
	}
}

// TestRestore: a socket whose folder was removed is there again, for new
// connections, and those that are open go on. What another one put in its place
// is not removed at the end.
func TestRestore(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	path := filepath.Join(dir, "agent.sock")
	l, err := Listen(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	accepted, ended := make(chan net.Conn), make(chan error, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				ended <- err
				return
			}
			accepted <- c
		}
	}()
	reach := func() (there, here net.Conn) {
		t.Helper()
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		s := <-accepted
		t.Cleanup(func() { _ = s.Close() })
		return c, s
	}
	c, s := reach()
	if made, err := l.Restore(); err != nil || made {
		t.Fatalf("made %v, %v, though it is there", made, err)
	}
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if made, err := l.Restore(); err != nil || !made {
		t.Fatalf("made %v, %v", made, err)
	}
	if i, err := os.Stat(path); err != nil || i.Mode().Perm() != 0o600 {
		t.Fatal(i, err)
	}
	reach()
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(make([]byte, 1)); err != nil {
		t.Fatal("an open connection was cut:", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil { // another's
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
	if _, err := os.Stat(path); err != nil {
		t.Error("another's socket was removed")
	}
	if made, err := l.Restore(); err != nil || made {
		t.Errorf("made %v, %v after its end", made, err)
	}
}
