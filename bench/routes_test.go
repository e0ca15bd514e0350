//go:build bench

package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// named answers each connection with its name, on the site's address.
func named(t *testing.T, host, name string) int32 {
	t.Helper()
	l, err := net.Listen("tcp", host+":0")
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
			_, _ = io.WriteString(c, name)
			_ = c.Close()
		}
	}()
	return int32(netip.MustParseAddrPort(l.Addr().String()).Port())
}

// TestEndpointChange writes an EndpointSlice again and again and looks, on
// machines of their own, when new connections to the Service's address go to
// the other endpoint.
func TestEndpointChange(t *testing.T) {
	const nodes, changes = 4, 100
	s := cluster.NewSite(t)
	var machines []*cluster.Machine
	for range nodes {
		machines = append(machines, s.NewMachine())
	}
	c := cluster.New(t, "--node-address", s.Host(), "--listen", s.Host()+":"+strconv.Itoa(20000+rand.IntN(9999)))
	for i, m := range machines {
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), m)
		a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
		c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(a.Name) })
	}
	ports := [2]int32{named(t, s.Host(), "a"), named(t, s.Host(), "b")}
	c.Apply(fmt.Sprintf(`apiVersion: v1
kind: Service
metadata: {name: s}
spec: {ports: [{name: p, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s-1, labels: {kubernetes.io/service-name: s}}
addressType: IPv4
ports: [{name: p, port: %d, protocol: TCP}]
endpoints: [{addresses: [%s], conditions: {ready: true}}]
`, ports[0], s.Host()))
	var svc corev1.Service
	if err := c.Get("service/s", &svc); err != nil {
		t.Fatal(err)
	}
	addr := net.JoinHostPort(svc.Spec.ClusterIP, "80")
	for _, m := range machines {
		if err := routed(m, addr, "a"); err != nil {
			t.Fatal(err)
		}
	}
	cl := admin(t, c.Kubeconfig())
	var each, all []time.Duration
	for i := range changes {
		to := (i + 1) % 2
		body, err := json.Marshal(map[string]any{"ports": []any{map[string]any{"name": "p", "port": ports[to], "protocol": "TCP"}}})
		if err != nil {
			t.Fatal(err)
		}
		// At any moment of the gathering, not always at its begin.
		wait(t, time.Duration(rand.IntN(200))*time.Millisecond)
		start := time.Now()
		if err := cl.JSON(t.Context(), client.Request{Method: http.MethodPatch, Path: "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/s-1",
			ContentType: "application/merge-patch+json", Body: body}, &discoveryv1.EndpointSlice{}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		took := make([]time.Duration, nodes)
		for n, m := range machines {
			wg.Go(func() {
				if err := routed(m, addr, string(rune('a'+to))); err != nil {
					t.Error(err)
				}
				took[n] = time.Since(start)
			})
		}
		wg.Wait()
		each, all = append(each, took...), append(all, slices.Max(took))
	}
	slices.Sort(each)
	slices.Sort(all)
	p99 := all[len(all)*99/100]
	row(fmt.Sprintf("endpoint changed → all of %d nodes route by it (a LAN of network namespaces)", nodes), "p99 ≤ 500 ms",
		fmt.Sprintf("p50 %d ms, p99 %d ms", all[len(all)/2].Milliseconds(), p99.Milliseconds()), held(p99 <= 500*time.Millisecond),
		fmt.Sprintf("%d changes, from the write's begin to a new connection; one node p50 %d ms, p99 %d ms", changes, each[len(each)/2].Milliseconds(), each[len(each)*99/100].Milliseconds()))
}

// routed asks on a machine until the wanted endpoint answers.
func routed(m *cluster.Machine, addr, want string) error {
	return cluster.Inside(m.Path(), func() error {
		var got string
		var err error
		for end := time.Now().Add(time.Minute); time.Now().Before(end); <-time.After(2 * time.Millisecond) {
			var c net.Conn
			if c, err = net.DialTimeout("tcp", addr, time.Second); err != nil {
				continue
			}
			var b [1]byte
			_ = c.SetDeadline(time.Now().Add(time.Second))
			_, err = io.ReadFull(c, b[:])
			_ = c.Close()
			if got = string(b[:]); err == nil && got == want {
				return nil
			}
		}
		return fmt.Errorf("%q answers, not %q: %w", got, want, err)
	})
}
