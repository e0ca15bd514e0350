//go:build bench

package bench

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/node/ingress"
	"github.com/dunlin-project/dunlin/test/unused"
	"github.com/dunlin-project/dunlin/wire"
)

// TestIngressBesideNginx measures the ingress and nginx as a reverse proxy,
// both with kept connections to the backend.
func TestIngressBesideNginx(t *testing.T) {
	b := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/large" {
			_, _ = io.CopyN(rw, zeros{}, largeBody)
			return
		}
		_, _ = io.WriteString(rw, "hello\n")
	}))
	t.Cleanup(b.Close)
	w := newTable()
	w.item(t, wire.ItemIngressNodes, &wire.IngressNodes{Nodes: []string{"n"}})
	w.item(t, wire.ItemIngress+"d/i", &wire.Ingress{Rules: []wire.IngressRule{{Host: "a.example", Paths: []wire.IngressPath{{Path: "/", Backend: wire.IngressBackend{Service: "s", Port: 80}}}}}})
	w.service(t, []netip.AddrPort{netip.MustParseAddrPort(b.Listener.Addr().String())})
	addr, pid := startIngress(t, w)
	list := []way{{"ingress", at(addr), []int{pid}}}
	listen := unused.Port(t).String()
	conf := fmt.Sprintf("http { access_log off; upstream u { server %s; keepalive 64; } server { listen %s backlog=4096; keepalive_requests 1000000; location / { proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_buffering off; } } }\n",
		b.Listener.Addr(), listen)
	if pids := startNginx(t, conf, listen); pids != nil {
		list = append(list, way{"nginx", at(listen), pids})
	}
	list = append(list, way{"direct", at(b.Listener.Addr().String()), nil})
	besides(t, "ingress: small requests on 50 kept connections", list, requests)
	besides(t, "ingress: answers of 64 MiB, 4 at once", list, large)
	besides(t, "ingress: memory of 1,000 kept connections, PSS", list[:len(list)-1], waiting)
}

const largeBody = 64 << 20

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// startIngress runs dunlin-ingress with a table until the test ends.
func startIngress(t *testing.T, w *table) (addr string, pid int) {
	t.Helper()
	shipped(t)
	dir, err := os.MkdirTemp("", "dnlb")
	if err != nil {
		t.Fatal(err)
	}
	addr = unused.Port(t).String()
	s := &ingress.Supervisor{Dir: dir, Table: w.Table, Log: slog.New(slog.DiscardHandler), Changed: make(chan struct{}),
		Secrets: func(string, string) (ingress.Certificate, bool) { return ingress.Certificate{}, false },
		// One source has a quarter of the connections, and the bench is one.
		Settings: func() ingress.Settings {
			return ingress.Settings{Node: "n", Zone: "default", HTTP: addr, Connections: 8192}
		}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
		if err := ingress.Stop(context.Background(), dir); err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	until(t, "the ingress answers", func() error {
		st, err := ingress.Ask(dir)
		if err != nil {
			return err
		}
		pid = st.PID
		return ask(http.DefaultClient, addr, "/")
	})
	return addr, pid
}

func ask(c *http.Client, addr, path string) error {
	req, err := http.NewRequest(http.MethodGet, "http://"+addr+path, nil)
	if err != nil {
		return err
	}
	req.Host = "a.example"
	r, err := c.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = r.Body.Close() }()
	_, err = io.Copy(io.Discard, r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = fmt.Errorf("answered %s", r.Status)
	}
	return err
}

// oneConnection has one kept connection.
func oneConnection() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1, DisableCompression: true}}
}

func requests(t *testing.T, w *way) (string, string) {
	const clients, each = 50, 400
	cpu, start := w.cpu(t), time.Now()
	var mu sync.Mutex
	var all []time.Duration
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			c := oneConnection()
			defer c.CloseIdleConnections()
			took := make([]time.Duration, 0, each)
			for range each {
				at := time.Now()
				if err := ask(c, w.addr(0), "/"); err != nil {
					t.Error(err)
					return
				}
				took = append(took, time.Since(at))
			}
			mu.Lock()
			all = append(all, took...)
			mu.Unlock()
		})
	}
	wg.Wait()
	return fmt.Sprintf("%.0f/s, %s", clients*each/time.Since(start).Seconds(), percentiles(all)), perEvent(t, w, cpu, clients*each)
}

func large(t *testing.T, w *way) (string, string) {
	const clients, each = 4, 8
	cpu, start := w.cpu(t), time.Now()
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			c := oneConnection()
			defer c.CloseIdleConnections()
			for range each {
				if err := ask(c, w.addr(0), "/large"); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	gb := float64(clients*each*largeBody) / 1e9
	figure := fmt.Sprintf("%.0f MB/s", gb*1e3/time.Since(start).Seconds())
	if w.pids == nil {
		return figure, ""
	}
	return figure, fmt.Sprintf("%.2f CPU-s/GB", (w.cpu(t)-cpu)/gb)
}

// waiting keeps connections that have asked once.
func waiting(t *testing.T, w *way) (string, string) {
	before := w.pss(t)
	for range 1000 {
		c := oneConnection()
		defer c.CloseIdleConnections()
		if err := ask(c, w.addr(0), "/"); err != nil {
			t.Error(strings.TrimSpace(err.Error()))
			break
		}
	}
	with := w.pss(t)
	return fmt.Sprintf("%.1f MiB", float64(with-before)/1024), fmt.Sprintf("%.1f MiB in all", float64(with)/1024)
}
