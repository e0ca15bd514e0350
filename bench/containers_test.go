//go:build bench

package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// boxes are containers that do nothing.
func boxes(n int) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: box}
spec:
  replicas: %d
  selector: {matchLabels: {app: box}}
  template:
    metadata: {labels: {app: box}}
    spec:
      terminationGracePeriodSeconds: 1
      automountServiceAccountToken: false
      containers: [{name: main, image: "busybox:bench", imagePullPolicy: Never, command: [sleep, "100000"]}]
`, n)
}

// monitors are the conmon processes whose containers lie below a folder.
func monitors(t *testing.T, dir string) (pids []int) {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		b, err := os.ReadFile(p)
		if err != nil {
			continue // it ended
		}
		if args := strings.Split(string(b), "\x00"); filepath.Base(args[0]) == "conmon" && strings.Contains(string(b), dir) {
			var pid int
			if _, err := fmt.Sscanf(p, "/proc/%d/", &pid); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

// TestContainersBesideGuests: an agent with 50 containers, then with 50 Wasm
// pods beside them: what it takes for each, how long their start and their end
// take.
func TestContainersBesideGuests(t *testing.T) {
	cluster.NeedContainers(t)
	const n = 50
	c := cluster.NewControlPlane(t)
	a := startAgent(t, c, "n1", nil)
	tar := filepath.Join(t.TempDir(), "busybox.tar")
	if err := os.WriteFile(tar, cluster.Busybox(t, "busybox:bench", nil), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cluster.Binary(t), "import", tar, "--state-dir", filepath.Join(a.dir, "state"), "--run-dir", filepath.Join(a.dir, "run")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	mib := func(pid int) float64 { return float64(pss(t, pid)) / 1024 }
	agent := a.cmd.Process.Pid
	// One first, so that what is made once does not count for fifty.
	ready(t, c, "app=box", boxes(1), 1)
	wait(t, 75*time.Second) // it gives pages back a minute after its start
	before := mib(agent)
	took := ready(t, c, "app=box", boxes(1+n), 1+n)
	row(fmt.Sprintf("%d containers, apply → all Ready", n), "(none)", fmt.Sprintf("%.1f s", took.Seconds()), noTarget, "bare conmon + runc, 4 at a time: 40 in 3.4 s; with the polling of the command line")
	wait(t, 75*time.Second)
	with, conmon := mib(agent), 0.0
	pids := monitors(t, a.dir)
	for _, p := range pids {
		conmon += mib(p)
	}
	each := (with - before) / n
	row("agent's own memory for one more container, beyond conmon, PSS", "≤ 0.5 MiB", fmt.Sprintf("%.2f MiB", each), held(each <= 0.5),
		fmt.Sprintf("agent %.1f MiB with one, %.1f with %d; conmon %.2f MiB each", before, with, 1+n, conmon/float64(max(len(pids), 1))))
	took = ready(t, c, "app=sleep", sleepers(n), n)
	row(fmt.Sprintf("%d Wasm pods beside %d containers, apply → all Ready", n, n), "(none)", fmt.Sprintf("%.1f s", took.Seconds()), noTarget, "with the polling of the command line")
	wait(t, 20*time.Second)
	hosts := 0.0
	files, err := filepath.Glob(filepath.Join(a.dir, "run", "wasm", "*", "host.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		var h struct{ PID int }
		// What follows the record is its checksum.
		if b, err := os.ReadFile(f); err == nil && json.NewDecoder(bytes.NewReader(b)).Decode(&h) == nil && h.PID > 0 {
			hosts += mib(h.PID)
		}
	}
	row(fmt.Sprintf("agent, %d containers and %d Wasm pods, PSS", 1+n, n), "(none)", fmt.Sprintf("agent %.1f MiB, conmon %.1f, Wasm hosts %.1f", mib(agent), conmon, hosts), noTarget, "the containers' own memory apart")
	start := time.Now()
	if out, err := c.Try("delete", "deployment", "box", "sleep", "--cascade=foreground"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	c.Eventually(3*time.Minute, "all pods are gone", func() error {
		if left := len(c.Pods("")); left > 0 {
			return fmt.Errorf("%d pods", left)
		}
		return nil
	})
	row(fmt.Sprintf("delete of %d containers and %d Wasm pods → all gone", 1+n, n), "(none)", fmt.Sprintf("%.1f s", time.Since(start).Seconds()), noTarget, "grace of the containers 1 s, of the modules 30 s, which they need not; bare runc delete: 40 in 4.4 s")
}

// ready applies a manifest and waits until as many pods are Ready.
func ready(t *testing.T, c *cluster.Cluster, selector, manifest string, n int) time.Duration {
	t.Helper()
	start := time.Now()
	c.Apply(manifest)
	c.Eventually(5*time.Minute, "pods are Ready", func() error {
		good := 0
		for _, p := range c.Pods(selector) {
			if cluster.Ready(&p) && p.Status.Phase == corev1.PodRunning {
				good++
			}
		}
		if good != n {
			return fmt.Errorf("%d of %d", good, n)
		}
		return nil
	})
	return time.Since(start)
}
