package proxy

import (
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/node/companion"
	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

// direct is an engine in this process, fed with one Service.
func direct(t testing.TB, svc *wire.Service, backend netip.AddrPort) *engine {
	t.Helper()
	e := newEngine(slog.New(slog.DiscardHandler))
	e.cfg = Settings{Node: "n", Zone: "default"}
	t.Cleanup(e.LetGo)
	var items []wire.ServiceItem
	for key, v := range map[string]any{
		wire.ItemService + "d/s": svc,
		wire.ItemSlice + "d/s": &wire.Slice{Service: "s", Ports: []wire.SlicePort{{Name: "p", Protocol: svc.Ports[0].Protocol, Port: backend.Port()}},
			Endpoints: []wire.Endpoint{{Address: backend.Addr().AsSlice(), State: readyState, Node: "n"}}},
	} {
		b, err := wire.EncodeItem(v)
		if err != nil {
			t.Fatal(err)
		}
		items = append(items, wire.ServiceItem{Key: key, Data: b})
	}
	e.Apply(items, nil, true)
	return e
}

// What cannot be served is said with all that people need to mend it, and not
// any more once it is served.
func TestUnservedPortsAreNamed(t *testing.T) {
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	e := direct(t, &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80, NodePort: port}}}, backendServer(t, "a"))
	st := e.Status(companion.Head{}).(*Status)
	b, err := wire.EncodeItem(st)
	if err != nil {
		t.Fatal(err)
	}
	var read Status
	if err := wire.DecodeItem(b, &read); err != nil {
		t.Fatal(err)
	}
	want := Unserved{Service: "d/s", Kind: KindNodePort, Protocol: "TCP", Addr: netip.AddrPortFrom(netip.IPv6Unspecified(), port), Why: WhyTaken, Error: "address already in use"}
	if len(read.Unserved) != 1 || read.Unserved[0] != want {
		t.Fatalf("%+v", read.Unserved)
	}
	_ = l.Close()
	e.mu.Lock()
	for p, f := range e.failures {
		f.again = time.Time{}
		e.failures[p] = f
	}
	e.mu.Unlock()
	e.tick(time.Now())
	if st := e.Status(companion.Head{}).(*Status); len(st.Unserved) != 0 || st.Listeners != 1 {
		t.Fatalf("%+v", st)
	}
}

// A port of the control plane is not taken, though nobody has it now: the
// server could not start again. It is given up where it is held.
func TestReservedPortsAreLeftAlone(t *testing.T) {
	port := unused.Port(t).Port()
	e := direct(t, &wire.Service{Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80, NodePort: port}}}, backendServer(t, "a"))
	free := func() bool {
		l, err := net.Listen("tcp", net.JoinHostPort("", strconv.Itoa(int(port))))
		if err == nil {
			_ = l.Close()
		}
		return err == nil
	}
	if free() {
		t.Fatal("the node port is not served")
	}
	e.mu.Lock()
	e.cfg.Reserved, e.changed["d/s"] = []uint16{port}, true // as Configure, which would drop this process' privileges
	e.mu.Unlock()
	e.Apply(nil, nil, true)
	if !free() {
		t.Error("the port is not given up")
	}
	if u := e.Status(companion.Head{}).(*Status).Unserved; len(u) != 1 || u[0].Why != WhyReserved || u[0].Service != "d/s" {
		t.Errorf("%+v", u)
	}
}
