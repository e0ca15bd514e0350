package wire

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/wire/memnet"
)

var update = flag.Bool("update", false, "rewrite golden files; only for a field that was added")

// samples has every message with every field set.
func samples() []Message {
	return []Message{
		&Hello{ClusterID: "c", Epoch: 2, Feature: 1, Version: "v1", NodeName: "n", NodeUID: "u", BootID: "b", UnixMilli: 5, Term: 6, Refused: "r", Limited: true, GossipID: "g",
			Addresses: []string{"a:1"}, Peers: map[string][]string{"s": {"b:2"}}, Leader: []string{"l:3"}},
		&LeaseRequest{Counter: 7, Generation: 8},
		&LeaseReply{Counter: 7, Term: 2, Generation: 9, Refused: "r"},
		&PullRequest{Generation: 3, Have: map[string]uint64{"b": 2, "a": 1}},
		&Assignment{Epoch: 1, Generation: 2, Unchanged: true, Objects: []Object{{Ref: Ref{Kind: "Pod", Namespace: "ns", Name: "p"}, UID: "u", ResourceVersion: 3, Data: []byte{0xa0}, Revision: 5}},
			Keep: []string{"k"}, PodCIDRs: []string{"10.42.0.0/24"}, Servers: []string{"s:6443"}, UnixMilli: 4, Keyring: [][]byte{{1}}, Site: "z", Seeds: []string{"10.0.0.1:7946"},
			Lost: []Lost{{Epoch: 2, After: 5, Before: 6}}},
		&Report{BootID: "b", Seq: 1, Pods: []PodReport{{Namespace: "ns", Name: "p", UID: "u", Status: []byte{0xa0}, Terminal: true, Gone: true, Mirror: []byte{0xa1}}}, Node: []byte{0xa2},
			Events: []EventReport{{Object: Ref{Kind: "Pod", Name: "p"}, UID: "u", FieldPath: "f", Type: "Normal", Reason: "R", Message: "m", Component: "c", UnixMilli: 1, Count: 2}}},
		&ReportReply{Seq: 1, Committed: []string{"a"}, Unknown: []string{"b"}, Retry: []string{"c"}, Refused: "r", Epoch: 2},
		&StreamRequest{ID: "i", Kind: "logs", Namespace: "ns", Pod: "p", UID: "u", Container: "c", Options: []byte{0xa0}},
		&StreamHeader{ID: "i", Error: "e", Code: 404},
		&JoinRequest{TokenID: "t", Proof: []byte{1}, CSR: []byte{2}, NodeName: "n", BootID: "b", Facts: map[string]string{"y": "2", "x": "1"}, Addresses: []string{"a"}, Server: true},
		&JoinReply{Refused: "r", Cert: []byte{1}, CA: []byte{2}, ClusterID: "c", Epoch: 1, NodeName: "n", NodeUID: "u", Servers: []string{"s"}, Leader: []string{"l:3"}},
		&RenewRequest{CSR: []byte{1}},
		&RenewReply{Refused: "r", Cert: []byte{1}},
		&Nudge{Generation: 1, Services: 2},
		&ServicesRequest{Generation: 1, Digest: 2, Filling: true},
		&ServicesReply{Generation: 1, Unchanged: true, Full: true, Items: []ServiceItem{{Key: "s/ns/n", Data: []byte{0xa0}}}, Gone: []string{"e/ns/n"}, More: true, Digest: 2},
		&TimeRequest{UnixMilli: 1},
		&TimeReply{UnixMilli: 1, Trusted: true},
		&Fault{Code: 2, Message: "m", Leader: []string{"l:3"}},
		&ProposeRequest{Entry: []byte{1}},
		&ProposeReply{Results: []byte{1}, Version: 2},
		&ReadRequest{},
		&ReadReply{Version: 1},
		&ServerStatusRequest{},
		&ServerStatusReply{Version: 1, Epoch: 2, Feature: 3, Build: "b", Leader: "l", Fault: "f", Addresses: []string{"a"}, UnixMilli: 4},
		&ServerKeysRequest{},
		&ServerKeysReply{CA: []byte{1}, CAKey: []byte{2}, SealKey: []byte{3}, TokenKey: []byte{4}, Epoch: 5},
		&AnnounceRequest{Name: "n", Addresses: []string{"a"}, Build: "b", Zone: "z", ID: "i"},
		&AnnounceReply{Refused: "r", Removed: true},
		&NetCheckRequest{},
		&NetCheckReply{Report: []byte{1}},
		&ExecOpen{Command: []string{"sh", "-c", "x"}, Stdin: true, Stdout: true, Stderr: true, TTY: true},
		&TerminalSize{Width: 80, Height: 24},
		&ExecEnd{ExitCode: 3, Error: "e"},
		&DialRequest{Port: 80},
		&DialReply{Error: "e"},
		&NodeUsage{UnixMilli: 1, WindowMillis: 2, CPUNanos: 3, MemoryBytes: 4, Pods: []PodUsage{{Namespace: "n", Name: "p", UID: "u",
			Containers: []ContainerUsage{{Name: "c", Attempt: 1, CPUNanos: 5, MemoryBytes: 6}}}}},
	}
}

