//go:build bench

package bench

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/node/proxy"
	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/test/cluster"
	"github.com/dunlin-project/dunlin/wire"
)

// What is measured beside nginx: the processes as they are shipped, fed with a
// service table of the bench's own, so that nothing else runs.

const readyEndpoint = wire.EndpointReady | wire.EndpointServing

// table is a service table that the bench writes.
type table struct {
	*services.Table
	items map[string][]byte
	gen   uint64
}

func newTable() *table { return &table{services.NewTable(), map[string][]byte{}, 0} }

func (w *table) item(t *testing.T, key string, v any) {
	t.Helper()
	b, err := wire.EncodeItem(v)
	if err != nil {
		t.Fatal(err)
	}
	w.items[key] = b
}

func (w *table) publish(t *testing.T) {
	t.Helper()
	w.gen++
	r := &wire.ServicesReply{Generation: w.gen, Full: true}
	for k, v := range w.items {
		r.Items = append(r.Items, wire.ServiceItem{Key: k, Data: v})
		r.Digest += wire.ItemDigest(k, v)
	}
	if _, err := w.Apply(r); err != nil {
		t.Fatal(err)
	}
}

// service adds d/s, which leads to the endpoints, a hundred in a slice.
func (w *table) service(t *testing.T, eps []netip.AddrPort) {
	t.Helper()
	w.item(t, wire.ItemService+"d/s", &wire.Service{ClusterIPs: []string{"10.43.0.7"}, Ports: []wire.ServicePort{{Name: "p", Protocol: "TCP", Port: 80}}})
	for at := 0; at < len(eps); at += 100 {
		sl := &wire.Slice{Service: "s", Ports: []wire.SlicePort{{Name: "p", Protocol: "TCP", Port: eps[0].Port()}}}
		for _, a := range eps[at:min(at+100, len(eps))] {
			sl.Endpoints = append(sl.Endpoints, wire.Endpoint{Address: a.Addr().AsSlice(), State: readyEndpoint, Node: "n"})
		}
		w.item(t, fmt.Sprint(wire.ItemSlice, "d/s-", at), sl)
	}
	w.publish(t)
}

// endpoints are n addresses of this machine at which one listener answers.
func endpoints(n int, port uint16) (out []netip.AddrPort) {
	for i := range n {
		out = append(out, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(i)}), port))
	}
	return out
}

// until polls; what is measured comes after it.
func until(t *testing.T, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(time.Minute); time.Now().Before(end); wait(t, 20*time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// shipped puts the programs as they are built beside this test binary, where a
// supervisor looks for them.
func shipped(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"dunlin-proxy", "dunlin-ingress"} {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(cluster.Binary(t)), name))
		if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(filepath.Dir(self), name)
		_ = os.Remove(to) // a process of the test before may still run it
		if err := os.WriteFile(to, b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// startProxy runs dunlin-proxy with a table until the test ends.
func startProxy(t *testing.T, w *table) (addr string, pid int) {
	t.Helper()
	shipped(t)
	dir, err := os.MkdirTemp("", "dnlb") // short: sun_path has 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	s := &proxy.Supervisor{Dir: dir, Table: w.Table, Log: slog.New(slog.DiscardHandler),
		Settings: func() (proxy.Settings, bool) {
			return proxy.Settings{Node: "n", Zone: "default", Resolv: "/nonexistent"}, true
		}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
		if err := proxy.Stop(context.Background(), dir); err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	until(t, "the proxy serves", func() error {
		st, err := proxy.Ask(dir)
		if err != nil {
			return err
		}
		pid, addr = st.PID, st.Ports["d/s:p/tcp"]
		if addr == "" {
			return fmt.Errorf("%+v", st)
		}
		return nil
	})
	return addr, pid
}

// startNginx runs nginx in the foreground with a configuration of its own, one
// worker a core, and returns its processes.
func startNginx(t *testing.T, body, addr string) (pids []int) {
	t.Helper()
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		t.Log("nginx is not installed: no comparison with it")
		return nil
	}
	dir, module := t.TempDir(), ""
	if m := "/usr/lib/nginx/modules/ngx_stream_module.so"; strings.Contains(body, "stream {") {
		if _, err := os.Stat(m); err == nil {
			module = "load_module " + m + ";"
		}
	}
	conf := fmt.Sprintf("%s daemon off; worker_processes auto; pid %s/pid; error_log %s/log; worker_rlimit_nofile 32768; events { worker_connections 8000; }\n%s",
		module, dir, dir, body)
	if err := os.WriteFile(filepath.Join(dir, "conf"), []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(nginx, "-e", filepath.Join(dir, "log"), "-c", filepath.Join(dir, "conf"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Signal(os.Interrupt); _ = cmd.Wait() })
	until(t, "nginx answers", func() error {
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			log, _ := os.ReadFile(filepath.Join(dir, "log"))
			return fmt.Errorf("%w: %s", err, log)
		}
		return c.Close()
	})
	until(t, "nginx has all its workers", func() error {
		pids = []int{cmd.Process.Pid}
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", cmd.Process.Pid, cmd.Process.Pid))
		for _, f := range strings.Fields(string(b)) {
			n, _ := strconv.Atoi(f)
			pids = append(pids, n)
		}
		if err == nil && len(pids) <= runtime.NumCPU() {
			err = fmt.Errorf("%d processes", len(pids))
		}
		return err
	})
	return pids
}

// way is one to a backend: where to connect, and the processes between.
type way struct {
	name string
	addr func(i int) string
	pids []int
}

func (w *way) cpu(t *testing.T) (sum float64) {
	for _, p := range w.pids {
		sum += cpuSeconds(t, p)
	}
	return sum
}

func (w *way) pss(t *testing.T) (sum int) {
	for _, p := range w.pids {
		sum += pss(t, p)
	}
	return sum
}

func at(addr string) func(int) string { return func(int) string { return addr } }

// backend echoes on connections that begin with an e, and takes what comes on
// others.
func backend(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp4", "0.0.0.0:0") // all of 127.0.0.0/8
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
				var kind [1]byte
				if _, err := io.ReadFull(c, kind[:]); err != nil {
					return
				}
				if kind[0] != 'e' {
					_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, make([]byte, 256<<10))
					return
				}
				buf := make([]byte, 512)
				for {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					if _, err := c.Write(buf[:n]); err != nil {
						return
					}
				}
			}()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}
