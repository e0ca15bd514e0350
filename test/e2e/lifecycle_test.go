//go:build e2e

// Package e2e tests real processes: the built binaries, real guests, real
// signals, real sockets. Run it with 'make e2e'.
package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
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
        readinessProbe: {httpGet: {path: /, port: %s}, periodSeconds: 1}
`, replicas, version, map[bool]string{true: "http", false: "9"}[version != "2"])
}

func loops(short int) int {
	if n, err := strconv.Atoi(os.Getenv("DUNLIN_E2E_LOOPS")); err == nil && n > 0 {
		return n
	}
	return short
}

func TestHelloAnswersAndABadVersionStalls(t *testing.T) {
	c := cluster.New(t)
	c.Import("hello.wasm", filepath.Join(cluster.Root(t), "bin", "examples", "hello.wasm"))
	c.Apply(hello("1", 2))
	pods := c.WaitReady("app=hello", 2)
	for i := range pods {
		got, err := cluster.HTTPGet(cluster.URL(&pods[i], 8080))
		if err != nil || !strings.Contains(got, "version 1") {
			t.Fatalf("%q, %v", got, err)
		}
	}
	if out := c.Run("logs", pods[0].Name, "--tail", "1"); out == "" {
		t.Fatal("no log")
	}
	// A version whose readiness probe can never succeed stalls; the old pods
	// serve on.
	c.Apply(hello("2", 2))
	out, err := c.Try("rollout", "status", "deploy/hello", "--timeout", "60s")
	if err == nil || !strings.Contains(err.Error(), "progress deadline") {
		t.Fatalf("a version that never becomes ready: %q, %v", out, err)
	}
	serving := 0
	for _, p := range c.Pods("app=hello") {
		if cluster.Ready(&p) {
			got, err := cluster.HTTPGet(cluster.URL(&p, 8080))
			if err != nil || !strings.Contains(got, "version 1") {
				t.Fatalf("%q, %v", got, err)
			}
			serving++
		}
	}
	if serving < 2 {
		t.Fatalf("%d old pods serve, want 2", serving)
	}
	c.Run("rollout", "undo", "deploy/hello")
	c.Run("rollout", "status", "deploy/hello", "--timeout", "60s")
	c.WaitReady("app=hello", 2)
	c.Run("delete", "deploy", "hello", "--timeout", "60s")
	c.Eventually(60*time.Second, "all guests have ended", func() error {
		if n := len(c.HostPIDs()); n != 0 {
			return fmt.Errorf("%d guests run", n)
		}
		return nil
	})
}

func TestKilledServerAdoptsItsGuests(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	const n = 20
	c.Apply(deployment("many", "sleep.wasm", n, ""))
	c.WaitReady("app=many", n)
	before := c.HostPIDs()
	if len(before) != n {
		t.Fatalf("%d guests, want %d", len(before), n)
	}
	for i := range loops(5) {
		c.Kill()
		if now := c.HostPIDs(); !maps.Equal(before, now) {
			t.Fatalf("round %d: guests died with the server: %v, were %v", i, now, before)
		}
		c.Start()
		pods := c.WaitReady("app=many", n)
		for _, p := range pods {
			for _, s := range p.Status.ContainerStatuses {
				if s.RestartCount != 0 {
					t.Fatalf("round %d: pod %s counts %d restarts", i, p.Name, s.RestartCount)
				}
			}
		}
		if now := c.HostPIDs(); !maps.Equal(before, now) {
			t.Fatalf("round %d: other guests: %v, were %v", i, now, before)
		}
	}
}

func TestOfflineBootRunsWhatIsKnown(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Apply(deployment("known", "sleep.wasm", 3, ""))
	c.WaitReady("app=known", 3)
	// The machine loses power: the server and all guests are gone, and so is
	// what was in the run-time folder.
	c.Kill()
	for _, pid := range c.HostPIDs() {
		killPID(t, pid)
	}
	if err := os.RemoveAll(filepath.Join(c.Dir, "run")); err != nil {
		t.Fatal(err)
	}
	// The agent alone boots; no server can be reached.
	agent := startAgentOnly(t, c)
	defer agent()
	waitGuests(t, c, 3)
}

func TestDeleteEndsAGuestThatIgnoresIt(t *testing.T) {
	c := cluster.New(t)
	c.Import("loop.wasm", cluster.Module(t, "loop"))
	c.Apply(`apiVersion: v1
