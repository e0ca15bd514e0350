package proxy

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

const readyState = wire.EndpointReady | wire.EndpointServing

// The proxy beside a direct connection and, where it is installed, nginx'
// stream module: go test -bench . ./node/proxy

// way is one to a backend: the address, and the process between, 0 for none.
type way struct {
	name, addr string
	pid        int
}

func ways(b *testing.B, backend netip.AddrPort) []way {
	b.Helper()
	w := newWorld(b)
	w.service("TCP", nil, endpoint{backend, readyState})
	out := []way{{"direct", backend.String(), 0}, {"proxy", w.address("tcp"), 0}}
	st, err := Ask(w.dir)
	if err != nil {
		b.Fatal(err)
	}
	out[1].pid = st.PID
	nginx, err := exec.LookPath("nginx")
	if err != nil {
		b.Log("nginx is not installed: no comparison with it")
		return out
	}
	dir, listen := b.TempDir(), unused(b)
	module := ""
	if m := "/usr/lib/nginx/modules/ngx_stream_module.so"; exists(m) {
		module = "load_module " + m + ";"
	}
	conf := fmt.Sprintf("%s daemon off; master_process off; worker_processes 1; pid %s/pid; error_log %s/log; worker_rlimit_nofile 16384; events { worker_connections 8000; }\nstream { server { listen %s backlog=4096; proxy_pass %s; } }\n",
		module, dir, dir, listen, backend)
	if err := os.WriteFile(filepath.Join(dir, "conf"), []byte(conf), 0o600); err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(nginx, "-c", filepath.Join(dir, "conf"))
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	w.eventually("nginx answers", func() error {
		_, c, err := who(listen.String())
		if err == nil {
			_ = c.Close()
		}
		return err
	})
	return append(out, way{"nginx", listen.String(), cmd.Process.Pid})
}

func exists(p string) bool { _, err := os.Stat(p); return err == nil }

// cpu is the processor time of a process.
func cpu(b *testing.B, pid int) time.Duration {
	b.Helper()
	if pid == 0 {
		return 0
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Fatal(err)
	}
	f := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

// pss in KiB.
func pss(b *testing.B, pid int) int {
	b.Helper()
	if pid == 0 {
		return 0
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		b.Fatal(err)
	}
	for l := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(l, "Pss:"); ok {
			n, _ := strconv.Atoi(strings.Fields(rest)[0])
			return n
		}
	}
	return 0
}

func BenchmarkThroughput(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				_, _ = io.WriteString(c, "s\n")
				_, _ = io.Copy(io.Discard, c)
			}()
		}
	}()
	const piece = 1 << 20
	buf := make([]byte, piece)
	for _, w := range ways(b, netip.MustParseAddrPort(l.Addr().String())) {
		b.Run(w.name, func(b *testing.B) {
			_, c, err := who(w.addr)
			if err != nil {
				b.Fatal(err)
			}
			_ = c.SetDeadline(time.Time{})
			b.SetBytes(piece)
			before := cpu(b, w.pid)
			for b.Loop() {
				if _, err := c.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
			_ = c.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, c) // until the last byte is there
			_ = c.Close()
			b.ReportMetric((cpu(b, w.pid)-before).Seconds()/(float64(b.N)*piece/(1<<30)), "cpu-s/GiB")
		})
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	for _, w := range ways(b, backendServer(b, "e")) {
		b.Run(w.name, func(b *testing.B) {
			_, c, err := who(w.addr)
			if err != nil {
				b.Fatal(err)
			}
			_ = c.SetDeadline(time.Time{})
			var took []time.Duration
			buf := make([]byte, 128)
			for b.Loop() {
				at := time.Now()
				if _, err := c.Write(buf); err != nil {
					b.Fatal(err)
				}
				if _, err := io.ReadFull(c, buf); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(at))
			}
			_ = c.Close()
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
		})
	}
}

// BenchmarkConnections keeps a thousand connections that do nothing.
func BenchmarkConnections(b *testing.B) {
	for _, w := range ways(b, backendServer(b, "c")) {
		b.Run(w.name, func(b *testing.B) {
			most, before := 0, pss(b, w.pid)
			for b.Loop() {
				var all []net.Conn
				for range 1000 {
					_, c, err := who(w.addr)
					if err != nil {
						b.Fatal(err)
					}
					all = append(all, c)
				}
				most = max(most, pss(b, w.pid)-before)
				for _, c := range all {
					_ = c.Close()
				}
			}
			b.ReportMetric(float64(most), "KiB/1000-conns")
		})
	}
}
