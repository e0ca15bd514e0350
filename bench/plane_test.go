//go:build bench

package bench

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// statusKB is a line of /proc/PID/status, in KiB.
func statusKB(t testing.TB, pid int, key string) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == key+":" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	t.Fatalf("no %s of process %d", key, pid)
	return 0
}

// TestControlPlaneAtSize connects a fleet of simulated nodes to a real server
// process over the real port, and runs pods on them.
func TestControlPlaneAtSize(t *testing.T) {
	nodes, pods := size("DUNLIN_BENCH_NODES", 5000), size("DUNLIN_BENCH_FLEET_PODS", 100_000)
	const apps = 100
	c := cluster.NewControlPlane(t, "--pod-cidr", "10.128.0.0/9", "--pprof")
	pid := c.Cmd.Process.Pid
	t.Logf("server process %d, folder %s", pid, c.Dir)
	wait(t, 5*time.Second)
	row("server alone, no nodes, idle, PSS", "(none)", fmt.Sprintf("%.1f MiB", float64(pss(t, pid))/1024), noTarget, "Kubernetes control plane 388 PSS, etcd alone 27")
	f := startFleet(t, nodes, strings.TrimSpace(c.Run("token", "create", "--uses", strconv.Itoa(nodes))))

	cpu, start := cpuSeconds(t, pid), time.Now()
	await(t, c, f, "all nodes connected", func(n counts) bool { return n.Connected == int64(nodes) })
	joined := time.Since(start).Seconds()
	row(fmt.Sprintf("%d nodes join with one line and connect, mTLS over loopback", nodes), "(none)",
		fmt.Sprintf("%.0f nodes/s, %.1f ms CPU a node", float64(nodes)/joined, 1000*(cpuSeconds(t, pid)-cpu)/float64(nodes)), noTarget, "two TLS handshakes, two signatures and three commits each")
	wait(t, 10*time.Second)
	row(fmt.Sprintf("control plane, %d nodes connected, no pods, RSS", nodes), "(none)", fmt.Sprintf("%.0f MiB", float64(statusKB(t, pid, "VmRSS"))/1024), noTarget, "Kubernetes with 1,000 fake nodes 625")

	cpu, start = cpuSeconds(t, pid), time.Now()
	var slowest time.Duration
	for i := range apps {
		at := time.Now()
		c.Apply(fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: app-%d, labels: {app: app-%d}}
spec:
  replicas: %d
  selector: {matchLabels: {app: app-%d}}
  template:
    metadata: {labels: {app: app-%d}, annotations: {dunlin.dev/placement: spread}}
    spec:
      runtimeClassName: wasm
      containers: [{name: main, image: app-%d.wasm, resources: {requests: {cpu: 50m, memory: 32Mi}}}]
`, i, i, pods/apps, i, i, i))
		slowest = max(slowest, time.Since(at))
	}
	t.Logf("all applied after %s, the slowest took %s", time.Since(start).Round(time.Second), slowest.Round(time.Millisecond))
	await(t, c, f, "all pods running", func(n counts) bool { return n.Running == int64(pods) })
	took := time.Since(start).Seconds()
	row(fmt.Sprintf("%d Deployments of %d replicas on %d nodes: apply → all reported running", apps, pods/apps, nodes), "(none)",
		fmt.Sprintf("%.0f pods/s, %.2f ms CPU a pod", float64(pods)/took, 1000*(cpuSeconds(t, pid)-cpu)/float64(pods)), noTarget, "the simulated nodes share the cores; Kubernetes, all on: 123/s bound at 1,000 nodes")
	peak := statusKB(t, pid, "VmHWM")
	wait(t, idleFor())
	cpu, start = cpuSeconds(t, pid), time.Now()
	before := f.counts()
	wait(t, max(idleFor(), time.Minute))
	after, minutes := f.counts(), time.Since(start).Minutes()
	rss := statusKB(t, pid, "VmRSS")
	row(fmt.Sprintf("control plane, %d nodes connected, %d pods, RSS (alone in its process)", nodes, pods), "≤ 1 GiB",
		fmt.Sprintf("%.0f MiB RSS, %.0f PSS", float64(rss)/1024, float64(pss(t, pid))/1024), held(rss <= 1<<20), fmt.Sprintf("highest while they were made: %d MiB; kube-apiserver alone with 5,000 pods 750 to 1,290 MB", peak/1024))
	row("the same, idle: CPU", "(none)", fmt.Sprintf("%.1f CPU-seconds a minute", (cpuSeconds(t, pid)-cpu)/minutes), noTarget,
		fmt.Sprintf("%.0f leases/s, %d late, slowest %d ms, %d connections lost", float64(after.Leases-before.Leases)/minutes/60, after.Late-before.Late, after.SlowestMS, after.Lost-before.Lost))
	lists(t, c, f, nodes, pods)
	back(t, c, f, nodes, pods)
	after = f.counts()
	if after.Connected != int64(nodes) || after.Running != int64(pods) {
		t.Errorf("at the end: %+v", after)
	}
}

// back kills the server: all nodes lose it in the same moment, connect again as
// soon as it is there, and ask for what they have (a relist storm of nodes).
func back(t *testing.T, c *cluster.Cluster, f *fleet, nodes, pods int) {
	t.Helper()
	lost := f.counts().Lost
	c.Kill()
	await(t, c, f, "all nodes have noticed", func(n counts) bool { return n.Lost-lost >= int64(nodes) })
	start := time.Now()
	c.Start()
	answers, pid := time.Since(start), c.Cmd.Process.Pid
	await(t, c, f, "all nodes are back", func(n counts) bool { return n.Connected == int64(nodes) && n.Running == int64(pods) })
	took := time.Since(start)
	wait(t, 10*time.Second)
	row(fmt.Sprintf("server killed with %d nodes, %d pods: all nodes are back", nodes, pods), "(none)",
		fmt.Sprintf("%.1f s, the API after %.1f s", took.Seconds(), answers.Seconds()), noTarget,
		fmt.Sprintf("%.1f CPU-seconds, highest %d MiB; nodes wait up to 28 s between two attempts", cpuSeconds(t, pid), statusKB(t, pid, "VmHWM")/1024))
}

// await prints progress until ok.
func await(t *testing.T, c *cluster.Cluster, f *fleet, what string, ok func(counts) bool) {
	t.Helper()
	start, said := time.Now(), time.Now()
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for n := f.counts(); !ok(n); n = f.counts() {
		if time.Since(said) > 10*time.Second && c.Cmd.ProcessState == nil {
			said = time.Now()
			t.Logf("%s, after %s: %+v, server %d MiB", what, time.Since(start).Round(time.Second), n, statusKB(t, c.Cmd.Process.Pid, "VmRSS")/1024)
		}
		if time.Since(start) > 30*time.Minute || t.Context().Err() != nil {
			t.Fatalf("%s: not within %s: %+v", what, time.Since(start).Round(time.Second), n)
		}
		<-tick.C
	}
}
