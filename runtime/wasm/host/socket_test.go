package host

import (
	"fmt"
	"io"
	"net"
	"os"
	"testing"

	"github.com/tetratelabs/wazero/experimental/sys"
	"golang.org/x/sys/unix"
)

// Who is connected when the guest is asked to end gets an answer, although the
// guest had not looked yet; who comes later is refused.
func TestDrainKeepsWhoIsConnected(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f, err := tcp.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	_ = tcp.Close()
	fd, err := unix.Dup(int(f.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	if err := unix.SetNonblock(fd, true); err != nil { // as the host has them
		t.Fatal(err)
	}
	s := newSockets()
	l := &listener{set: s, fds: []int{fd}}
	s.listeners[3] = l
	defer s.closeListener(3)

	const clients = 5
	var conns []net.Conn
	for i := range clients {
		c, err := net.Dial("tcp", tcp.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		if _, err := fmt.Fprintf(c, "%d", i); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	s.drain()
	if c, err := net.Dial("tcp", tcp.Addr().String()); err == nil {
		_ = c.Close()
		t.Error("connected after the end began")
	}
	for range clients {
		fd, errno := l.accept()
		if errno != 0 {
			t.Fatalf("a client that was connected: %v", errno)
		}
		guest := os.NewFile(uintptr(fd), "guest")
		var b [1]byte
		if _, err := guest.Read(b[:]); err != nil {
			t.Fatal(err)
		}
		if _, err := guest.Write(b[:]); err != nil {
			t.Fatal(err)
		}
		_ = guest.Close()
	}
	for i, c := range conns {
		if b, err := io.ReadAll(c); err != nil || string(b) != fmt.Sprint(i) {
			t.Errorf("client %d got %q, %v", i, b, err)
		}
	}
	if _, errno := l.accept(); errno != sys.EINVAL {
		t.Errorf("after all of them: %v", errno)
	}
}
