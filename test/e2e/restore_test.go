//go:build e2e

package e2e

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// webAndConfig is a Deployment of a version, and what it mounts.
func webAndConfig(version, text string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: ConfigMap
metadata: {name: c}
data: {marker-of-c: %q}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      runtimeClassName: wasm
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 1
      volumes: [{name: c, configMap: {name: c}}]
      containers:
      - name: main
        image: sleep.wasm
        env: [{name: VERSION, value: %q}]
        volumeMounts: [{name: c, mountPath: /c}]
`, text, version)
}

const lateBarePod = `apiVersion: v1
kind: Pod
metadata: {name: bare, labels: {app: bare}}
spec:
  runtimeClassName: wasm
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: hello.wasm, ports: [{name: http, containerPort: 8080}]}]
`

const bareService = `apiVersion: v1
kind: Service
metadata: {name: bare}
spec: {type: NodePort, selector: {app: bare}, ports: [{port: 80, targetPort: http}]}
`

// guestUIDs are the pods that run on a node, each once.
func guestUIDs(a *cluster.Agent) []string {
	var out []string
	for k := range a.HostPIDs() {
		out = append(out, k[:36]) // the attempt's folder begins with it
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// mounted is what the node's pods find in the ConfigMap's volume.
func mounted(a *cluster.Agent) (texts []string) {
	_ = filepath.WalkDir(a.Dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Name() == "marker-of-c" && d.Type().IsRegular() {
			if b, err := os.ReadFile(path); err == nil {
				texts = append(texts, string(b))
			}
		}
		return nil
	})
	slices.Sort(texts)
	return slices.Compact(texts)
}

// TestRestoreOfAnOldStateIsHeld: after a snapshot a Deployment is rolled, a
// StatefulSet's pod made anew, a ConfigMap changed and a pod created. The
// snapshot is restored: the node holds all that, says so, also over its
// agent's end and a power cut without a server, until the operator accepts.
func TestRestoreOfAnOldStateIsHeld(t *testing.T) {
	c := cluster.NewServers(t, 1)
	a := cluster.NewAgent(t, "n1", nil)
	a.Import("sleep.wasm", cluster.Module(t, "sleep"))
	a.Import("hello.wasm", example(t, "hello.wasm"))
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	ready := func(selector string, n int, check func(p *corev1.Pod) bool) func() error {
		return func() error {
			list, err := podsOf(c, 0, selector)
			if err != nil || len(list) != n {
				return fmt.Errorf("%d pods of %s, %v", len(list), selector, err)
			}
			for i := range list {
				if !cluster.Ready(&list[i]) || check != nil && !check(&list[i]) {
					return fmt.Errorf("%s: %+v", list[i].Name, list[i].Status.ContainerStatuses)
				}
			}
			return nil
		}
	}
	version := func(v string) func(*corev1.Pod) bool {
		return func(p *corev1.Pod) bool { return p.Spec.Containers[0].Env[0].Value == v }
	}
	apply := func(manifest string) {
		t.Helper()
		if _, err := c.TryIn(0, manifest, "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
	}
	oldDB := ""
	apply(webAndConfig("1", "old") + "---\n" + annotated("StatefulSet", "db") + "---\n" + bareService)
	c.Eventually(2*time.Minute, "the first version is Ready", ready("app=web", 2, version("1")))
	c.Eventually(time.Minute, "the StatefulSet is Ready", ready("app=db", 1, func(p *corev1.Pod) bool { oldDB = string(p.UID); return true }))
	file := filepath.Join(t.TempDir(), "saved")
	c.Run(0, "snapshot", "save", file)

	apply(webAndConfig("2", "new") + "---\n" + lateBarePod)
	c.Run(0, "delete", "pod", "db-0")
	c.Eventually(2*time.Minute, "the second version is Ready", ready("app=web", 2, version("2")))
	c.Eventually(time.Minute, "the StatefulSet's pod is a new one", ready("app=db", 1, func(p *corev1.Pod) bool { return string(p.UID) != oldDB }))
	c.Eventually(time.Minute, "the bare pod is Ready", ready("app=bare", 1, nil))
	c.Eventually(time.Minute, "the new config is mounted, alone", func() error {
		if got := mounted(a); !slices.Equal(got, []string{"new"}) {
			return fmt.Errorf("%v", got)
		}
		return nil
	})
	served := func() error { // by the node that runs the pod
		var svc corev1.Service
		if err := c.Get(0, "/api/v1/namespaces/default/services/bare", &svc); err != nil {
			return err
		}
		got, err := get(fmt.Sprintf("http://127.0.0.1:%d/", svc.Spec.Ports[0].NodePort))
		if err == nil && !strings.HasPrefix(got, "Hello from ") {
			err = fmt.Errorf("%q", got)
		}
		return err
	}
	c.Eventually(time.Minute, "the bare pod is served", served)
	guests, uids := a.HostPIDs(), guestUIDs(a)
	if len(uids) != 4 {
		t.Fatalf("guests: %v", guests)
	}

	later := filepath.Join(t.TempDir(), "later")
	c.Run(0, "snapshot", "save", later)
	c.List[0].Stop(syscall.SIGTERM)
	state := []string{"--state-dir", filepath.Join(c.List[0].Dir, "state")}
	if out, err := c.Warnings(0, append([]string{"snapshot", "restore", file, "--yes"}, state...)...); err != nil || !strings.Contains(out, "dunlin node accept-restore") {
		t.Fatalf("restore: %v: %s", err, out)
	}
	c.List[0].Start()
	held := func() error {
		out, err := c.Try(0, "get", "nodes")
		if err != nil || !strings.Contains(out, "Ready,HeldAfterRestore") {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	}
	c.Eventually(time.Minute, "the node holds", held)
	c.Eventually(time.Minute, "the pods that are held back say so", func() error {
		out, err := c.Try(0, "get", "pods")
		if err != nil || strings.Count(out, "HeldAfterRestore") != 3 {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
	pause(t, 10*time.Second)
	if now := a.HostPIDs(); !maps.Equal(now, guests) {
		t.Fatalf("restored: guests %v, were %v", now, guests)
	}
	for _, cmd := range [][]string{{"describe", "node", "n1"}, {"events"}} {
		out := c.Run(0, cmd...)
		for _, part := range []string{"dunlin node accept-restore n1", "Pod default/bare", "Services lead to them on this node alone, and the API takes none of their service account tokens"} {
			if !strings.Contains(out, part) {
				t.Errorf("%v: no %q: %s", cmd, part, out)
			}
		}
	}
	c.Eventually(20*time.Second, "a Service leads to the pod that is held", served)
	if out, err := a.Command("get", "pods", "--local"); err != nil || strings.Count(out, "HeldAfterRestore") != 7 {
		t.Errorf("on the node: %v: %s", err, out)
	}

	a.Stop(syscall.SIGKILL)
	a.Start()
	c.Eventually(time.Minute, "the node is back", func() error {
		if s, err := a.Status(); err != nil || !s.Connected {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return held()
	})
	pause(t, 10*time.Second)
	if now := a.HostPIDs(); !maps.Equal(now, guests) {
		t.Fatalf("agent restarted: guests %v, were %v", now, guests)
	}
	c.Eventually(20*time.Second, "a Service still leads to the pod that is held", served)
	c.List[0].Stop(syscall.SIGTERM)
	a.Kill()
	a.Start()
	same := func() error {
		if got := guestUIDs(a); !slices.Equal(got, uids) {
			return fmt.Errorf("guests of %v, were of %v", got, uids)
		}
		if got := mounted(a); !slices.Equal(got, []string{"new"}) {
			return fmt.Errorf("config %v", got)
		}
		return nil
	}
	c.Eventually(time.Minute, "the same pods run after a power cut without a server", same)
	c.List[0].Start()
	c.Eventually(time.Minute, "the node is back", held)
	pause(t, 5*time.Second)
	if err := same(); err != nil {
		t.Fatal(err)
	}

	if out := c.Run(0, "node", "accept-restore", "n1"); !strings.Contains(out, "node/n1 accepted") {
		t.Errorf("accept: %s", out)
	}
	if out := c.Run(0, "node", "accept-restore", "n1"); !strings.Contains(out, "already accepted") {
		t.Errorf("accept again: %s", out)
	}
	c.Eventually(time.Minute, "the restored version runs", ready("app=web", 2, version("1")))
	c.Eventually(time.Minute, "the StatefulSet's restored pod runs", ready("app=db", 1, func(p *corev1.Pod) bool { return string(p.UID) == oldDB }))
	c.Eventually(time.Minute, "nothing else runs", func() error {
		if got := guestUIDs(a); len(got) != 3 || !slices.Contains(got, oldDB) {
			return fmt.Errorf("%v", got)
		}
		if got := mounted(a); !slices.Equal(got, []string{"old"}) {
			return fmt.Errorf("config %v", got)
		}
		if held() == nil {
			return fmt.Errorf("still held")
		}
		if served() == nil {
			return fmt.Errorf("still served")
		}
		return nil
	})
	if _, err := c.Try(0, "node", "accept-restore", "--all"); err == nil || !strings.Contains(err.Error(), "nothing to accept") {
		t.Errorf("accept where nothing is held: %v", err)
	}

	// Nor does it follow at once to what was saved after that state.
	guests = a.HostPIDs()
	c.List[0].Stop(syscall.SIGTERM)
	c.Run(0, append([]string{"snapshot", "restore", later, "--yes"}, state...)...)
	c.List[0].Start()
	c.Eventually(time.Minute, "the node holds what it followed", held)
	pause(t, 5*time.Second)
	now := a.HostPIDs() // and the bare pod, which it lists and in whose place nothing runs
	for k, pid := range guests {
		if now[k] != pid {
			t.Errorf("restored to a later state: guests %v, were %v", now, guests)
		}
	}
}