func fresh(m Message) Message {
	v, _ := reflect.New(reflect.TypeOf(m).Elem()).Interface().(Message)
	return v
}

// The bytes are for ever: a peer of two releases ago must read them.
func TestGolden(t *testing.T) {
	for _, m := range samples() {
		b, err := Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join("testdata", m.WireType().String()+".golden")
		if *update {
			if err := os.WriteFile(path, []byte(hex.EncodeToString(b)+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if hex.EncodeToString(b)+"\n" != string(want) {
			t.Errorf("%v changed on the wire:\n got %x\nwant %s", m.WireType(), b, want)
		}
		back := fresh(m)
		if err := Unmarshal(b, back); err != nil || !reflect.DeepEqual(back, m) {
			t.Errorf("%v: %+v %v", m.WireType(), back, err)
		}
	}
}

// The same for what items of the service table hold.
func TestGoldenItems(t *testing.T) {
	for name, v := range map[string]any{
		"network": &ClusterNetwork{ServiceCIDRs: []string{"10.43.0.0/16"}, DNS: []string{"10.43.0.10"}, Domain: "cluster.local"},
		"node":    &NodeInfo{Addresses: []string{"10.0.0.1"}, PodCIDRs: []string{"10.42.0.0/24"}, Zone: "z"},
		"silent":  &NodeInfo{Zone: "z", Silent: true},
		"service": &Service{ClusterIPs: []string{"10.43.0.1"}, Ports: []ServicePort{{Name: "http", Protocol: "TCP", Port: 80, NodePort: 30000}}, ExternalName: "e", AffinitySeconds: 1,
			InternalLocal: true, ExternalLocal: true, Traffic: TrafficSameNode, ExternalIPs: []string{"10.0.0.1"}, HealthPort: 30001, NotReady: true},
		"h2c":           &Service{Ports: []ServicePort{{Protocol: "TCP", Port: 80, H2C: true}}},
		"ingress-nodes": &IngressNodes{Nodes: []string{"a", "b"}},
		"ingress": &Ingress{Created: 7, Default: &IngressBackend{Service: "d", Name: "http"}, Redirect: true, Timeout: 1500,
			Rules: []IngressRule{{Host: "a.example", Paths: []IngressPath{{Path: "/x", Exact: true, Backend: IngressBackend{Service: "s", Port: 80}}}}},
			TLS:   []IngressTLS{{Hosts: []string{"a.example"}, Secret: "c"}}},
		"slice": &Slice{Service: "n", Ports: []SlicePort{{Name: "http", Protocol: "TCP", Port: 8080}},
			Endpoints: []Endpoint{{Address: []byte{10, 42, 0, 2}, State: EndpointReady | EndpointServing | EndpointTerminating, Node: "n", Zone: "z", Hostname: "h", Weight: 3, Pod: "p"}}},
	} {
		b, err := EncodeItem(v)
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join("testdata", "item-"+name+".golden")
		if *update {
			if err := os.WriteFile(path, []byte(hex.EncodeToString(b)+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if hex.EncodeToString(b)+"\n" != string(want) {
			t.Errorf("item %s changed:\n got %x\nwant %s", name, b, want)
		}
		back := reflect.New(reflect.TypeOf(v).Elem()).Interface()
		if err := DecodeItem(b, back); err != nil || !reflect.DeepEqual(back, v) {
			t.Errorf("item %s: %+v %v", name, back, err)
		}
	}
}

func TestEveryTypeHasALimit(t *testing.T) {
	seen := map[Type]bool{}
	for _, m := range samples() {
		ty := m.WireType()
		if ty.MaxSize() == 0 || strings.HasPrefix(ty.String(), "Type(") || seen[ty] {
			t.Errorf("%v", ty)
		}
		seen[ty] = true
	}
	for ty := Type(1); ty < 0x80; ty++ {
		if (ty.MaxSize() != 0) != seen[ty] {
			t.Errorf("%v has a limit and no sample, or the reverse", ty)
		}
	}
}

func TestUnknownFieldsAreIgnored(t *testing.T) {
	// {1: 7, 99: "new"}
	b, _ := hex.DecodeString("a20107186363" + "6e6577")
	var r LeaseRequest
	if err := Unmarshal(b, &r); err != nil || r.Counter != 7 {
		t.Fatalf("%+v %v", r, err)
	}
}

func TestStrictDecoding(t *testing.T) {
	for what, h := range map[string]string{
		"duplicate key":     "a201070108",
		"indefinite length": "bf0107ff",
		"trailing bytes":    "a10107a0",
		"tag":               "c0a10107",
		"truncated":         "a101",
		"empty":             "",
		"nested":            strings.Repeat("81", 40) + "00",
		"huge array":        "9affffffff",
	} {
		b, err := hex.DecodeString(h)
		if err != nil {
			t.Fatal(err)
		}
		if err := Unmarshal(b, new(LeaseRequest)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := Unmarshal(make([]byte, 513), new(LeaseRequest)); !errors.Is(err, ErrMalformed) {
		t.Errorf("over the limit: %v", err)
	}
}

func FuzzUnmarshal(f *testing.F) {
	for _, m := range samples() {
		b, err := Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint8(m.WireType()), b)
	}
	byType := map[Type]Message{}
	for _, m := range samples() {
		byType[m.WireType()] = m
	}
	f.Fuzz(func(t *testing.T, ty uint8, b []byte) {
		m, ok := byType[Type(ty)]
		if !ok {
			return
		}
		got := fresh(m)
		if Unmarshal(b, got) != nil {
			return
		}
		// What was accepted has one encoding, and it means the same.
		enc, err := Marshal(got)
		if err != nil {
			t.Fatal(err)
		}
		again := fresh(m)
		if err := Unmarshal(enc, again); err != nil {
			if len(enc) > got.WireType().MaxSize() {
				return
			}
			t.Fatal(err)
		}
		enc2, err := Marshal(again)
		if err != nil || !bytes.Equal(enc, enc2) {
			t.Fatalf("%x became %x (%v)", enc, enc2, err)
		}
	})
}

func FuzzReadMessage(f *testing.F) {
	var b bytes.Buffer
	_ = WriteMessage(&b, &Assignment{Objects: []Object{{Data: make([]byte, 40_000)}}})
	f.Add(b.Bytes())
	b.Reset()
	_ = WriteMessage(&b, &Fault{Code: 1, Message: "m"})
	f.Add(b.Bytes())
	f.Add([]byte{0x85, 0, 0, 0, 0, 0, 1, 1, 0x85, 0, 0, 0, 0, 0xff, 0xff})
	f.Fuzz(func(_ *testing.T, b []byte) {
		_ = ReadMessage(bytes.NewReader(b), new(Assignment))
		_ = ReadMessage(bytes.NewReader(b), new(Hello))
	})
}

// FuzzConn feeds a peer's arbitrary bytes to a connection with a request
// under way.
func FuzzConn(f *testing.F) {
	var b bytes.Buffer
	_ = eachFrame(TypeLeaseReply, 1, []byte{0xa1, 1, 7}, func(p []byte) error { b.Write(p); return nil })
	_ = eachFrame(TypeNudge, 0, []byte{0xa0}, func(p []byte) error { b.Write(p); return nil })
	_ = eachFrame(TypePullRequest, 2, []byte{0xa0}, func(p []byte) error { b.Write(p); return nil })
	f.Add(b.Bytes())
	f.Add([]byte{0x84, 0, 0, 0, 2, 0, 1, 0xa0, 0x84, 0, 0, 0, 4, 0, 1, 0xa0})
	f.Fuzz(func(_ *testing.T, b []byte) {
		x, y := memnet.Pipe("x", "y")
		c := NewConn(x, HandlerFunc(func(_ context.Context, t Type, b []byte) (Message, error) {
			r := new(PullRequest)
			if t == TypePullRequest {
				if err := Unmarshal(b, r); err != nil {
					return nil, err
				}
			}
			return &Assignment{}, nil
		}), Options{Initiator: true, Accept: []Type{TypeNudge, TypePullRequest}})
		var wg sync.WaitGroup
		wg.Go(func() { _ = c.Call(context.Background(), &LeaseRequest{Counter: 1}, new(LeaseReply)) })
		_, _ = y.Write(b)
		_ = y.Close()
		_ = c.Run(context.Background())
		wg.Wait()
	})
}

func FuzzLeaseDatagram(f *testing.F) {
	d := LeaseDatagram{UID: strings.Repeat("ab", 16), Boot: "b", Counter: 3, Term: 1, Generation: 2, Ack: true}
	b, err := d.Seal([]byte("key"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := OpenLeaseDatagram([]byte("key"), b, "b")
		if err != nil {
			return
		}
		if again, err := got.Seal([]byte("key")); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x became %x (%v)", b, again, err)
		}
	})
}

func TestLeaseDatagram(t *testing.T) {
	d := LeaseDatagram{UID: strings.Repeat("ab", 16), Boot: "b", Counter: 3, Term: 1, Generation: 2}
	b, err := d.Seal([]byte("key"))
	if err != nil || len(b) != LeaseDatagramSize {
		t.Fatal(len(b), err)
	}
	if got, err := OpenLeaseDatagram([]byte("key"), b, "b"); err != nil || got != d {
		t.Fatalf("%+v %v", got, err)
	}
	if _, err := OpenLeaseDatagram([]byte("other"), b, "b"); err == nil {
		t.Error("another key")
	}
	if _, err := OpenLeaseDatagram([]byte("key"), b, "c"); err == nil {
		t.Error("another boot")
	}
	for i := range b {
		c := bytes.Clone(b)
		c[i] ^= 1
		if _, err := OpenLeaseDatagram([]byte("key"), c, "b"); err == nil {
			t.Errorf("byte %d is not covered", i)
		}
	}
	if _, err := (LeaseDatagram{UID: "x"}).Seal(nil); err == nil {
		t.Error("bad uid")
	}
}

func TestFramesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.SampledFrom([]int{0, 1, 100, maxChunk - 40, maxChunk - 1, maxChunk, maxChunk + 1, 3 * maxChunk}).Draw(t, "size")
		in := &Assignment{Generation: 1, Objects: []Object{{Data: bytes.Repeat([]byte{7}, n)}}}
		var b bytes.Buffer
		if err := WriteMessage(&b, in); err != nil {
			t.Fatal(err)
		}
		b.WriteString("raw")
		out := new(Assignment)
		if err := ReadMessage(&b, out); err != nil || len(out.Objects[0].Data) != n || b.String() != "raw" {
			t.Fatalf("%v, left %q", err, b.String())
		}
	})
}

type end struct {
	*Conn
	raw  *memnet.Conn
	done chan error
}

func pair(t *testing.T, client, server Handler, accept ...Type) (end, end) {
	t.Helper()
	x, y := memnet.Pipe("client", "server")
	run := func(nc *memnet.Conn, h Handler, o Options) end {
		e := end{NewConn(nc, h, o), nc, make(chan error, 1)}
		go func() { e.done <- e.Run(context.Background()) }()
		return e
	}
	return run(x, client, Options{Initiator: true, Accept: accept}), run(y, server, Options{Accept: []Type{TypePullRequest, TypeLeaseRequest, TypeReport}, MaxConcurrent: 2})
}

func TestCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var nudges atomic.Int64
		block := make(chan struct{})
		a, b := pair(t, HandlerFunc(func(context.Context, Type, []byte) (Message, error) { nudges.Add(1); return nil, nil }),
			HandlerFunc(func(ctx context.Context, ty Type, body []byte) (Message, error) {
				switch ty {
				case TypePullRequest:
					r := new(PullRequest)
					if err := Unmarshal(body, r); err != nil {
						return nil, err
					}
					if r.Generation == 9 {
						<-block
					}
					return &Assignment{Generation: r.Generation, Objects: []Object{{Data: make([]byte, 100_000)}}}, nil
				case TypeReport:
					return nil, errors.New("no disk")
				}
				return &LeaseReply{Counter: 1}, nil
			}), TypeNudge)
		ctx := t.Context()
		var wg sync.WaitGroup
		var busy atomic.Int64
		for range 5 { // two are served, the others told to come back
			wg.Go(func() {
				err := a.Call(ctx, &PullRequest{Generation: 9}, new(Assignment))
				var f *Fault
				if errors.As(err, &f) && f.Code == FaultBusy {
					busy.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		if err := a.Call(ctx, &LeaseRequest{Counter: 1}, new(LeaseReply)); err != nil {
			t.Errorf("a lease waits behind pulls: %v", err)
		}
		close(block)
		wg.Wait()
		if busy.Load() != 3 {
			t.Errorf("%d told to come back", busy.Load())
		}
		out := new(Assignment)
		if err := a.Call(ctx, &PullRequest{Generation: 4}, out); err != nil || out.Generation != 4 || len(out.Objects[0].Data) != 100_000 {
			t.Errorf("%v", err)
		}
		var f *Fault
		if err := a.Call(ctx, &Report{}, new(ReportReply)); !errors.As(err, &f) || f.Code != FaultInternal || f.Message != "no disk" {
			t.Errorf("%v", err)
		}
		if err := a.Call(ctx, &JoinRequest{}, new(JoinReply)); !errors.As(err, &f) || f.Code != FaultUnsupported {
			t.Errorf("%v", err)
		}
		if err := b.Send(&Nudge{}); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if nudges.Load() != 1 {
			t.Error("no nudge")
		}
		a.Close(nil)
		<-a.done
		<-b.done
		if err := a.Call(ctx, &LeaseRequest{}, new(LeaseReply)); !errors.Is(err, ErrClosed) {
			t.Errorf("%v", err)
		}
	})
}

// A stalled peer ends a call by its context, and the connection by the idle
// timeout; a late answer to a call nobody waits for is skipped.
func TestStalledPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := pair(t, nil, HandlerFunc(func(context.Context, Type, []byte) (Message, error) { return &LeaseReply{}, nil }))
		a.raw.Stall(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if err := a.Call(ctx, &LeaseRequest{}, new(LeaseReply)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		cancel()
		a.raw.Stall(false)
		synctest.Wait()
		if err := a.Call(t.Context(), &LeaseRequest{}, new(LeaseReply)); err != nil {
			t.Error(err)
		}
		a.raw.Stall(true)
		start := time.Now()
		if err := <-a.done; err == nil || time.Since(start) != 30*time.Second {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		b.Close(nil)
		<-b.done
	})
}

func TestHostilePeers(t *testing.T) {
	chunk := func(t Type, more bool, id uint32, size int) []byte {
		b := make([]byte, headerSize+size)
		putHeader(b, header{typ: t, more: more, id: id, size: size})
		return b
	}
	many := []byte{}
	for i := range maxPartials + 1 {
		many = append(many, chunk(TypePullRequest, true, uint32(2*i+1), 1)...)
	}
	big := []byte{}
	for range TypePullRequest.MaxSize()/maxChunk + 1 {
		big = append(big, chunk(TypePullRequest, true, 1, maxChunk)...)
	}
	for what, b := range map[string][]byte{
		"too many half-sent":       many,
		"over the limit":           big,
		"type changes inside":      append(chunk(TypePullRequest, true, 1, 1), chunk(TypeReport, false, 1, 1)...),
		"empty chunk with more":    chunk(TypePullRequest, true, 1, 0),
		"one-way in chunks":        chunk(TypePullRequest, true, 0, 1),
		"chunk over the limit":     {byte(TypePullRequest), 0, 0, 0, 1, 0xff, 0xff},
		"answer of the wrong type": chunk(TypeNudge, false, 2, 1),
	} {
		synctest.Test(t, func(t *testing.T) {
			x, y := memnet.Pipe("x", "y")
			c := NewConn(x, HandlerFunc(func(context.Context, Type, []byte) (Message, error) { return &Assignment{}, nil }),
				Options{Accept: []Type{TypePullRequest, TypeReport}, IdleTimeout: time.Second})
			done := make(chan error, 1)
			go func() { done <- c.Run(context.Background()) }()
			if what == "answer of the wrong type" {
				go func() { _ = c.Call(context.Background(), &LeaseRequest{}, new(LeaseReply)) }()
				synctest.Wait()
			}
			if _, err := y.Write(b); err != nil && !strings.Contains(err.Error(), "closed") {
				t.Fatal(err)
			}
			if err := <-done; !errors.Is(err, ErrMalformed) {
				t.Errorf("%s: %v", what, err)
			}
			_ = y.Close()
		})
	}
}

// A lease passes a large assignment that is on its way over a slow link.
func TestLeasePassesLargeMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, y := memnet.Pipe("x", "y")
		slow := &slowConn{Conn: y}
		a := NewConn(x, nil, Options{Initiator: true})
		b := NewConn(slow, HandlerFunc(func(_ context.Context, ty Type, _ []byte) (Message, error) {
			if ty == TypeLeaseRequest {
				return &LeaseReply{}, nil
			}
			return &Assignment{Objects: []Object{{Data: make([]byte, 4*mib)}}}, nil
		}), Options{Accept: []Type{TypeLeaseRequest, TypePullRequest}})
		var wg sync.WaitGroup
		wg.Go(func() { _ = a.Run(context.Background()) })
		wg.Go(func() { _ = b.Run(context.Background()) })
		start := time.Now()
		var pulled time.Duration
		wg.Go(func() {
			if err := a.Call(context.Background(), &PullRequest{}, new(Assignment)); err != nil {
				t.Error(err)
			}
			pulled = time.Since(start)
		})
		time.Sleep(time.Second)
		for range 5 {
			at := time.Now()
			if err := a.Call(context.Background(), &LeaseRequest{}, new(LeaseReply)); err != nil {
				t.Fatal(err)
			}
			if d := time.Since(at); d > time.Second {
				t.Errorf("a lease took %v", d)
			}
			time.Sleep(2 * time.Second)
		}
		time.Sleep(time.Minute)
		a.Close(nil)
		b.Close(nil)
		wg.Wait()
		if pulled < 20*time.Second {
			t.Errorf("the link was not slow: %v", pulled)
		}
	})
}

// slowConn writes at 1 Mbit/s.
type slowConn struct{ *memnet.Conn }

func (s *slowConn) Write(p []byte) (int, error) {
	time.Sleep(time.Duration(len(p)) * 8 * time.Microsecond)
	return s.Conn.Write(p)
}
