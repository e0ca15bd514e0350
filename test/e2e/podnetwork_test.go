//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

const networkPods = `---
apiVersion: v1
kind: Pod
metadata: {name: box-%[1]s, labels: {app: network}}
spec:
  nodeSelector: {kubernetes.io/hostname: %[1]s}
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: "busybox:test", imagePullPolicy: Never, command: [sh, -c, "mkdir /www; echo box-%[1]s > /www/index.html; exec httpd -f -p 8080 -h /www"]}]
---
apiVersion: v1
kind: Pod
metadata: {name: own-%[1]s, labels: {app: network}}
spec:
  nodeSelector: {kubernetes.io/hostname: %[1]s}
  hostNetwork: true
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: "busybox:test", imagePullPolicy: Never, command: [sh, -c, "mkdir /www; echo own-%[1]s > /www/index.html; exec httpd -f -p 18080 -h /www"]}]
---
apiVersion: v1
kind: Pod
metadata: {name: guest-%[1]s, labels: {app: network}}
spec:
  nodeSelector: {kubernetes.io/hostname: %[1]s}
  runtimeClassName: wasm
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: hello.wasm, ports: [{containerPort: 8080}]}]
`

// TestPodsReachEachOther: containers, Wasm pods, pods of the nodes' own network
// and the nodes themselves, of one node and of two on one network, each by its
// address; and nothing of them is left when the agents are swept.
func TestPodsReachEachOther(t *testing.T) {
	cluster.NeedContainers(t)
	site := cluster.NewSite(t)
	address := fmt.Sprintf("%s:%d", site.Host(), 27000+os.Getpid()%4000)
	c := cluster.NewControlPlane(t, "--listen", address, "--advertise", address)
	machines := map[string]*cluster.Machine{}
	for _, n := range []string{"n1", "n2"} {
		machines[n] = site.NewMachine()
		a := cluster.NewAgent(t, n, machines[n])
		a.ImportBusybox("busybox:test", nil)
		a.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
		a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	}
	for n := range machines {
		c.Eventually(time.Minute, n+" is Ready", func() error { return c.NodeReady(n) })
		c.Apply(fmt.Sprintf(networkPods, n))
	}
	c.WaitReady("app=network", 6)
	at := map[string]string{} // who answers where
	for _, p := range c.Pods("app=network") {
		port := map[bool]string{true: "18080", false: "8080"}[p.Spec.HostNetwork]
		at[p.Name] = p.Status.PodIP + ":" + port
		if p.Spec.HostNetwork != (p.Status.PodIP == p.Status.HostIP) || p.Spec.HostNetwork && p.Status.PodIP != machines[p.Spec.NodeName].IP {
			t.Errorf("%s has address %s on %s", p.Name, p.Status.PodIP, p.Status.HostIP)
		}
	}
	says := func(who string) string {
		if strings.HasPrefix(who, "guest") {
			return "ello"
		}
		return who + "\n"
	}
	for who, address := range at {
		for _, from := range []string{"box-n1", "own-n1", "box-n2", "own-n2"} {
			patiently(t, who+" from "+from, func() error {
				out, err := c.Try("exec", from, "--", "timeout", "5", "wget", "-qO-", "http://"+address+"/")
				if err == nil && !strings.Contains(out, says(who)) {
					err = fmt.Errorf("%q", out)
				}
				return err
			})
		}
		for n, m := range machines {
			patiently(t, who+" from the machine "+n, func() error {
				_, err := getOn(m.Path(), "http://"+address+"/") // a client's connections are made on threads of their own
				return err
			})
		}
	}
}

// TestNodeWithoutPrograms: a node that lacks what containers need runs Wasm
// pods and says so; containers are not placed there, and say why; once the
// programs are there and the agent was started again, they run.
func TestNodeWithoutPrograms(t *testing.T) {
	cluster.NeedContainers(t)
	path := os.Getenv("PATH")
	bare := t.TempDir()
	for _, dir := range filepath.SplitList(path) { // all but those
		files, _ := os.ReadDir(dir)
		for _, f := range files {
			if n := f.Name(); n != "runc" && n != "crun" && n != "conmon" {
				_ = os.Symlink(filepath.Join(dir, n), filepath.Join(bare, n))
			}
		}
	}
	t.Setenv("PATH", bare)
	c := cluster.New(t)
	c.ImportBusybox("busybox:test", nil)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	condition := func() (text, label string) {
		t.Helper()
		var n corev1.Node
		if err := c.Get("node/e2e", &n); err != nil {
			t.Fatal(err)
		}
		for _, cond := range n.Status.Conditions {
			if cond.Type == "dunlin.dev/RunsContainers" {
				text = string(cond.Status) + " " + cond.Reason + ": " + cond.Message
			}
		}
		return text, n.Labels["dunlin.dev/runtime.runc"] + n.Labels["dunlin.dev/runtime.crun"]
	}
	text, label := condition()
	for _, want := range []string{"False MissingPrograms", "Wasm modules only", "conmon is not installed", "neither crun nor runc is installed"} {
		if !strings.Contains(text, want) || label != "" {
			t.Errorf("%q, label %q, want %q", text, label, want)
		}
	}
	c.Apply(hello("1", 1) + `---
apiVersion: v1
kind: Pod
metadata: {name: box, labels: {app: box}}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: "busybox:test", imagePullPolicy: Never, command: [sleep, "1000"]}]
`)
	c.WaitReady("app=hello", 1)
	c.Eventually(30*time.Second, "the container's pod says why it is not placed", func() error {
		var p corev1.Pod
		if err := c.Get("pod/box", &p); err != nil {
			return err
		}
		for _, cond := range p.Status.Conditions {
			if cond.Type == corev1.PodScheduled && cond.Status == corev1.ConditionFalse && strings.Contains(cond.Message, "cannot run RuntimeClass oci") {
				t.Log(cond.Message)
				return nil
			}
		}
		return fmt.Errorf("node %q, conditions %+v", p.Spec.NodeName, p.Status.Conditions)
	})
	t.Setenv("PATH", path)
	c.Kill()
	c.Start()
	c.WaitReady("app=box", 1)
	if text, label := condition(); !strings.Contains(text, "True RuntimeWorks") || label != "true" {
		t.Errorf("with the programs: %q, label %q", text, label)
	}
}
