//go:build e2e

package e2e

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/node/proxy"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// tiersPod is one endpoint, on one node.
const tiersPod = `apiVersion: v1
kind: Pod
metadata: {name: on-NODE, labels: {app: tiers}}
spec:
  runtimeClassName: wasm
  nodeName: NODE
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: hello.wasm
    env: [{name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
    ports: [{containerPort: 8080, name: http}]
    readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
---
`

// tiersService leads there; one that spells out nothing, and two that do.
const tiersService = `apiVersion: v1
kind: Service
metadata: {name: NAME}
spec:
  type: NodePort
  DISTRIBUTION
  selector: {app: tiers}
  ports: [{name: http, port: 80, targetPort: http, nodePort: PORT}]
---
`

// round is a Service that leads to its own node port on a node.
const round = `apiVersion: v1
kind: Service
metadata: {name: round}
spec:
  type: NodePort
  ports: [{name: http, port: 80, nodePort: 30684}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: round-1, labels: {kubernetes.io/service-name: round}}
addressType: IPv4
endpoints: [{addresses: [ADDRESS]}]
ports: [{name: http, port: 30684, protocol: TCP}]
`

// hold asks on a connection of its own, and keeps it; it says who answered.
func hold(at string) (who string, c net.Conn, err error) {
	if c, err = net.DialTimeout("tcp", at, 5*time.Second); err != nil {
		return "", nil, err
	}
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err = fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err == nil {
		var resp *http.Response
		if resp, err = http.ReadResponse(bufio.NewReader(c), nil); err == nil {
			b, rerr := io.ReadAll(resp.Body) // which leaves the connection open
			who, err = string(b), rerr
		}
	}
	if err != nil {
		_ = c.Close()
	}
	return who, c, err
}

// TestNearOnesFirst: by the node port of each of three nodes, of which two are
// one site, connections one after the other stay on the node, and many at once
// go to the site's other one and then farther; a Service may ask for its site
// or its node alone, and gets what is there when that is gone. What leads to
// itself is told.
func TestNearOnesFirst(t *testing.T) {
	site := cluster.NewSite(t)
	address := fmt.Sprintf("%s:%d", site.Host(), 26000+os.Getpid()%5000)
	c := cluster.NewControlPlane(t, "--listen", address, "--advertise", address)
	var agents []*cluster.Agent
	ips := map[string]string{}
	for i, zone := range []string{"a", "a", "b"} {
		m := site.NewMachine()
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), m)
		a.Import("hello.wasm", example(t, "hello.wasm"))
		a.Start("--join", strings.TrimSpace(c.Run("token", "create")), "--node-labels", "topology.kubernetes.io/zone="+zone)
		agents, ips[a.Name] = append(agents, a), m.IP
	}
	text := strings.ReplaceAll(round, "ADDRESS", ips["n1"]) + "---\n"
	for _, a := range agents {
		c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(a.Name) })
		text += strings.ReplaceAll(tiersPod, "NODE", a.Name)
	}
	for i, d := range []string{"", "trafficDistribution: PreferSameZone", "trafficDistribution: PreferSameNode"} {
		text += strings.NewReplacer("NAME", fmt.Sprint("tiers", i), "DISTRIBUTION", d, "PORT", fmt.Sprint(30681+i)).Replace(tiersService)
	}
	c.Apply(text)
	c.WaitReady("app=tiers", 3)
	idle := func(a *cluster.Agent) {
		t.Helper()
		patiently(t, "nobody is connected at "+a.Name, func() error {
			st, err := proxy.Ask(filepath.Join(a.Dir, "run", "proxy"))
			if err == nil && st.Connections != 0 {
				err = fmt.Errorf("%d connections", st.Connections)
			}
			return err
		})
	}
	// many opens twelve at once, and counts who has them.
	many := func(a *cluster.Agent, port int) (n [3]int, err error) {
		t.Helper()
		idle(a)
		for range 12 {
			who, conn, err := hold(fmt.Sprintf("%s:%d", ips[a.Name], port))
			if err != nil {
				return n, err
			}
			defer func() { _ = conn.Close() }()
			for i := range n {
				if strings.Contains(who, fmt.Sprintf("on-n%d ", i+1)) {
					n[i]++
				}
			}
		}
		return n, nil
	}
	shared := func(what string, a *cluster.Agent, port int, want string) {
		t.Helper()
		if n, err := many(a, port); err != nil || !strings.Contains(want, fmt.Sprint(n)) {
			t.Errorf("%s: %v %v, want %s", what, n, err, want)
		}
	}
	soon := func(what string, a *cluster.Agent, port int, want string) {
		t.Helper()
		patiently(t, what, func() error {
			if n, err := many(a, port); err != nil || fmt.Sprint(n) != want {
				return fmt.Errorf("%v %v, want %s", n, err, want)
			}
			return nil
		})
	}
	for _, a := range agents { // each proxy knows all three by now
		patiently(t, "all are known at "+a.Name, func() error {
			if n, err := many(a, 30681); err != nil || n[0]*n[1]*n[2] == 0 {
				return fmt.Errorf("%v %w", n, err)
			}
			return nil
		})
	}
	for i, want := range []string{"[6 5 1] [5 5 2] [6 4 2]", "[5 6 1] [5 5 2] [4 6 2]", "[3 2 7] [3 3 6] [2 3 7]"} {
		a := agents[i]
		for range 5 {
			idle(a)
			who, conn, err := hold(fmt.Sprintf("%s:%d", ips[a.Name], 30681))
			if err != nil {
				t.Fatal(err)
			}
			_ = conn.Close()
			if !strings.Contains(who, "on-"+a.Name+" ") {
				t.Errorf("alone at %s, and answered by %q", a.Name, who)
			}
		}
		shared("twelve at once at "+a.Name, a, 30681, want)
	}
	shared("its site's alone", agents[0], 30682, "[6 6 0]")
	shared("the other site's alone", agents[2], 30682, "[0 0 12]")
	shared("its node's alone", agents[0], 30683, "[12 0 0]")
	c.Run("delete", "pod", "on-n1")
	soon("its site's other one has all", agents[0], 30682, "[0 12 0]")
	soon("its site's other one has all, rather than farther ones", agents[0], 30683, "[0 12 0]")
	c.Run("delete", "pod", "on-n2")
	for _, port := range []int{30681, 30682, 30683} {
		soon("the other site has all", agents[0], port, "[0 0 12]")
	}
	c.Eventually(time.Minute, "the Service that leads to itself says so", func() error {
		out := c.Run("describe", "service", "round")
		if !strings.Contains(out, "EndpointLoop") || !strings.Contains(out, "does not use endpoint "+ips["n1"]+":30684/TCP: it is an address of the Service itself") {
			return fmt.Errorf("%s", out)
		}
		return nil
	})
	if _, err := get("http://" + ips["n2"] + ":30684/"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("a Service that leads to itself: %v", err)
	}
}
