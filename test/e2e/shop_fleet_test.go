//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// customers order at all addresses all the time, each order on a connection of
// its own.
type customers struct {
	done atomic.Int64
	mu   sync.Mutex
	errs []string
	stop func()
}

func newCustomers(addresses ...string) *customers {
	c, over := &customers{}, make(chan struct{})
	var wg sync.WaitGroup
	for _, at := range addresses {
		for _, what := range [][2]string{{http.MethodGet, "/"}, {http.MethodPost, "/api/buy/tea"}} {
			wg.Go(func() {
				for {
					select {
					case <-over:
						return
					case <-time.After(100 * time.Millisecond):
					}
					if err := order(what[0], at, what[1]); err != nil {
						c.mu.Lock()
						c.errs = append(c.errs, time.Now().Format("15:04:05.000 ")+err.Error())
						c.mu.Unlock()
					}
					c.done.Add(1)
				}
			})
		}
	}
	c.stop = sync.OnceFunc(func() {
		close(over)
		wg.Wait()
	})
	return c
}

// served ends the customers, of whom everyone has to have got what they want.
func (c *customers) served(t *testing.T, when string) {
	t.Helper()
	c.stop()
	t.Logf("%s: %d orders, %d failed", when, c.done.Load(), len(c.errs))
	if len(c.errs) > 0 || c.done.Load() < 20 {
		t.Errorf("%s: %d orders, failed: %s", when, c.done.Load(), strings.Join(c.errs, "\n"))
	}
}

// household is a Deployment of one container that orders by the Service's name
// all the time, and writes how it went.
const household = `apiVersion: apps/v1
kind: Deployment
metadata: {name: household}
spec:
  selector: {matchLabels: {app: household}}
  template:
    metadata: {labels: {app: household}}
    spec:
      nodeSelector: {kubernetes.io/hostname: n2}
      terminationGracePeriodSeconds: 1
      containers:
        - name: main
          image: "busybox:test"
          imagePullPolicy: Never
          command: [sh, -c, 'while :; do if timeout 10 wget -qO- --post-data= http://shop-web/api/buy/tea >/dev/null; then echo bought; else echo refused; fi; sleep 0.2; done']
`

// TestShopOnAFleet is the example with two of what may be two, on three nodes:
// it is reached by name from a container, by Ingress and by node port from
// outside; while pods are rolled no order fails, nor while all servers are off;
// and when a node dies the others serve on.
func TestShopOnAFleet(t *testing.T) {
	if testing.Short() {
		t.Skip("SKIPPED: it takes over a minute (make e2e without SHORT runs it); TestShop is the one-node form")
	}
	shopImages(t)
	site := cluster.NewSite(t)
	address := fmt.Sprintf("%s:%d", site.Host(), 26000+os.Getpid()%5000)
	c := cluster.NewControlPlane(t, "--listen", address, "--advertise", address)
	var agents []*cluster.Agent
	var machines []*cluster.Machine
	var outside []string
	for i := range 3 {
		m := site.NewMachine()
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), m)
		stockShop(t, a)
		a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
		agents, machines, outside = append(agents, a), append(machines, m), append(outside, m.IP)
	}
	for _, a := range agents {
		c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(a.Name) })
	}
	b, err := os.ReadFile(manifest(t, "shop", "shop.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	shop := strings.NewReplacer(
		"\n  selector: {matchLabels: {app: shop-web}}", "\n  replicas: 2\n  selector: {matchLabels: {app: shop-web}}",
		"\n  selector: {matchLabels: {app: shop-api}}", "\n  replicas: 2\n  selector: {matchLabels: {app: shop-api}}",
		"    metadata: {labels: {app: shop-web}}", "    metadata: {labels: {app: shop-web}, annotations: {dunlin.dev/placement: spread}}",
		"annotations: {dunlin.dev/outbound", "annotations: {dunlin.dev/placement: spread, dunlin.dev/outbound",
		"\n      securityContext: {fsGroup: 999}", "\n      nodeSelector: {kubernetes.io/hostname: n1}\n      securityContext: {fsGroup: 999}").Replace(string(b))
	if strings.Count(shop, "replicas: 2") != 2 || strings.Count(shop, "placement: spread") != 2 || !strings.Contains(shop, "nodeSelector") {
		t.Fatal("the manifest has changed")
	}
	c.Apply(shop + "---\n" + household)
	for _, n := range []string{"n1", "n2"} {
		c.Apply("apiVersion: v1\nkind: Node\nmetadata: {name: " + n + ", labels: {dunlin.dev/ingress: \"true\"}}\n")
	}
	c.WaitReady("app in (shop-web,shop-api,shop-redis)", 5)
	c.WaitReady("app=household", 1)
	_, port := clusterIP(t, c, "shop-web")
	ways := []string{outside[0] + ":80", outside[1] + ":80"}
	for _, ip := range outside {
		ways = append(ways, fmt.Sprintf("%s:%d", ip, port))
	}
	for _, at := range ways {
		patiently(t, "the page at "+at, func() error { return order(http.MethodGet, at, "/") })
	}
	c.Eventually(30*time.Second, "the household buys", func() error {
		if log, err := c.Try("logs", "deploy/household"); err != nil || !strings.Contains(log, "bought") {
			return fmt.Errorf("%q, %v", log, err)
		}
		return nil
	})

	shopWhileRolled(t, c, ways)
	shopWithoutServers(t, c, ways)
	shopWithoutANode(t, c, machines[2], agents[2], ways[:4])
}

