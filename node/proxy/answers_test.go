package proxy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

// An answer that its client reads late is not cut while its endpoint
// terminates, however long nothing moves; nor is one with pauses. Once all has
// arrived and nobody asks again, the connection is closed.
func TestAnAnswerThatBeganIsNotIdle(t *testing.T) {
	const size = 30 << 20
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				b := make([]byte, 1)
				for {
					if _, err := c.Read(b); err != nil {
						return
					}
					n := 1
					if b[0] == 'b' {
						n = size
					}
					if _, err := c.Write(make([]byte, n)); err != nil {
						return
					}
				}
			}()
		}
	}()
	port := unused.Port(t).Port()
	backend := l.Addr().(*net.TCPAddr).AddrPort()
	e := direct(t, &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80, NodePort: port}}}, backend)
	ask := func(what string) net.Conn {
		t.Helper()
		c, err := net.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err := io.WriteString(c, what); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		return c
	}
	big, small := ask("b"), ask("s")
	ends, err := wire.EncodeItem(&wire.Slice{Service: "s", Ports: []wire.SlicePort{{Name: "p", Protocol: "TCP", Port: backend.Port()}},
		Endpoints: []wire.Endpoint{{Address: backend.Addr().AsSlice(), State: wire.EndpointServing | wire.EndpointTerminating, Node: "n"}}})
	if err != nil {
		t.Fatal(err)
	}
	e.Apply([]wire.ServiceItem{{Key: wire.ItemSlice + "d/s", Data: ends}}, nil, true)

	e.drain(time.Now().Add(9 * time.Second)) // as if so much later
	if _, err := io.WriteString(small, "s"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(small, make([]byte, 1)); err != nil {
		t.Fatal("the one that was between two pieces:", err)
	}
	later := time.Now()
	closed := func(c net.Conn) func() error {
		return func() error {
			later = later.Add(time.Hour)
			e.drain(later)
			_ = c.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
				return fmt.Errorf("read: %w", err)
			}
			return nil
		}
	}
	w := &world{t: t}
	w.eventually("what nobody uses is closed", closed(small))
	if n, err := io.Copy(io.Discard, io.LimitReader(big, size-1)); err != nil || n != size-1 {
		t.Fatalf("the one that was not read: %d of %d, %v", n+1, size, err)
	}
	w.eventually("what was read in full is closed", closed(big))
}
