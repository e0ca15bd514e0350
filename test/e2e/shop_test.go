//go:build e2e

package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// order is one request to the shop from outside, by Ingress or node port.
func order(method, address, path string) error {
	r, err := http.NewRequest(method, "http://"+address+path, nil)
	if err != nil {
		return err
	}
	r.Host = "shop.example"
	c := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s%s: %s %s, %v", method, address, path, resp.Status, b, err)
	}
	if strings.HasPrefix(path, "/api/") {
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || n < 1 {
			return fmt.Errorf("%s%s: %q", address, path, b)
		}
	} else if !bytes.Contains(b, []byte("<h1>Open</h1>")) {
		return fmt.Errorf("%s%s: %q", address, path, b)
	}
	return nil
}

// sold is how many of an item redis remembers.
func sold(address, item string) (int, error) {
	out, err := get("http://" + address + "/api/sold/" + item)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(out))
}

// shopImages makes the images of the shop.
func shopImages(t *testing.T) {
	t.Helper()
	cluster.NeedContainers(t)
	script := exec.Command(manifest(t, "shop", "images.sh"))
	if out, err := script.CombinedOutput(); err != nil {
		if _, missing := exec.LookPath("apt-get"); missing != nil {
			t.Skip("SKIPPED: the shop's images are made of Debian's packages, and there is no apt-get")
		}
		t.Fatalf("images.sh: %v: %s", err, out)
	}
}

// stockShop imports what the shop needs, before the node's first start.
func stockShop(t *testing.T, a *cluster.Agent) {
	t.Helper()
	a.Import("shop.wasm", example(t, "shop.wasm"))
	for _, image := range []string{"shop-web.tar", "shop-redis.tar"} {
		if out, err := a.Command("import", example(t, image), "--state-dir", filepath.Join(a.Dir, "state")); err != nil {
			t.Fatalf("import: %v: %s", err, out)
		}
	}
	a.ImportBusybox("busybox:test", nil)
}

// TestShop is the example as its README says, on a node of its own: nginx in a
// container before a Wasm guest, before redis in a container with a claim. It
// is reached by name from a container, by Ingress and node port from outside;
// redis restarts with its data, also while the server is off.
func TestShop(t *testing.T) {
	shopImages(t)
	site := cluster.NewSite(t)
	address := fmt.Sprintf("%s:%d", site.Host(), 21000+os.Getpid()%5000)
	c := cluster.NewControlPlane(t, "--listen", address, "--advertise", address)
	machine := site.NewMachine()
	a := cluster.NewAgent(t, "n1", machine)
	stockShop(t, a)
	a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady("n1") })
	c.Run("apply", "-f", manifest(t, "shop", "shop.yaml"))
	t.Cleanup(func() {
		for _, app := range []string{"shop-web", "shop-api", "shop-redis"} {
			if t.Failed() {
				out, err := c.Try("logs", "deploy/"+app, "--tail", "5")
				t.Logf("%s: %s, %v", app, out, err)
			}
		}
	})
	c.WaitReady("app in (shop-web,shop-api,shop-redis)", 3)
	_, port := clusterIP(t, c, "shop-web")
	nodePort := fmt.Sprintf("%s:%d", machine.IP, port)
	for _, way := range []string{nodePort, machine.IP + ":80"} {
		patiently(t, "the page at "+way, func() error { return order(http.MethodGet, way, "/") })
		patiently(t, "an order at "+way, func() error { return order(http.MethodPost, way, "/api/buy/tea") })
	}
	c.Apply(`apiVersion: v1
kind: Pod
metadata: {name: customer}
spec:
  restartPolicy: Never
  containers: [{name: main, image: "busybox:test", imagePullPolicy: Never, command: [wget, -qO-, --post-data=, "http://shop-web/api/buy/tea"]}]
`)
	c.Eventually(30*time.Second, "a container bought by the Service's name", func() error {
		if log, err := c.Try("logs", "customer"); err != nil || strings.TrimSpace(log) < "3" {
			return fmt.Errorf("%q, %v", log, err)
		}
		return nil
	})
	before, err := sold(nodePort, "tea")
	if err != nil || before < 3 {
		t.Fatalf("%d sold, %v", before, err)
	}

	restartRedis := func(how func()) {
		t.Helper()
		old := redis(t, a)
		how()
		patiently(t, "redis runs again", func() error {
			if now := redis(t, a); now == 0 || now == old {
				return fmt.Errorf("process %d, was %d", now, old)
			}
			return nil
		})
		patiently(t, "redis has its data", func() error {
			n, err := sold(nodePort, "tea")
			if err == nil && n != before {
				t.Fatalf("%d sold, %d before the restart", n, before)
			}
			return err
		})
	}
	restartRedis(func() { c.Run("delete", "pod", "-l", "app=shop-redis") })
	c.WaitReady("app=shop-redis", 1)

	c.Kill()
	patiently(t, "the page by Ingress without a server", func() error { return order(http.MethodGet, machine.IP+":80", "/") })
	restartRedis(func() { _ = syscall.Kill(redis(t, a), syscall.SIGKILL) })
	patiently(t, "an order without a server", func() error { return order(http.MethodPost, machine.IP+":80", "/api/buy/tea") })
	c.Start()
	c.WaitReady("app in (shop-web,shop-api,shop-redis)", 3)
	if after, err := sold(nodePort, "tea"); err != nil || after <= before {
		t.Errorf("%d sold after %d, %v", after, before, err)
	}
}

// redis is the process of the node's redis, 0 while there is none.
func redis(t *testing.T, a *cluster.Agent) int {
	t.Helper()
	pids, err := filepath.Glob(filepath.Join(a.Dir, "run", "oci", "c", "*_redis_*", "pid"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pids {
		b, _ := os.ReadFile(p)
		pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err == nil && syscall.Kill(pid, 0) == nil {
			return pid
		}
	}
	return 0
}
