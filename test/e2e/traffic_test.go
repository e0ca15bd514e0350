//go:build e2e

package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/node/proxy"
	"github.com/dunlin-project/dunlin/test/cluster"
)

const helloService = `apiVersion: v1
kind: Service
metadata: {name: hello}
spec:
  type: NodePort
  selector: {app: hello}
  ports: [{name: http, port: 80, targetPort: http}]
`

func clusterIP(t *testing.T, c *cluster.Cluster, name string) (ip string, nodePort int32) {
	t.Helper()
	var s corev1.Service
	if err := c.Get("service/"+name, &s); err != nil {
		t.Fatal(err)
	}
	return s.Spec.ClusterIP, s.Spec.Ports[0].NodePort
}

// get asks on a connection of its own.
func get(u string) (string, error) { return getBy(u, (&net.Dialer{}).DialContext) }

// getOn asks from inside a network namespace. A client's connections are made
// by goroutines of its own, so it is the dialling that has to go there.
func getOn(path, u string) (string, error) {
	return getBy(u, func(ctx context.Context, network, addr string) (c net.Conn, err error) {
		err = cluster.Inside(path, func() (err error) {
			c, err = (&net.Dialer{}).DialContext(ctx, network, addr)
			return err
		})
		return c, err
	})
}

func getBy(u string, dial func(ctx context.Context, network, addr string) (net.Conn, error)) (string, error) {
	c := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: dial}}
	r, err := c.Get(u)
	if err != nil {
		return "", err
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = errors.New(r.Status)
	}
	return string(b), err
}

func (f *fleet) importHello() {
	f.t.Helper()
	module := filepath.Join(cluster.Root(f.t), "bin", "examples", "hello.wasm")
	f.Import("hello.wasm", module)
	for _, a := range f.agents {
		a.Import("hello.wasm", module)
	}
}

// on runs f inside a machine's network.
func on(t *testing.T, path string, f func() error) error {
	t.Helper()
	return cluster.Inside(path, f)
}

