package podstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// fakeNode serves sessions as a node does, over loopback.
type fakeNode struct {
	t       testing.TB
	wg      sync.WaitGroup
	written atomic.Int64 // by the command "flood"

	mu   sync.Mutex
	last *mux.Mux // the node's end of the newest session
}

// Session implements Nodes.
func (n *fakeNode) Session(_ context.Context, _ *corev1.Pod, kind, _ string) (*mux.Mux, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer func() { _ = l.Close() }()
	here, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	there, err := l.Accept()
	if err != nil {
		return nil, err
	}
	m := mux.New(there, false, 128)
	n.mu.Lock()
	n.last = m
	n.mu.Unlock()
	n.wg.Go(func() {
		defer m.Close("")
		if kind == kindForward {
			n.forward(m)
			return
		}
		n.exec(m)
	})
	return mux.New(here, true, 0), nil
}

func (n *fakeNode) node() *mux.Mux {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.last
}

// exec runs one of a few commands.
func (n *fakeNode) exec(m *mux.Mux) {
	ctl, err := m.Accept()
	if err != nil {
		return
	}
	o := new(wire.ExecOpen)
	if err := wire.ReadMessage(ctl, o); err != nil {
		return
	}
	ends := map[string]*mux.Stream{}
	for range btoi(o.Stdin) + btoi(o.Stdout) + btoi(o.Stderr) {
		st, err := m.Accept()
		if err != nil {
			return
		}
		ends[string(st.What())] = st
	}
	end := &wire.ExecEnd{}
	switch o.Command[0] {
	case "echo": // input to output, the size to the errors
		if o.TTY {
			z := new(wire.TerminalSize)
			if err := wire.ReadMessage(ctl, z); err != nil {
				n.t.Errorf("no size: %v", err)
			}
			fmt.Fprintf(ends[wire.StreamStdout], "%dx%d ", z.Width, z.Height)
		}
		if in := ends[wire.StreamStdin]; in != nil {
			buf := make([]byte, 5)
			k, _ := io.ReadFull(in, buf)
			_, _ = ends[wire.StreamStdout].Write(buf[:k])
		}
		if e := ends[wire.StreamStderr]; e != nil {
			_, _ = e.Write([]byte("oops"))
		}
		end.ExitCode = 3
	case "count": // input to its end
		k, err := io.Copy(io.Discard, ends[wire.StreamStdin])
		fmt.Fprintf(ends[wire.StreamStdout], "%d %v", k, err)
	case "flood":
		buf := make([]byte, 16<<10)
		for {
			k, err := ends[wire.StreamStdout].Write(buf)
			n.written.Add(int64(k))
			if err != nil {
				return
			}
		}
	case "ignore": // never reads its input
		end.ExitCode = 4
	case "wait":
		<-m.Done()
		return
	case "fail":
		end.Error = "no such thing"
	}
	if in := ends[wire.StreamStdin]; in != nil {
		in.Reset("it has ended")
	}
	for _, name := range []string{wire.StreamStdout, wire.StreamStderr} {
		if st := ends[name]; st != nil {
			_ = st.CloseWrite()
		}
	}
	_ = wire.WriteMessage(ctl, end)
	<-m.Done()
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// forward: port 7 echoes until the end of its input and then says goodbye, 8
// never reads, 9 cannot be reached.
func (n *fakeNode) forward(m *mux.Mux) {
	for {
		st, err := m.Accept()
		if err != nil {
			return
		}
		n.wg.Go(func() {
			d := new(wire.DialRequest)
			if err := wire.Unmarshal(st.What(), d); err != nil {
				n.t.Error(err)
			}
			reply := &wire.DialReply{}
			if d.Port == 9 {
				reply.Error = "connection refused"
			}
			_ = wire.WriteMessage(st, reply)
			switch d.Port {
			case 7:
				if _, err := io.Copy(st, st); err == nil {
					_, _ = st.Write([]byte("bye"))
				}
				_ = st.CloseWrite()
			case 8:
				<-m.Done()
			case 9:
				_ = st.CloseWrite()
			}
		})
	}
}

// front is a Server behind a real HTTP server.
type front struct {
	*httptest.Server
	node *fakeNode
	wg   sync.WaitGroup
}

func newFront(t testing.TB, idle time.Duration) *front {
	t.Helper()
	f := &front{node: &fakeNode{t: t}}
	s, err := New(Config{Nodes: f.node, Idle: idle})
	if err != nil {
		t.Fatal(err)
	}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f.wg.Add(1)
		defer f.wg.Done()
		kind := strings.Trim(r.URL.Path, "/")
		if err := s.ServeStream(w, r, &corev1.Pod{}, kind, "c"); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
	}))
	t.Cleanup(func() {
		f.Close()
		f.wg.Wait() // nothing is left behind, on either side
		f.node.wg.Wait()
	})
	return f
}

func (f *front) addr() string { return strings.TrimPrefix(f.URL, "http://") }

var errText = errors.New("an error channel with text")
