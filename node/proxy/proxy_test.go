package proxy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

const readyState = wire.EndpointReady | wire.EndpointServing

func TestMain(m *testing.M) {
	MaybeRun() // the test binary is its own proxy
	os.Exit(m.Run())
}

// backendServer answers each connection with its name and then with what it
// is sent.
func backendServer(t testing.TB, name string) netip.AddrPort {
	t.Helper()
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
				_, _ = io.WriteString(c, name+"\n")
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String())
}

func udpServerFor(t testing.TB, name string) netip.AddrPort {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		b := make([]byte, 2048)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo([]byte(name+" "+string(b[:n])), from)
		}
	}()
	return netip.MustParseAddrPort(c.LocalAddr().String())
}

type endpoint struct {
	addr  netip.AddrPort
	state uint8
	node  string // another one than this
}

// world is a table, and a proxy that is fed with it.
type world struct {
	t       testing.TB
	dir     string
	table   *services.Table
	gen     uint64
	items   map[string][]byte
	tag     string // of the build
	nodeIPs []netip.Addr
	stop    func()
}

func newWorld(t testing.TB) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "dnlp") // short: sun_path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: dir, table: services.NewTable(), items: map[string][]byte{}}
	t.Cleanup(func() {
		if err := Stop(context.Background(), dir); err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	w.supervise()
	return w
}

// supervise runs an agent's part until stop.
func (w *world) supervise() {
	s := &Supervisor{Dir: w.dir, Table: w.table, Log: slog.New(slog.DiscardHandler), tag: w.tag,
		Settings: func() (Settings, bool) {
			return Settings{Node: "n", Zone: "default", Resolv: "/nonexistent", NodeIPs: w.nodeIPs}, true
		}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stopped := false
	w.stop = func() {
		if !stopped {
			stopped = true
			cancel()
			<-done
		}
	}
	w.t.Cleanup(w.stop)
}

func (w *world) put(key string, v any) {
	w.t.Helper()
	b, err := wire.EncodeItem(v)
	if err != nil {
		w.t.Fatal(err)
	}
	w.items[key] = b
	w.publish()
}

func (w *world) publish() {
	w.t.Helper()
	w.gen++
	r := &wire.ServicesReply{Generation: w.gen, Full: true}
	for k, v := range w.items {
		r.Items = append(r.Items, wire.ServiceItem{Key: k, Data: v})
		r.Digest += wire.ItemDigest(k, v)
	}
	if _, err := w.table.Apply(r); err != nil {
		w.t.Fatal(err)
	}
}

// service sets endpoints that all have addresses of 127.0.0.1; a slice has one
// set of ports, so each gets its own.
func (w *world) service(protocol string, set func(*wire.Service), eps ...endpoint) {
	w.t.Helper()
	svc := &wire.Service{ClusterIPs: []string{"10.43.0.7"}, Ports: []wire.ServicePort{{Name: "p", Protocol: protocol, Port: 80}}}
	if set != nil {
		set(svc)
	}
	for k := range w.items {
		delete(w.items, k)
	}
	for i, e := range eps {
		b, err := wire.EncodeItem(&wire.Slice{Service: "s", Ports: []wire.SlicePort{{Name: "p", Protocol: protocol, Port: e.addr.Port()}},
			Endpoints: []wire.Endpoint{{Address: e.addr.Addr().AsSlice(), State: e.state, Node: cmp.Or(e.node, "n")}}})
		if err != nil {
			w.t.Fatal(err)
		}
		w.items[fmt.Sprint(wire.ItemSlice, "d/s-", i)] = b
	}
	w.put(wire.ItemService+"d/s", svc)
}

// eventually polls; nothing depends on how long it takes.
func (w *world) eventually(what string, f func() error) {
	w.t.Helper()
	var err error
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); <-time.After(20 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	w.t.Fatalf("%s: %v", what, err)
}

// address is where the Service is reached.
func (w *world) address(protocol string) (addr string) {
	w.t.Helper()
	w.eventually("the Service has an address", func() error {
		st, err := Ask(w.dir)
		if err != nil {
			return err
		}
		if addr = st.Ports["d/s:p/"+protocol]; addr == "" {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	return addr
}

// who connects and says which backend answered.
func who(addr string) (string, net.Conn, error) {
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return "", nil, err
	}
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	b := make([]byte, 2)
	if _, err := io.ReadFull(c, b); err != nil {
		_ = c.Close()
		return "", nil, err
	}
	return string(b[:1]), c, nil
}

// echo sends bytes through a connection and expects them back.
func echo(c net.Conn, n int) error {
	want := bytes.Repeat([]byte("dunlin--"), n/8)
	errs := make(chan error, 1)
	go func() { _, err := c.Write(want); errs <- err }()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return errors.New("bytes changed on their way")
	}
	return <-errs
}

func TestRefusedEndpointIsSkipped(t *testing.T) {
	w := newWorld(t)
	w.service("TCP", nil, endpoint{addr: unused.Port(t), state: readyState}, endpoint{addr: backendServer(t, "a"), state: readyState}, endpoint{addr: backendServer(t, "b"), state: readyState})
	addr := w.address("tcp")
	seen := map[string]int{}
	for range 20 {
		n, c, err := who(addr)
		if err != nil {
			t.Fatal(err)
		}
		seen[n]++
		if err := echo(c, 1<<20); err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
	if seen["a"] < 5 || seen["b"] < 5 {
		t.Fatalf("spread %v", seen)
	}
	// Nothing ready: refused at once, as by a port nobody has.
	w.service("TCP", nil, endpoint{addr: backendServer(t, "a")})
	w.eventually("the port is closed", func() error {
		if _, c, err := who(addr); err == nil {
			_ = c.Close()
			return errors.New("still open")
		}
		return nil
	})
}

// An endpoint that terminates gets nothing new, serves its busy connections
// on, and loses its idle ones.
func TestTerminatingEndpointDrains(t *testing.T) {
	w := newWorld(t)
	a, b := backendServer(t, "a"), backendServer(t, "b")
	w.service("TCP", nil, endpoint{addr: a, state: readyState})
	addr := w.address("tcp")
	_, busy, err := who(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = busy.Close() }()
	_, idle, err := who(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idle.Close() }()
	w.service("TCP", nil, endpoint{addr: a, state: wire.EndpointServing | wire.EndpointTerminating}, endpoint{addr: b, state: readyState})
	w.eventually("new connections go elsewhere", func() error {
		n, c, err := who(addr)
		if err != nil {
			return err
		}
		_ = c.Close()
		if n != "b" {
			return fmt.Errorf("answered by %s", n)
		}
		return nil
	})
	closed := make(chan error, 1)
	go func() {
		_, err := idle.Read(make([]byte, 1))
		closed <- err
	}()
	for done := false; !done; {
		if err := echo(busy, 64); err != nil {
			t.Fatal("the busy one was cut:", err)
		}
		select {
		case err := <-closed:
			if !errors.Is(err, io.EOF) {
				t.Fatal("the idle one:", err)
			}
			done = true
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// A request whose answer takes longer than what counts as idle is not cut,
// while the endpoint that it was sent to terminates.
func TestAnOpenRequestIsNotIdle(t *testing.T) {
	w := newWorld(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	answer := make(chan struct{})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				b := make([]byte, 7)
				if _, err := io.ReadFull(c, b); err != nil {
					return
				}
				<-answer
				_, _ = c.Write([]byte("answer"))
			}()
		}
	}()
	slow := endpoint{addr: netip.MustParseAddrPort(l.Addr().String()), state: readyState}
	w.service("TCP", nil, slow)
	var conns [2]net.Conn
	for i := range conns {
		if conns[i], err = net.Dial("tcp", w.address("tcp")); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conns[i].Close() }()
		_ = conns[i].SetDeadline(time.Now().Add(time.Minute))
	}
	asks, idle := conns[0], conns[1]
	if _, err := asks.Write([]byte("request")); err != nil {
		t.Fatal(err)
	}
	slow.state = wire.EndpointServing | wire.EndpointTerminating
	w.service("TCP", nil, slow)
	if _, err := idle.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Fatalf("the idle one: %v", err)
	}
	close(answer)
	if b, err := io.ReadAll(asks); err != nil || string(b) != "answer" {
		t.Fatalf("the one that waits got %q, %v", b, err)
	}
}

func TestClientStaysWithItsEndpoint(t *testing.T) {
	w := newWorld(t)
	w.service("TCP", func(s *wire.Service) { s.AffinitySeconds = 60 }, endpoint{addr: backendServer(t, "a"), state: readyState}, endpoint{addr: backendServer(t, "b"), state: readyState})
	addr := w.address("tcp")
	var all []string
	for range 10 {
		n, c, err := who(addr)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }() // kept: the other one is less loaded
		all = append(all, n)
	}
	if len(slices.Compact(all)) != 1 {
		t.Fatalf("answered by %v", all)
	}
}

func TestDatagrams(t *testing.T) {
	w := newWorld(t)
	w.service("UDP", nil, endpoint{addr: udpServerFor(t, "a"), state: readyState})
	c, err := net.Dial("udp", w.address("udp"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	ask := func(want string) error {
		_ = c.SetDeadline(time.Now().Add(2 * time.Second))
		if _, err := io.WriteString(c, "x"); err != nil {
			return err
		}
		b := make([]byte, 64)
		n, err := c.Read(b)
		if err == nil && string(b[:n]) != want+" x" {
			err = fmt.Errorf("answer %q", b[:n])
		}
		return err
	}
	if err := ask("a"); err != nil {
		t.Fatal(err)
	}
	w.service("UDP", nil, endpoint{addr: udpServerFor(t, "b"), state: readyState})
	w.eventually("the same client reaches the new endpoint", func() error { return ask("b") })
}

// Another build takes the listeners over; connections go on to their end, and
// then the old process is gone. An agent that goes and comes changes nothing.
func TestSuccessorCutsNothing(t *testing.T) {
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
	w.stop()
	if err := echo(c, 1<<16); err != nil {
		t.Fatal("without an agent:", err)
	}
	w.supervise()
	w.eventually("the same process is fed", func() error { _, err := Ask(w.dir); return err })
	if st, err := Ask(w.dir); err != nil || st.PID != first.PID {
		t.Fatal("an agent that came back started another proxy", st, err)
	}
	w.stop()
	w.tag = "-next"
	if err := (&Supervisor{Dir: w.dir, Table: w.table, Log: slog.New(slog.DiscardHandler), tag: w.tag}).companion().Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	// It has the listeners, and waits for an agent to say where they lead.
	asked := make(chan error, 1)
	go func() {
		n, c, err := who(addr)
		if err == nil {
			_ = c.Close()
			if n != "a" {
				err = errors.New(n)
			}
		}
		asked <- err
	}()
	w.supervise()
	if err := <-asked; err != nil {
		t.Fatal("a connection between the two:", err)
	}
	if err := echo(c, 1<<16); err != nil {
		t.Fatal("the old connection was cut:", err)
	}
	old := filepath.Join("/proc", fmt.Sprint(first.PID), "cmdline")
	if b, _ := os.ReadFile(old); !strings.Contains(string(b), w.dir) {
		t.Fatal("the old process is gone before its connection")
	}
	_ = c.Close()
	w.eventually("the old process ends after its last connection", func() error {
		if b, _ := os.ReadFile(old); strings.Contains(string(b), w.dir) {
			return errors.New("it is there")
		}
		return nil
	})
}

// An agent that was killed comes back with a table that it saved some time
// before. The proxy knows better, until a server has spoken; a proxy that is
// new takes what there is.
func TestAnOldTableDoesNotReplaceANewerOne(t *testing.T) {
	w := newWorld(t)
	old, now := backendServer(t, "a"), backendServer(t, "b")
	w.service("TCP", nil, endpoint{addr: old, state: readyState})
	path := filepath.Join(w.dir, "saved")
	if err := (&services.Puller{Table: w.table, Path: path, Log: slog.New(slog.DiscardHandler)}).Save(); err != nil {
		t.Fatal(err)
	}
	w.service("TCP", nil, endpoint{addr: now, state: readyState})
	addr := w.address("tcp")
	answers := func(want string) error {
		n, c, err := who(addr)
		if err != nil {
			return err
		}
		_ = c.Close()
		if n != want {
			return fmt.Errorf("%s answers", n)
		}
		return nil
	}
	w.eventually("the newer endpoint answers", func() error { return answers("b") })
	w.stop()
	w.table = services.NewTable()
	(&services.Puller{Table: w.table, Path: path, Log: slog.New(slog.DiscardHandler)}).Load()
	if w.table.Fresh() || w.table.Generation() == 0 {
		t.Fatal("not a table that was saved")
	}
	w.supervise()
	// Long enough for a feed to arrive: what it would change is seen at once.
	for range 50 {
		if err := answers("b"); err != nil {
			t.Fatal("the saved table was fed:", err)
		}
		<-time.After(20 * time.Millisecond)
	}
	// A server speaks.
	w.service("TCP", nil, endpoint{addr: old, state: readyState})
	w.eventually("the server's word counts", func() error { return answers("a") })
	w.stop()
	// The proxy is gone, as after a boot, and no server answers.
	if err := Stop(t.Context(), w.dir); err != nil {
		t.Fatal(err)
	}
	w.table = services.NewTable()
	(&services.Puller{Table: w.table, Path: path, Log: slog.New(slog.DiscardHandler)}).Load()
	w.supervise()
	addr = w.address("tcp")
	w.eventually("what was saved is better than nothing", func() error { return answers("a") })
}
