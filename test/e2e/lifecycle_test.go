//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// deployment of small modules that only sleep.
func deployment(name, image string, replicas int, extra string) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: %[1]s}
spec:
  replicas: %[3]d
  selector: {matchLabels: {app: %[1]s}}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      runtimeClassName: wasm
      automountServiceAccountToken: false
      containers:
      - {name: main, image: %[2]s%[4]s}
`, name, image, replicas, extra)
}

func hello(version string, replicas int) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: hello}
spec:
  replicas: %d
  selector: {matchLabels: {app: hello}}
  progressDeadlineSeconds: 10
  template:
    metadata: {labels: {app: hello}}
    spec:
      runtimeClassName: wasm
      containers:
      - name: main
        image: hello.wasm
        env: [{name: VERSION, value: %q}]
        ports: [{containerPort: 8080, name: http}]
        readinessProbe: {httpGet: {path: /%s, port: http}, periodSeconds: 1}
`, replicas, version, map[bool]string{true: "", false: "healthz"}[version != "bad"])
}

func loops(short int) int {
	if n, err := strconv.Atoi(os.Getenv("DUNLIN_E2E_LOOPS")); err == nil && n > 0 {
		return n
	}
	return short
}

func TestHelloAnswersAndABadVersionStalls(t *testing.T) {
	c := newCluster(t)
	c.importModule("hello.wasm", filepath.Join(root, "bin", "examples", "hello.wasm"))
	c.apply(hello("1", 2))
	pods := c.waitReady("app=hello", 2)
	for i := range pods {
		got, err := httpGet(url(&pods[i], 8080))
		if err != nil || !strings.Contains(got, "version 1") {
			t.Fatalf("%q, %v", got, err)
		}
	}
	if out := c.run("logs", pods[0].Name, "--tail", "1"); out == "" {
		t.Fatal("no log")
	}
	// A version whose readiness probe can never succeed stalls; the old pods
	// serve on.
	bad := strings.Replace(hello("2", 2), "httpGet: {path: /,", "httpGet: {path: /, httpHeaders: [{name: x, value: y}],", 1)
	bad = strings.Replace(bad, "port: http}, periodSeconds", "port: 9}, periodSeconds", 1)
	c.apply(bad)
	out, err := c.try("rollout", "status", "deploy/hello", "--timeout", "60s")
	if err == nil || !strings.Contains(err.Error(), "progress deadline") {
		t.Fatalf("a version that never becomes ready: %q, %v", out, err)
	}
	serving := 0
	for _, p := range c.pods("app=hello") {
		if ready(&p) {
			got, err := httpGet(url(&p, 8080))
			if err != nil || !strings.Contains(got, "version 1") {
				t.Fatalf("%q, %v", got, err)
			}
			serving++
		}
	}
	if serving < 2 {
		t.Fatalf("%d old pods serve, want 2", serving)
	}
	c.run("rollout", "undo", "deploy/hello")
	c.run("rollout", "status", "deploy/hello", "--timeout", "60s")
	c.waitReady("app=hello", 2)
	c.run("delete", "deploy", "hello", "--timeout", "60s")
	c.eventually(60*time.Second, "all guests have ended", func() error {
		if n := len(c.hostPIDs()); n != 0 {
			return fmt.Errorf("%d guests run", n)
		}
		return nil
	})
}

func TestKilledServerAdoptsItsGuests(t *testing.T) {
	c := newCluster(t)
	c.importModule("sleep.wasm", module("sleep"))
	const n = 20
	c.apply(deployment("many", "sleep.wasm", n, ""))
	c.waitReady("app=many", n)
	before := c.hostPIDs()
	if len(before) != n {
		t.Fatalf("%d guests, want %d", len(before), n)
	}
	for i := range loops(5) {
		c.kill()
		if now := c.hostPIDs(); !maps.Equal(before, now) {
			t.Fatalf("round %d: guests died with the server: %v, were %v", i, now, before)
		}
		c.start()
		pods := c.waitReady("app=many", n)
		for _, p := range pods {
			for _, s := range p.Status.ContainerStatuses {
				if s.RestartCount != 0 {
					t.Fatalf("round %d: pod %s counts %d restarts", i, p.Name, s.RestartCount)
				}
			}
		}
		if now := c.hostPIDs(); !maps.Equal(before, now) {
			t.Fatalf("round %d: other guests: %v, were %v", i, now, before)
		}
	}
}