kind: Pod
metadata: {name: stubborn, labels: {app: stubborn}}
spec:
  runtimeClassName: wasm
  terminationGracePeriodSeconds: 1
  containers: [{name: main, image: loop.wasm, resources: {limits: {cpu: 200m}}}]
`)
	c.WaitReady("app=stubborn", 1)
	c.Run("delete", "pod", "stubborn", "--timeout", "30s")
	if n := len(c.HostPIDs()); n != 0 {
		t.Fatalf("%d guests are left", n)
	}
}

func TestIdleClusterWritesNothing(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Apply(deployment("idle", "sleep.wasm", 10, ""))
	c.WaitReady("app=idle", 10)
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
	state := filepath.Join(c.Dir, "state")
	before, cpu := snapshot(t, state), cpuSeconds(t, c.Cmd.Process.Pid)
	<-time.After(length)
	after := snapshot(t, state)
	used := cpuSeconds(t, c.Cmd.Process.Pid) - cpu
	t.Logf("idle for %s with 10 pods: CPU %.2f %% of a core, PSS %d KiB", length, 100*used/length.Seconds(), pss(t, c.Cmd.Process.Pid))
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
	c := cluster.New(t)
	for _, m := range []string{"sleep", "loop", "recurse", "grow", "table", "flood", "trap", "fail"} {
		c.Import(m+".wasm", cluster.Module(t, m))
	}
	c.Apply(deployment("healthy", "sleep.wasm", 1, ""))
	c.WaitReady("app=healthy", 1)
	before := c.HostPIDs()
	limits := ", resources: {requests: {cpu: 1m}, limits: {memory: 64Mi, cpu: 300m}}"
	for _, m := range []string{"loop", "recurse", "grow", "table", "flood", "trap", "fail"} {
		c.Apply(deployment(m, m+".wasm", 1, limits))
	}
	small := []string{"16Mi", "96Mi", "128Mi"}
	for _, limit := range small {
		c.Apply(deployment("recurse-"+strings.ToLower(limit), "recurse.wasm", 1, strings.Replace(limits, "64Mi", limit, 1)))
	}
	// Where a guest ends, its status says why.
	for m, want := range map[string]string{
		"recurse": "stack overflow: its calls nest deeper than its stack of", "grow": "memory limit of 64Mi", "table": "memory",
		"trap": "out of bounds memory access in read_sample <- handle_request <- _start", "fail": "no such thing!",
	} {
		says := regexp.MustCompile(want)
		c.Eventually(60*time.Second, m+" says why it ended", func() error {
			for _, p := range c.Pods("app=" + m) {
				for _, s := range p.Status.ContainerStatuses {
					if e := ended(s); e != nil && e.ExitCode != 0 && says.MatchString(e.Message) {
						return nil
					}
				}
			}
			return fmt.Errorf("%v", statuses(c.Pods("app="+m)))
		})
	}
	// Endless recursion meets the end of its stack before its memory limit.
	for _, m := range append([]string{"recurse"}, small...) {
		if m != "recurse" {
			m = "recurse-" + strings.ToLower(m)
		}
		c.Eventually(60*time.Second, m+" traps", func() error {
			for _, s := range statuses(c.Pods("app=" + m)) {
				if e := ended(s); e != nil && (e.Reason != "Trap" || e.ExitCode != 134) {
					t.Errorf("%s ended by %s, %d: %s", m, e.Reason, e.ExitCode, e.Message)
					return nil
				} else if e != nil {
					return nil
				}
			}
			return fmt.Errorf("%v", statuses(c.Pods("app="+m)))
		})
	}
	// The loop has its share of the processor and no more; it runs on.
	if p := c.Pods("app=loop"); len(p) != 1 || p[0].Status.ContainerStatuses[0].State.Running == nil {
		t.Errorf("the loop: %v", statuses(p))
	}
	// 10 MB without a newline: kept, in pieces, and bounded.
	if log := c.Run("logs", "deploy/flood"); len(log) < 1<<20 || len(log) > 11<<20 {
		t.Errorf("the log of 10 MB without a newline has %d bytes", len(log))
	}
	now := c.HostPIDs()
	for k, pid := range before {
		if now[k] != pid {
			t.Errorf("the healthy guest %s was disturbed", k)
		}
	}
	if p := c.WaitReady("app=healthy", 1); p[0].Status.ContainerStatuses[0].RestartCount != 0 {
		t.Error("the healthy guest was restarted")
	}
	if c.Cmd.ProcessState != nil {
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
