package proxy

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

// echoPort answers datagrams with its name and the port that they came from.
func echoPort(t testing.TB, name string) netip.AddrPort {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			_, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = fmt.Fprintf(datagramTo{c, from}, "%s %s", name, from)
		}
	}()
	return netip.MustParseAddrPort(c.LocalAddr().String())
}

type datagramTo struct {
	c net.PacketConn
	a net.Addr
}

// Write sends one.
func (d datagramTo) Write(b []byte) (int, error) { return d.c.WriteTo(b, d.a) }

// asker asks a Service of UDP as one client.
func (w *world) asker() func() string {
	w.t.Helper()
	c, err := net.Dial("udp", w.address("udp"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	return func() string {
		w.t.Helper()
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := io.WriteString(c, "x"); err != nil {
			w.t.Fatal(err)
		}
		b := make([]byte, 64)
		n, err := c.Read(b)
		if err != nil {
			w.t.Fatal(err)
		}
		return string(b[:n])
	}
}

// A client's datagrams go on to an endpoint that terminates, by the same way,
// while it is the only one, and to another one as soon as there is one.
func TestDatagramsToTheLastEndpoint(t *testing.T) {
	w := newWorld(t)
	last := endpoint{addr: echoPort(t, "a"), state: readyState}
	w.service("UDP", nil, last)
	ask := w.asker()
	first := ask()
	last.state = wire.EndpointServing | wire.EndpointTerminating
	w.service("UDP", nil, last)
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); <-time.After(50 * time.Millisecond) {
		if got := ask(); got != first {
			t.Fatalf("the flow was %q and is %q", first, got)
		}
	}
	w.service("UDP", nil, last, endpoint{addr: echoPort(t, "b"), state: readyState})
	w.eventually("the same client reaches the new endpoint", func() error {
		if got := ask(); got[0] != 'b' {
			return fmt.Errorf("answer %q", got)
		}
		return nil
	})
}

// Datagrams that a node takes which is not there any more are lost, and nothing
// says so: once the table says that it is silent, a client that had its
// endpoint gets another one. If there is none, they go there.
func TestDatagramsLeaveASilentNode(t *testing.T) {
	w := newWorld(t)
	away := endpoint{addr: echoPort(t, "a"), state: readyState, node: "away"}
	w.service("UDP", nil, away)
	ask := w.asker()
	first := ask()
	w.put(wire.ItemNodeInfo+"away", &wire.NodeInfo{Silent: true})
	for end := time.Now().Add(time.Second); time.Now().Before(end); <-time.After(50 * time.Millisecond) {
		if got := ask(); got != first {
			t.Fatalf("without another one, the flow was %q and is %q", first, got)
		}
	}
	w.put(wire.ItemNodeInfo+"away", &wire.NodeInfo{})
	here := endpoint{addr: echoPort(t, "b"), state: readyState, node: "other"}
	w.service("UDP", nil, away, here)
	if got := ask(); got != first {
		t.Fatalf("while both are heard of, the flow was %q and is %q", first, got)
	}
	w.put(wire.ItemNodeInfo+"away", &wire.NodeInfo{Silent: true})
	w.eventually("the client reaches the node that is heard of", func() error {
		if got := ask(); got[0] != 'b' {
			return fmt.Errorf("answer %q", got)
		}
		return nil
	})
	for range 20 { // new clients, too
		if got := w.asker()(); got[0] != 'b' {
			t.Fatalf("answer %q", got)
		}
	}
}

// Datagrams to an endpoint that refuses them go to another one: new clients
// lose none, and it does not draw them by having the fewest.
func TestDatagramsPassOverWhatRefuses(t *testing.T) {
	w := newWorld(t)
	dead := unused.Port(t) // of UDP, too: nobody here takes ports of that range
	w.service("UDP", nil, endpoint{addr: dead, state: readyState}, endpoint{addr: echoPort(t, "b"), state: readyState})
	for range 40 {
		if got := w.asker()(); got[0] != 'b' {
			t.Fatalf("answer %q", got)
		}
	}
	st, err := Ask(w.dir)
	if err != nil || st.Failed == 0 || st.Failed > 3 {
		t.Errorf("%d tries of the one that refuses, %v", st.Failed, err)
	}
}
