package proxy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A folder that somebody removed is there again: the same process goes on, with
// its listeners and connections. Without an agent it ends.
func TestARemovedFolderEndsNothing(t *testing.T) {
	w := newWorld(t)
	w.service("TCP", nil, endpoint{addr: backendServer(t, "a"), state: readyState})
	addr := w.address("tcp")
	_, c, err := who(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	first, err := Ask(w.dir)
	if err != nil {
		t.Fatal(err)
	}
	for what, path := range map[string]string{"folder": w.dir, "socket": filepath.Join(w.dir, "socket")} {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		w.eventually("the process answers again without its "+what, func() error {
			st, err := Ask(w.dir)
			if err == nil && st.PID != first.PID {
				t.Fatal("another process")
			}
			return err
		})
		if n, c, err := who(addr); err != nil || n != "a" {
			t.Fatal(n, err)
		} else {
			_ = c.Close()
		}
		if err := echo(c, 1<<16); err != nil {
			t.Fatal("a connection was cut:", err)
		}
	}
	w.service("TCP", nil, endpoint{addr: backendServer(t, "b"), state: readyState})
	w.eventually("it is fed", func() error {
		n, c, err := who(addr)
		if err != nil {
			return err
		}
		_ = c.Close()
		if n != "b" {
			return errors.New(n)
		}
		return nil
	})
	_ = c.Close()
	w.stop()
	if err := os.RemoveAll(w.dir); err != nil {
		t.Fatal(err)
	}
	w.eventually("it ends", func() error {
		if b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", first.PID)); strings.Contains(string(b), w.dir) {
			return errors.New("it is there")
		}
		return nil
	})
}

// Where the process cannot make its folder again, its agent starts another one,
// though the old one still has connections.
func TestAFolderThatTheProcessCannotMake(t *testing.T) {
	w := newWorld(t)
	w.service("TCP", nil, endpoint{addr: backendServer(t, "a"), state: readyState})
	addr := w.address("tcp")
	_, c, err := who(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	first, err := Ask(w.dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(w.dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.dir, nil, 0o600); err != nil { // in the way
		t.Fatal(err)
	}
	w.eventually("it takes no more connections", func() error {
		if _, c, err := who(addr); err == nil {
			_ = c.Close()
			return errors.New("it does")
		}
		return nil
	})
	if err := echo(c, 1<<16); err != nil {
		t.Fatal("a connection was cut:", err)
	}
	if err := os.Remove(w.dir); err != nil {
		t.Fatal(err)
	}
	w.eventually("another process serves", func() error {
		st, err := Ask(w.dir)
		if err != nil || st.PID == first.PID {
			return fmt.Errorf("%+v %w", st, err)
		}
		// Its port is another one if somebody took the first meanwhile.
		n, other, err := who(st.Ports["d/s:p/tcp"])
		if err != nil {
			return fmt.Errorf("%+v %w", st, err)
		}
		_ = other.Close()
		if n != "a" {
			return fmt.Errorf("answered by %s", n)
		}
		return nil
	})
	if err := echo(c, 1<<16); err != nil {
		t.Fatal("a connection was cut:", err)
	}
}
