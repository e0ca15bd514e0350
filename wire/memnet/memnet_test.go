package memnet

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

func pair(t *testing.T, n *Network) (client, server net.Conn) {
	t.Helper()
	l, err := n.Listen("server")
	if err != nil {
		t.Fatal(err)
	}
	client, err = n.Dialer("client")(t.Context(), "tcp", "server")
	if err != nil {
		t.Fatal(err)
	}
	server, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	return client, server
}

func read(t *testing.T, c net.Conn, n int) string {
	t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Bytes arrive late, in order, and a close arrives after them.
func TestDelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New()
		delays := []time.Duration{3 * time.Second, time.Second, 0}
		n.Delay(func(from, _ Addr) time.Duration {
			if from != "client" || len(delays) == 0 {
				return 0
			}
			d := delays[0]
			delays = delays[1:]
			return d
		})
		c, s := pair(t, n)
		start := time.Now()
		for _, w := range []string{"a", "b", "c"} {
			if _, err := c.Write([]byte(w)); err != nil {
				t.Fatal(err)
			}
		}
		_ = c.Close()
		_ = s.SetReadDeadline(time.Now().Add(time.Second))
		if _, err := s.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != time.Second {
			t.Fatalf("%v after %s", err, time.Since(start))
		}
		_ = s.SetReadDeadline(time.Time{})
		if got := read(t, s, 3); got != "abc" || time.Since(start) != 3*time.Second {
			t.Fatalf("%q after %s", got, time.Since(start))
		}
		if _, err := s.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
	})
}

// A link that is cut in one direction carries the other, and keeps what was
// sent; dials need both.
func TestBlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New()
		c, s := pair(t, n)
		n.Block("client", "server", true)
		if _, err := c.Write([]byte("up")); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Write([]byte("down")); err != nil {
			t.Fatal(err)
		}
		if got := read(t, c, 4); got != "down" {
			t.Fatalf("%q", got)
		}
		start := time.Now()
		time.AfterFunc(time.Minute, func() { n.Block("client", "server", false) })
		if got := read(t, s, 2); got != "up" || time.Since(start) != time.Minute {
			t.Fatalf("%q after %s", got, time.Since(start))
		}
		n.Deafen("client", true)
		dialled := make(chan net.Conn, 1)
		go func() {
			if d, err := n.Dialer("client")(t.Context(), "tcp", "server"); err == nil {
				dialled <- d
			}
		}()
		synctest.Wait()
		if len(dialled) != 0 {
			t.Fatal("dialled without hearing an answer")
		}
	})
}
