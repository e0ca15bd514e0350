package proxy

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"

	"github.com/dunlin-project/dunlin/node/companion"
	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// whoFrom connects from an address of the loopback.
func whoFrom(from, addr string) (net.Conn, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c, err := d.Dial("tcp4", addr)
	if err != nil {
		return nil, err
	}
	b := make([]byte, 2)
	if _, err := c.Read(b); err != nil {
		_ = c.Close()
		return nil, err
	}
	return c, nil
}

// One client gets half of the connections that there may be, others half of the
// rest; what is refused is counted, and told once.
func TestOneClientDoesNotTakeAll(t *testing.T) {
	port := unused.Port(t).Port()
	var log lockedBuffer
	e := direct(t, &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80, NodePort: port}}}, backendServer(t, "a"))
	e.conns.mu.Lock()
	e.conns.most, e.conns.log = 8, slog.New(slog.NewTextHandler(&log, nil))
	e.conns.mu.Unlock()
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	for i := range 4 {
		c, err := whoFrom("127.0.0.2", addr)
		if err != nil {
			t.Fatal(i, err)
		}
		open = append(open, c)
	}
	for range 3 {
		if c, err := whoFrom("127.0.0.2", addr); err == nil {
			open = append(open, c)
			t.Fatal("more than half")
		}
	}
	for i := range 2 {
		c, err := whoFrom("127.0.0.3", addr)
		if err != nil {
			t.Fatal("another client:", i, err)
		}
		open = append(open, c)
	}
	if c, err := whoFrom("127.0.0.3", addr); err == nil {
		open = append(open, c)
		t.Fatal("more than half of the rest")
	}
	if st := e.Status(companion.Head{}).(*Status); st.OverShare != 4 {
		t.Errorf("%+v", st)
	}
	if text := log.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "source=127.0.0.2") {
		t.Error(text)
	}
	_, _ = open[0].Close(), open[1].Close() // of six that the other one leaves, three are half
	w := &world{t: t}
	w.eventually("what it gives back it may have again", func() error {
		c, err := whoFrom("127.0.0.2", addr)
		if err == nil {
			open = append(open, c)
		}
		return err
	})
}

func TestShares(t *testing.T) {
	s := newShares("x", 100, slog.New(slog.DiscardHandler))
	got := func(from string) (n int) {
		for s.take(sourceOf(netip.MustParseAddr(from))) {
			n++
		}
		return n
	}
	for _, c := range []struct {
		from string
		want int
	}{{"192.0.2.1", 50}, {"::ffff:192.0.2.1", 0}, {"192.0.2.2", 25}, {"2001:db8::1", 13}, {"2001:db8::2", 0}, {"2001:db8:0:1::1", 6}} {
		if n := got(c.from); n != c.want {
			t.Errorf("%s gets %d, want %d", c.from, n, c.want)
		}
	}
	for range 50 {
		s.give(netip.MustParseAddr("192.0.2.1"))
	}
	if n := got("192.0.2.1"); n != 28 || len(s.held) != 4 {
		t.Errorf("%d, %v", n, s.held)
	}
}
