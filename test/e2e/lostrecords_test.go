//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// A node's database that is lost or damaged while its pods run costs them
// nothing: both kinds keep process and address, and go on serving.
func TestLostNodeDatabase(t *testing.T) {
	cluster.NeedContainers(t)
	c := cluster.New(t)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	c.Apply(hello("1", 2) + "---\n" + helloService)
	c.ImportBusybox("busybox:test", nil)
	c.Apply(`apiVersion: v1
kind: Pod
metadata: {name: box, labels: {app: box}}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: busybox:test
    imagePullPolicy: Never
    command: [sh, -c, "echo ok > /tmp/index.html; exec httpd -f -p 80 -h /tmp"]
    readinessProbe: {httpGet: {path: /, port: 80}, periodSeconds: 1}
`)
	all := func() []corev1.Pod { return append(c.WaitReady("app=hello", 2), c.WaitReady("app=box", 1)...) }
	was := map[string]string{}
	of := func(p *corev1.Pod) string {
		st := &p.Status.ContainerStatuses[0]
		return fmt.Sprintf("%s at %s, restarted %d times", st.ContainerID, p.Status.PodIP, st.RestartCount)
	}
	for _, p := range all() {
		was[p.Name] = of(&p)
	}
	db := filepath.Join(c.Dir, "state", "node", "node.db")
	for name, damage := range map[string]func() error{
		"empty":  func() error { return os.Truncate(db, 0) },
		"halved": func() error { return os.Truncate(db, 20000) },
		"gone":   func() error { return os.Remove(db) },
	} {
		c.Kill()
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		c.Start()
		c.Eventually(60*time.Second, "the node tells of all again", func() error {
			return c.NodeReady("e2e")
		})
		for _, p := range all() {
			if now := of(&p); now != was[p.Name] {
				t.Errorf("%s: %s is %s, was %s", name, p.Name, now, was[p.Name])
			}
			if _, err := get("http://" + p.Status.PodIP + map[string]string{"hello": ":8080/", "box": "/"}[p.Labels["app"]]); err != nil {
				t.Errorf("%s: %s: %v", name, p.Name, err)
			}
		}
	}
}

// A guest whose pod was deleted while its agent was away ends when the agent is
// back, though the run folder that spoke of it is gone.
func TestGuestsWithoutRecords(t *testing.T) {
	f := newFleet(t, 1)
	a := f.agents[0]
	f.Apply(`apiVersion: v1
kind: Pod
metadata: {name: left, labels: {app: left}}
spec:
  runtimeClassName: wasm
  nodeName: n1
  containers: [{name: main, image: sleep.wasm}]
`)
	f.WaitReady("app=left", 1)
	var pid int
	for _, pid = range a.HostPIDs() {
		break
	}
	if pid == 0 {
		t.Fatal("no guest")
	}
	a.Stop(syscall.SIGKILL)
	f.Run("delete", "pod", "left", "--force", "--grace-period=0")
	if err := os.RemoveAll(filepath.Join(a.Dir, "run", "wasm")); err != nil {
		t.Fatal(err)
	}
	if syscall.Kill(pid, 0) != nil {
		t.Fatal("the guest ended with its agent")
	}
	a.Start()
	f.ready()
	f.Eventually(30*time.Second, "the guest is ended", func() error {
		if syscall.Kill(pid, 0) == nil {
			return fmt.Errorf("process %d runs", pid)
		}
		return nil
	})
}
