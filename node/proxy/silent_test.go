package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/wire"
)

// holder greets each connection, reads to its end, tells of that, and answers
// once it may.
func holder(t testing.TB) (at netip.AddrPort, ended chan struct{}, answer func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	ended, may := make(chan struct{}, 16), make(chan struct{})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				_, _ = io.WriteString(c, "a\n")
				_, _ = io.Copy(io.Discard, c)
				ended <- struct{}{}
				<-may
				_, _ = io.WriteString(c, "answer")
			}()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String()), ended, func() { close(may) }
}

// A client that has sent all gets its answer, however late; one that is gone
// since then holds nothing any more, whether it was reset or closed, and
// although its endpoint never closes.
func TestAHalfClosedClientThatIsGone(t *testing.T) {
	w := newWorld(t)
	at, ended, answer := holder(t)
	w.service("TCP", nil, endpoint{addr: at, state: readyState})
	addr := w.address("tcp")
	var clients []*net.TCPConn
	for range 3 {
		_, c, err := who(addr)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		x := c.(*net.TCPConn)
		if err := x.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, x)
		<-ended
	}
	open := func(want int64) func() error {
		return func() error {
			if st, err := Ask(w.dir); err != nil || st.Connections != want {
				return fmt.Errorf("%+v %w", st, err)
			}
			return nil
		}
	}
	w.eventually("all are there", open(3))
	_ = clients[0].SetLinger(0)
	_ = clients[0].Close()
	w.eventually("the one that reset is let go", open(2))
	// The kernel remembers a closed connection for a minute; here for a second.
	rc, err := clients[1].SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := rc.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_LINGER2, 1) }); err != nil {
		t.Fatal(err)
	}
	_ = clients[1].Close()
	w.eventually("the one that closed is let go", open(1))
	answer()
	if b, err := io.ReadAll(clients[2]); err != nil || string(b) != "answer" {
		t.Fatalf("the one that waits got %q, %v", b, err)
	}
	w.eventually("nothing is left", open(0))
}

// mute has the kernel drop all that comes in for a connection, as that of a
// machine without power does.
func mute(t testing.TB, c net.Conn) {
	t.Helper()
	rc, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	var serr error
	err = rc.Control(func(fd uintptr) {
		serr = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(drop)), Filter: &drop[0]})
	})
	if err := errors.Join(err, serr); err != nil {
		t.Fatal(err)
	}
}

// inProcess is an engine of this process, with a Service that has endpoints.
type inProcess struct {
	*engine
	t testing.TB
}

func newInProcess(t testing.TB) *inProcess {
	e := &inProcess{newEngine(slog.New(slog.DiscardHandler)), t}
	e.cfg = Settings{Node: "n", Zone: "default"}
	t.Cleanup(e.LetGo)
	return e
}

func (e *inProcess) service(eps ...endpoint) {
	e.t.Helper()
	put := func(key string, v any) wire.ServiceItem {
		b, err := wire.EncodeItem(v)
		if err != nil {
			e.t.Fatal(err)
		}
		return wire.ServiceItem{Key: key, Data: b}
	}
	items := []wire.ServiceItem{put(wire.ItemService+"d/s", &wire.Service{ClusterIPs: []string{"10.43.0.7"}, Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80}}})}
	keys := map[string]bool{items[0].Key: true}
	for i, x := range eps {
		it := put(fmt.Sprint(wire.ItemSlice, "d/s-", i), &wire.Slice{Service: "s", Ports: []wire.SlicePort{{Name: "p", Protocol: "TCP", Port: x.addr.Port()}},
			Endpoints: []wire.Endpoint{{Address: x.addr.Addr().AsSlice(), State: x.state, Node: "n"}}})
		items, keys[it.Key] = append(items, it), true
	}
	e.Retain(keys)
	e.Apply(items, nil, true)
}

// connect is a client with the endpoint's side of its connection.
func (e *inProcess) connect(l net.Listener) (client, server net.Conn) {
	e.t.Helper()
	at := ""
	e.mu.Lock()
	for _, x := range e.listeners {
		at = x.address()
	}
	e.mu.Unlock()
	client, err := net.Dial("tcp", at)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = client.Close() })
	_ = client.SetDeadline(time.Now().Add(time.Minute))
	if server, err = l.Accept(); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { _ = server.Close() })
	return client, server
}

func listening(t testing.TB) (net.Listener, endpoint) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l, endpoint{addr: netip.MustParseAddrPort(l.Addr().String()), state: readyState}
}

// A connection to a machine that is silent ends where no Service counts on the
// endpoint any more, or after long; one to an endpoint that left the tables and
// lives goes on, whether it is slow to answer or does not even read.
func TestASilentEndpointIsLetGo(t *testing.T) {
	e := newInProcess(t)
	slow, slowAt := listening(t)
	full, fullAt := listening(t)
	dead, deadAt := listening(t)
	e.service(slowAt)
	slowClient, slowServer := e.connect(slow)
	e.service(slowAt, fullAt)
	fullClient, fullServer := e.connect(full) // the least loaded one
	e.service(slowAt, fullAt, deadAt)
	deadClient, deadServer := e.connect(dead)

	for _, c := range []net.Conn{slowClient, deadClient} {
		if c == deadClient {
			mute(t, deadServer)
		}
		if _, err := io.WriteString(c, "request\n"); err != nil {
			t.Fatal(err)
		}
	}
	if s, err := bufio.NewReader(slowServer).ReadString('\n'); err != nil || s != "request\n" {
		t.Fatal(s, err)
	}
	sent := int64(0)
	_ = fullClient.SetWriteDeadline(time.Now().Add(2 * time.Second))
	for b := make([]byte, 1<<16); ; {
		n, err := fullClient.Write(b)
		sent += int64(n)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	// Silent for a second by now, but counted on.
	e.cutSilent(time.Second, time.Hour)
	if n := e.counters.silent.Load(); n != 0 {
		t.Fatalf("%d were cut that a Service counts on", n)
	}
	e.service()
	for e.counters.silent.Load() == 0 {
		e.cutSilent(time.Second, time.Hour)
		<-time.After(20 * time.Millisecond)
	}
	if _, err := deadClient.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the silent one:", err)
	}
	e.cutSilent(0, 0) // however long
	if n := e.counters.silent.Load(); n != 1 {
		t.Fatalf("%d were cut, one is silent", n)
	}
	if _, err := io.WriteString(slowServer, "answer"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(slowClient, make([]byte, 6)); err != nil {
		t.Fatal("the slow one was cut:", err)
	}
	_ = fullClient.(*net.TCPConn).CloseWrite()
	if n, err := io.Copy(io.Discard, fullServer); err != nil || n != sent {
		t.Fatalf("the one that did not read got %d bytes of %d, %v", n, sent, err)
	}
}

// What a Service counts on is given up as well, after longer.
func TestASilentEndpointThatIsCountedOn(t *testing.T) {
	e := newInProcess(t)
	l, at := listening(t)
	e.service(at)
	c, s := e.connect(l)
	mute(t, s)
	if _, err := io.WriteString(c, "request\n"); err != nil {
		t.Fatal(err)
	}
	for e.counters.silent.Load() == 0 {
		e.cutSilent(time.Hour, time.Second)
		<-time.After(20 * time.Millisecond)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
}