// shopWhileRolled fails no order.
func shopWhileRolled(t *testing.T, c *cluster.Cluster, ways []string) {
	t.Helper()
	refused := refusals(t, c)
	l := newCustomers(ways...)
	for range 2 {
		for _, app := range []string{"shop-web", "shop-api"} {
			c.Run("rollout", "restart", "deployment/"+app)
			c.Run("rollout", "status", "deployment/"+app, "--timeout", "3m")
		}
	}
	c.WaitReady("app in (shop-web,shop-api,shop-redis)", 5)
	l.served(t, "while pods are rolled")
	if now := refusals(t, c); now != refused {
		t.Errorf("by name from a container: %d were refused", now-refused)
	}
}

// shopWithoutServers neither.
func shopWithoutServers(t *testing.T, c *cluster.Cluster, ways []string) {
	t.Helper()
	refused := refusals(t, c)
	c.Kill()
	l := newCustomers(ways...)
	for l.done.Load() < 300 {
		<-time.After(100 * time.Millisecond)
	}
	l.served(t, "with all servers off")
	c.Start()
	c.WaitReady("app in (shop-web,shop-api,shop-redis)", 5)
	if now := refusals(t, c); now != refused {
		t.Errorf("by name from a container: %d were refused", now-refused)
	}
}

// shopWithoutANode fails no order once the others know. The machine loses its
// power: from one moment to the next nothing of it answers or refuses, neither
// its agent nor containers, nor its proxy, nor its address.
func shopWithoutANode(t *testing.T, c *cluster.Cluster, m *cluster.Machine, a *cluster.Agent, ways []string) {
	t.Helper()
	m.Cut()
	a.Kill()
	for _, at := range ways {
		patiently(t, "an order at "+at, func() error { return order(http.MethodPost, at, "/api/buy/tea") })
	}
	c.Eventually(2*time.Minute, "the node is not Ready", func() error {
		if c.NodeReady(a.Name) == nil {
			return errors.New("it is")
		}
		return nil
	})
	c.Eventually(2*time.Minute, "its pods run elsewhere", func() error {
		good := 0
		for _, p := range c.Pods("app in (shop-web,shop-api,shop-redis)") {
			if p.Spec.NodeName != a.Name && cluster.Ready(&p) {
				good++
			}
		}
		if good < 5 {
			return fmt.Errorf("%d are Ready elsewhere", good)
		}
		return nil
	})
	refused := refusals(t, c)
	l := newCustomers(ways...)
	for l.done.Load() < 200 {
		<-time.After(100 * time.Millisecond)
	}
	l.served(t, "after a node's end")
	if now := refusals(t, c); now != refused {
		t.Errorf("by name from a container: %d were refused", now-refused)
	}
}

// refusals are those of the household so far.
func refusals(t *testing.T, c *cluster.Cluster) int {
	t.Helper()
	var log string
	c.Eventually(time.Minute, "the log of the household is there", func() (err error) {
		log, err = c.Try("logs", "deploy/household")
		return err
	})
	return strings.Count(log, "refused")
}