// patiently polls while servers may be dead, which Eventually takes for a
// failure.
func patiently(t *testing.T, what string, f func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); <-time.After(100 * time.Millisecond) {
		if err = f(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// proxyOf is the process of a node's proxy.
func proxyOf(t *testing.T, dir string) int {
	t.Helper()
	st, err := proxy.Ask(filepath.Join(dir, "run", "proxy"))
	if err != nil {
		t.Fatal(err)
	}
	return st.PID
}

// Services answer everywhere, by address, name and node port, from pods of
// this and of other nodes; and go on when every server is dead, and after the
// node was started again without any.
func TestServicesAnswerWithoutServers(t *testing.T) {
	f := newFleet(t, 2)
	f.importHello()
	// One pod, on the second machine: whoever else reaches it crosses the site.
	f.Apply(strings.Replace(hello("1", 1), "runtimeClassName: wasm", "runtimeClassName: wasm\n      nodeSelector: {kubernetes.io/hostname: n2}", 1) + "---\n" + helloService)
	f.Run("rollout", "status", "deployment", "hello", "--timeout", "2m")
	ip, port := clusterIP(t, f.Cluster, "hello")
	ask := func(where string) {
		t.Helper()
		for i, a := range f.agents {
			for _, u := range []string{"http://" + ip + "/", fmt.Sprintf("http://127.0.0.1:%d/", port)} {
				patiently(t, fmt.Sprintf("%s answers on %s %s", u, a.Name, where), func() error {
					_, err := getOn(f.machines[i].Path(), u)
					return err
				})
			}
		}
	}
	ask("with a server")
	name := func(a *cluster.Agent) error {
		return on(t, "/run/netns/"+a.NetNS, func() error {
			m := new(dns.Msg)
			m.SetQuestion("hello.default.svc.cluster.local.", dns.TypeA)
			r, err := dns.Exchange(m, "10.43.0.10:53")
			if err != nil {
				return err
			}
			if len(r.Answer) != 1 || !strings.HasSuffix(r.Answer[0].String(), ip) {
				return fmt.Errorf("answer %v", r)
			}
			return nil
		})
	}
	named := func(when string) {
		t.Helper()
		patiently(t, "the Service has a name "+when, func() error { return name(f.agents[0]) })
	}
	named("with a server")
	f.Kill()
	ask("with all servers dead")
	// As after a boot: nothing of the agent or its proxy runs. An orderly end
	// saves the table; else it is what it was up to ten minutes before.
	a := f.agents[0]
	a.Stop(syscall.SIGTERM)
	if err := syscall.Kill(proxyOf(t, a.Dir), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	a.Start()
	ask("after a start without servers")
	named("after a start without servers")
	f.Start() // for an orderly end
}

// drainingHello has nodes know of a pod's end before it stops.
func drainingHello(version string) string {
	return strings.Replace(hello(version, 3), "        readinessProbe:", "        lifecycle: {preStop: {sleep: {seconds: 1}}}\n        readinessProbe:", 1)
}

// A rolling update under constant load on connections that are kept fails no
// request, and killing and replacing the agent and its proxy's program cuts no
// connection.
func TestRollingUpdateFailsNoRequest(t *testing.T) {
	c := cluster.New(t)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	c.Apply(drainingHello("1") + "---\n" + helloService)
	c.Run("rollout", "status", "deployment", "hello", "--timeout", "2m")
	ip, _ := clusterIP(t, c, "hello")
	c.Eventually(30*time.Second, "the Service answers", func() error { _, err := get("http://" + ip + "/"); return err })

	conn, err := net.Dial("tcp", ip+":80")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	kept := bufio.NewReader(conn)
	alive := func(when string) {
		t.Helper()
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: hello\r\n\r\n"); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		r, err := http.ReadResponse(kept, nil)
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		_, _ = io.Copy(io.Discard, r.Body)
		_ = r.Body.Close()
	}
	alive("at first")

	load := newPacedLoad("http://"+ip+"/", 200, 100*time.Millisecond)
	pid := proxyOf(t, c.Dir)
	c.Kill()
	alive("with the agent dead")
	c.Start()
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady("e2e") })
	alive("with the agent back")
	if now := proxyOf(t, c.Dir); now != pid {
		t.Fatalf("the proxy was process %d and is %d", pid, now)
	}
	before := load.done.Load()
	c.Apply(drainingHello("3"))
	c.Run("rollout", "status", "deployment", "hello", "--timeout", "3m")
	c.Eventually(2*time.Minute, "old pods are gone", func() error {
		if n := len(c.Pods("app=hello")); n != 3 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
	done, failed := load.stop()
	t.Logf("%d requests, %d of them during the rollout, %d failed", done, done-before, len(failed))
	if len(failed) > 0 || done-before < 100 {
		t.Fatalf("failed: %v", failed)
	}
}

// load asks all the time, each client on a connection that is kept.
type load struct {
	done atomic.Int64
	mu   sync.Mutex
	errs []string
	end  context.CancelFunc
	wg   sync.WaitGroup
}

// newPacedLoad has each client ask once a pace, not all at once.
func newPacedLoad(u string, clients int, pace time.Duration) *load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &load{end: cancel}
	for i := range clients {
		l.wg.Go(func() {
			c := http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1}, Timeout: 30 * time.Second}
			defer c.CloseIdleConnections()
			next := time.NewTimer(pace * time.Duration(i) / time.Duration(clients))
			defer next.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-next.C:
				}
				next.Reset(pace)
				l.ask(&c, u)
			}
		})
	}
	return l
}

func (l *load) ask(c *http.Client, u string) {
	// A body that cannot be had again: what a cut connection swallowed would
	// else be sent once more in silence.
	req, err := http.NewRequest(http.MethodGet, u, io.MultiReader())
	if err != nil {
		panic(err)
	}
	r, err := c.Do(req)
	if err == nil {
		_, err = io.Copy(io.Discard, r.Body)
		_ = r.Body.Close()
		if err == nil && r.StatusCode != http.StatusOK {
			err = errors.New(r.Status)
		}
	}
	l.done.Add(1)
	if err != nil {
		l.mu.Lock()
		l.errs = append(l.errs, time.Now().Format("15:04:05 ")+err.Error())
		l.mu.Unlock()
	}
}

func (l *load) stop() (int64, []string) {
	l.end()
	l.wg.Wait()
	return l.done.Load(), l.errs
}