func TestOfflineBootRunsWhatIsKnown(t *testing.T) {
	c := newCluster(t)
	c.importModule("sleep.wasm", module("sleep"))
	c.apply(deployment("known", "sleep.wasm", 3, ""))
	c.waitReady("app=known", 3)
	// The machine loses power: the server and all guests are gone, and so is
	// what was in the run-time folder.
	c.kill()
	for _, pid := range c.hostPIDs() {
		killPID(t, pid)
	}
	if err := os.RemoveAll(filepath.Join(c.dir, "run")); err != nil {
		t.Fatal(err)
	}
	// The agent alone boots; no server can be reached.
	agent := c.startAgentOnly()
	defer agent()
	c.waitGuests(3)
}

func TestDeleteEndsAGuestThatIgnoresIt(t *testing.T) {
	c := newCluster(t)
	c.importModule("loop.wasm", module("loop"))
	c.apply(`apiVersion: v1
kind: Pod
metadata: {name: stubborn, labels: {app: stubborn}}
spec:
  runtimeClassName: wasm
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: loop.wasm, resources: {limits: {cpu: 200m}}}]
`)
	c.waitReady("app=stubborn", 1)
	c.run("delete", "pod", "stubborn", "--timeout", "30s")
	if n := len(c.hostPIDs()); n != 0 {
		t.Fatalf("%d guests are left", n)
	}
}

func TestIdleClusterWritesNothing(t *testing.T) {
	c := newCluster(t)
	c.importModule("sleep.wasm", module("sleep"))
	c.apply(deployment("idle", "sleep.wasm", 10, ""))
	c.waitReady("app=idle", 10)
	length := 60 * time.Second
	if s := os.Getenv("DUNLIN_E2E_IDLE"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatal(err)
		}
		length = d
	}
	settle := time.NewTimer(15 * time.Second)
	<-settle.C
	state := filepath.Join(c.dir, "state")
	before, cpu := snapshot(t, state), cpuSeconds(t, c.cmd.Process.Pid)
	<-time.After(length)
	after := snapshot(t, state)
	used := cpuSeconds(t, c.cmd.Process.Pid) - cpu
	t.Logf("idle for %s with 10 pods: CPU %.2f %% of a core, PSS %d KiB", length, 100*used/length.Seconds(), pss(t, c.cmd.Process.Pid))
	for f, v := range after {
		if before[f] != v {
			t.Errorf("%s was written while idle: %s, was %s", f, v, before[f])
		}
	}
	for f := range before {
		if _, ok := after[f]; !ok {
			t.Errorf("%s was removed while idle", f)
		}
	}
}

func TestRestartsAndReasonsOfGuests(t *testing.T) {
	c := newCluster(t)
	for _, m := range []string{"sleep", "loop", "recurse", "grow", "table", "flood", "trap", "fail"} {
		c.importModule(m+".wasm", module(m))
	}
	c.apply(deployment("healthy", "sleep.wasm", 1, ""))
	c.waitReady("app=healthy", 1)
	before := c.hostPIDs()
	limits := ", resources: {limits: {memory: 64Mi, cpu: 300m}}"
	for _, m := range []string{"loop", "recurse", "grow", "table", "flood", "trap", "fail"} {
		c.apply(deployment(m, m+".wasm", 1, limits))
	}
	for m, want := range map[string]string{"recurse": "stack", "trap": "unreachable", "fail": ""} {
		c.eventually(60*time.Second, m+" says why it ended", func() error {
			for _, p := range c.pods("app=" + m) {
				for _, s := range p.Status.ContainerStatuses {
					if e := ended(s); e != nil && e.ExitCode != 0 && strings.Contains(e.Message, want) {
						return nil
					}
				}
			}
			return fmt.Errorf("%v", statuses(c.pods("app="+m)))
		})
	}
	now := c.hostPIDs()
	for k, pid := range before {
		if now[k] != pid {
			t.Errorf("the healthy guest %s was disturbed", k)
		}
	}
	if p := c.waitReady("app=healthy", 1); p[0].Status.ContainerStatuses[0].RestartCount != 0 {
		t.Error("the healthy guest was restarted")
	}
	if c.cmd.ProcessState != nil {
		t.Fatal("the server died")
	}
}

func ended(s corev1.ContainerStatus) *corev1.ContainerStateTerminated {
	if s.State.Terminated != nil {
		return s.State.Terminated
	}
	return s.LastTerminationState.Terminated
}

func statuses(pods []corev1.Pod) []corev1.ContainerStatus {
	var out []corev1.ContainerStatus
	for _, p := range pods {
		out = append(out, p.Status.ContainerStatuses...)
	}
	return out
}
