//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// A pod that was not ready when the last server was lost serves as soon as it
// is, and stops when it is not: the node itself knows, and its Services go by
// that. Back again, they go by the server.
func TestServicesOfANodeThatIsCutOff(t *testing.T) {
	site := cluster.NewSite(t)
	var ready atomic.Bool
	ready.Store(true)
	l, err := net.Listen("tcp", site.Host()+":0")
	if err != nil {
		t.Fatal(err)
	}
	judge := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if !ready.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})}
	go func() { _ = judge.Serve(l) }()
	t.Cleanup(func() { _ = judge.Close() })
	address := fmt.Sprintf("%s:%d", site.Host(), 21000+os.Getpid()%5000)
	c := cluster.NewControlPlane(t, "--listen", address, "--advertise", address)
	machine := site.NewMachine()
	a := cluster.NewAgent(t, "n1", machine)
	a.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady("n1") })
	_, port, _ := net.SplitHostPort(l.Addr().String())
	c.Apply(fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: one, labels: {app: hello}}
spec:
  runtimeClassName: wasm
  containers:
  - name: main
    image: hello.wasm
    ports: [{containerPort: 8080, name: http}]
    readinessProbe: {httpGet: {host: %s, port: %s, path: /}, periodSeconds: 1, failureThreshold: 1}
---
`, site.Host(), port) + helloService)
	c.WaitReady("app=hello", 1)
	_, nodePort := clusterIP(t, c, "hello")
	serves := func() error { _, err := get(fmt.Sprintf("http://%s:%d/", machine.IP, nodePort)); return err }
	refuses := func() error {
		if serves() == nil {
			return errors.New("it serves")
		}
		return nil
	}
	patiently(t, "it serves", serves)
	ready.Store(false)
	patiently(t, "one that is not ready does not serve", refuses)

	c.Kill()
	if err := refuses(); err != nil {
		t.Fatal(err)
	}
	ready.Store(true)
	patiently(t, "ready again without a server, it serves", serves)
	ready.Store(false)
	patiently(t, "not ready without a server, it does not serve", refuses)

	ready.Store(true)
	c.Start()
	c.WaitReady("app=hello", 1)
	patiently(t, "it serves with a server", serves)
	ready.Store(false)
	patiently(t, "and does not when it is not ready", refuses)
	ready.Store(true)
	patiently(t, "and does again", serves)
}
