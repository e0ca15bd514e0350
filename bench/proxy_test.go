//go:build bench

package bench

import (
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/unused"
)

// TestProxyBesideNginx measures the node proxy, nginx' stream module with
// least_conn, and a direct connection, one after the other, with 1, 100 and
// 5,000 endpoints.
func TestProxyBesideNginx(t *testing.T) {
	for _, n := range []int{1, 100, 5000} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			eps := endpoints(n, backend(t))
			w := newTable()
			w.service(t, eps)
			addr, pid := startProxy(t, w)
			list := []way{{"proxy", at(addr), []int{pid}}}
			var servers strings.Builder
			for _, a := range eps {
				fmt.Fprintf(&servers, "server %s; ", a)
			}
			listen := unused.Port(t).String()
			if pids := startNginx(t, fmt.Sprintf("stream { upstream u { least_conn; %s } server { listen %s backlog=4096; proxy_pass u; } }\n", servers.String(), listen), listen); pids != nil {
				list = append(list, way{"nginx", at(listen), pids})
			}
			list = append(list, way{"direct", func(i int) string { return eps[i%n].String() }, nil})
			what := fmt.Sprintf("service proxy, %d endpoints: ", n)
			besides(t, what+"bytes of 4 connections", list, throughput)
			besides(t, what+"round trip of 128 bytes, 16 kept connections", list, roundTrips)
			besides(t, what+"new connection and a round trip, 8 at once", list, connects)
			besides(t, what+"memory of 1,000 connections, PSS", list[:len(list)-1], thousand)
		})
	}
}

// besides prints one row: what each way does.
func besides(t *testing.T, what string, list []way, measure func(*testing.T, *way) (figure, beside string)) {
	t.Helper()
	var figures, rest []string
	for i := range list {
		f, b := measure(t, &list[i])
		figures = append(figures, list[i].name+" "+f)
		if b != "" {
			rest = append(rest, list[i].name+" "+b)
		}
	}
	row(what, "beside nginx", figures[0], noTarget, strings.Join(append(figures[1:], rest...), ", "))
}

// open connects and says what the backend shall do.
func open(t *testing.T, addr, kind string) net.Conn {
	c, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err == nil {
		_, err = io.WriteString(c, kind)
	}
	if err != nil {
		t.Error(err)
		return nil
	}
	return c
}

func throughput(t *testing.T, w *way) (string, string) {
	const conns, each, piece = 4, 512, 1 << 20
	buf := make([]byte, piece)
	cpu, start := w.cpu(t), time.Now()
	var wg sync.WaitGroup
	for i := range conns {
		wg.Go(func() {
			c := open(t, w.addr(i), "d")
			if c == nil {
				return
			}
			defer func() { _ = c.Close() }()
			for range each {
				if _, err := c.Write(buf); err != nil {
					t.Error(err)
					return
				}
			}
			_ = c.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, c) // until the last byte is there
		})
	}
	wg.Wait()
	bytes := float64(conns * each * piece)
	figure := fmt.Sprintf("%.0f MB/s", bytes/1e6/time.Since(start).Seconds())
	if w.pids == nil {
		return figure, ""
	}
	return figure, fmt.Sprintf("%.2f CPU-s/GB", (w.cpu(t)-cpu)/(bytes/1e9))
}

// percentiles in microseconds.
func percentiles(all []time.Duration) string {
	if len(all) == 0 {
		return "nothing measured"
	}
	slices.Sort(all)
	return fmt.Sprintf("p50 %d µs, p99 %d µs", all[len(all)/2].Microseconds(), all[len(all)*99/100].Microseconds())
}

func trip(c net.Conn, buf []byte) error {
	if _, err := c.Write(buf); err != nil {
		return err
	}
	_, err := io.ReadFull(c, buf)
	return err
}

func roundTrips(t *testing.T, w *way) (string, string) {
	const conns, each = 16, 2000
	cpu := w.cpu(t)
	var mu sync.Mutex
	var all []time.Duration
	var wg sync.WaitGroup
	for i := range conns {
		wg.Go(func() {
			c := open(t, w.addr(i), "e")
			if c == nil {
				return
			}
			defer func() { _ = c.Close() }()
			took, buf := make([]time.Duration, 0, each), make([]byte, 128)
			for range each {
				start := time.Now()
				if err := trip(c, buf); err != nil {
					t.Error(err)
					return
				}
				took = append(took, time.Since(start))
			}
			mu.Lock()
			all = append(all, took...)
			mu.Unlock()
		})
	}
	wg.Wait()
	return percentiles(all), perEvent(t, w, cpu, conns*each)
}

// perEvent is the processor time of one.
func perEvent(t *testing.T, w *way, before float64, n int) string {
	if w.pids == nil {
		return ""
	}
	return fmt.Sprintf("%.0f µs CPU each", (w.cpu(t)-before)/float64(n)*1e6)
}

func connects(t *testing.T, w *way) (string, string) {
	const workers, each = 8, 500
	cpu := w.cpu(t)
	var mu sync.Mutex
	var all []time.Duration
	var wg sync.WaitGroup
	var next atomic.Int64
	for range workers {
		wg.Go(func() {
			buf := make([]byte, 128)
			for range each {
				start := time.Now()
				c := open(t, w.addr(int(next.Add(1))), "e")
				if c == nil {
					return
				}
				err := trip(c, buf)
				took := time.Since(start)
				_ = c.Close()
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				all = append(all, took)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return percentiles(all), perEvent(t, w, cpu, workers*each)
}

// thousand keeps connections that have answered once and then do nothing.
func thousand(t *testing.T, w *way) (string, string) {
	before := w.pss(t)
	buf := make([]byte, 128)
	for i := range 1000 {
		c := open(t, w.addr(i), "e")
		if c == nil {
			return "not measured", ""
		}
		defer func() { _ = c.Close() }()
		if err := trip(c, buf); err != nil {
			t.Error(err)
		}
	}
	with := w.pss(t)
	return fmt.Sprintf("%.1f MiB", float64(with-before)/1024), fmt.Sprintf("%.1f MiB in all", float64(with)/1024)
}
