//go:build bench

package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// row prints one line of the table; run.sh collects them.
func row(what, target, figure, note string) {
	fmt.Printf("BUDGET|%s|%s|%s|%s\n", what, target, figure, note) //nolint:forbidigo // the table is the output
}

func idleFor() time.Duration {
	if d, err := time.ParseDuration(os.Getenv("DUNLIN_BENCH_IDLE")); err == nil {
		return d
	}
	return 30 * time.Second
}

func wait(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

func pss(t testing.TB, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "Pss:" {
			n, _ := strconv.Atoi(f[1])
			return n
		}
	}
	return 0
}

func cpuSeconds(t testing.TB, pid int) float64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	u, _ := strconv.ParseFloat(f[11], 64)
	s, _ := strconv.ParseFloat(f[12], 64)
	return (u + s) / 100
}

func sleepers(n int) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: sleep}
spec:
  replicas: %d
  selector: {matchLabels: {app: sleep}}
  template:
    metadata: {labels: {app: sleep}}
    spec:
      runtimeClassName: wasm
      automountServiceAccountToken: false
      containers: [{name: main, image: sleep.wasm}]
`, n)
}

func TestServerAndAgentInOneProcess(t *testing.T) {
	c := cluster.New(t)
	wait(t, 20*time.Second)
	pid := c.Cmd.Process.Pid
	row("server and agent in one process, idle, PSS", "≤ 40 MiB", fmt.Sprintf("%.1f MiB", float64(pss(t, pid))/1024), "Nomad -dev 92 RSS, Kubernetes control plane 552 RSS")
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Apply(sleepers(100))
	c.WaitReady("app=sleep", 100)
	before := c.HostPIDs()
	total := 0
	for _, p := range before {
		total += pss(t, p)
	}
	row("one more idle Wasm pod, marginal PSS (100 of them)", "≤ 2.5 MiB", fmt.Sprintf("%.2f MiB", float64(total)/100/1024), "Nomad raw_exec 28.6 MiB a task")
	wait(t, 15*time.Second)
	state := filepath.Join(c.Dir, "state")
	b0, cpu := bytesBelow(t, state), cpuSeconds(t, pid)
	wait(t, idleFor())
	row("disk writes, idle, 100 pods", "0 bytes/hour", fmt.Sprintf("%d files changed in %s", changed(b0, bytesBelow(t, state)), idleFor()), "")
	row("idle CPU, server and agent, 100 pods", "≤ 0.5 % (agent)", fmt.Sprintf("%.2f %%", 100*(cpuSeconds(t, pid)-cpu)/idleFor().Seconds()), "of one core")
	c.Kill()
	start := time.Now()
	c.Start()
	c.WaitReady("app=sleep", 100)
	took := time.Since(start)
	restarts := 0
	for _, p := range c.Pods("app=sleep") {
		for _, s := range p.Status.ContainerStatuses {
			restarts += int(s.RestartCount)
		}
	}
	same := 0
	for k, pid := range c.HostPIDs() {
		if before[k] == pid {
			same++
		}
	}
	row("kill -9 and start with 100 pods", "0 restarts, ≤ 1 s", fmt.Sprintf("%d restarts, %d same guests, %.1f s", restarts, same, took.Seconds()), "with the polling of the command line")
}

func bytesBelow(t *testing.T, dir string) map[string]time.Time {
	t.Helper()
	out := map[string]time.Time{}
	err := filepath.Walk(dir, func(p string, info os.FileInfo, err error) error {
		if err == nil && info.Mode().IsRegular() {
			out[p] = info.ModTime()
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func changed(a, b map[string]time.Time) int {
	n := 0
	for p, m := range b {
		if !a[p].Equal(m) {
			n++
		}
	}
	return n
}

// site is a network namespace with a veth pair to the host's.
type site struct {
	name, link, host string
}

func newSite(t *testing.T, i int) site {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root for network namespaces")
	}
	s := site{name: fmt.Sprintf("dnb%d", rand.IntN(1e5)), host: fmt.Sprintf("10.231.%d.1", i)}
	s.link = s.name + "v"
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	run("netns", "add", s.name)
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", s.name).Run() })
	run("link", "add", s.link, "type", "veth", "peer", "name", "eth0", "netns", s.name)
	run("addr", "add", s.host+"/24", "dev", s.link)
	run("link", "set", s.link, "up")
	run("-n", s.name, "addr", "add", fmt.Sprintf("10.231.%d.2/24", i), "dev", "eth0")
	run("-n", s.name, "link", "set", "eth0", "up")
	run("-n", s.name, "link", "set", "lo", "up")
	return s
}

// counters of the host's end: bytes and packets, both ways.
func (s site) counters(t *testing.T) (bytes, packets int64) {
	t.Helper()
	for _, f := range []string{"rx", "tx"} {
		for _, k := range []string{"bytes", "packets"} {
			b, err := os.ReadFile(fmt.Sprintf("/sys/class/net/%s/statistics/%s_%s", s.link, f, k))
			if err != nil {
				t.Fatal(err)
			}
			n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
			if k == "bytes" {
				bytes += n
			} else {
				packets += n
			}
		}
	}
	return bytes, packets
}

type agent struct {
	dir   string
	netns string
	cmd   *exec.Cmd
}

func startAgent(t *testing.T, c *cluster.Cluster, name string, in *site) *agent {
	t.Helper()
	a := &agent{dir: t.TempDir(), netns: fmt.Sprintf("dna%d", rand.IntN(1e5))}
	if err := os.Chmod(a.dir, 0o711); err != nil {
		t.Fatal(err)
	}
	dirs := []string{"--state-dir", filepath.Join(a.dir, "state"), "--run-dir", filepath.Join(a.dir, "run"), "--config-dir", filepath.Join(a.dir, "config"), "--netns", a.netns}
	if out, err := exec.Command(cluster.Binary(t), append([]string{"import", "sleep.wasm", cluster.Module(t, "sleep")}, dirs[:4]...)...).CombinedOutput(); err != nil {
		t.Fatalf("import: %v: %s", err, out)
	}
	args := append([]string{cluster.Binary(t), "agent", "--node-name", name, "--gossip-port", "0", "--join", strings.TrimSpace(c.Run("token", "create"))}, dirs...)
	if in != nil {
		args = append([]string{"ip", "netns", "exec", in.name}, args...)
	}
	a.cmd = exec.Command(args[0], args[1:]...)
	log, err := os.Create(filepath.Join(a.dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	a.cmd.Stdout, a.cmd.Stderr = log, log
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = a.cmd.Process.Signal(syscall.SIGTERM)
		_ = a.cmd.Wait()
		_ = log.Close()
		sweep := append([]string{cluster.Binary(t), "server", "sweep"}, dirs...)
		if in != nil {
			sweep = append([]string{"ip", "netns", "exec", in.name}, sweep...)
		}
		_ = exec.Command(sweep[0], sweep[1:]...).Run()
	})
	c.Eventually(time.Minute, name+" is Ready", func() error {
		var n corev1.Node
		if err := c.Get("node/"+name, &n); err != nil {
			return err
		}
		for _, cond := range n.Status.Conditions {
			if cond.Type == corev1.NodeReady && cond.Status == corev1.ConditionTrue {
				return nil
			}
		}
		b, _ := os.ReadFile(filepath.Join(a.dir, "log"))
		return fmt.Errorf("not Ready: %s", b)
	})
	return a
}

func (a *agent) status(t *testing.T) (out struct {
	BytesIn, BytesOut uint64
	Gossip            struct {
		Members     []string
		LeasesByUDP uint64
	}
}) {
	t.Helper()
	cl := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(a.dir, "run", "agent.sock"))
	}}}
	resp, err := cl.Get("http://agent/status")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestAgentAlone(t *testing.T) {
	s := newSite(t, 1)
	c := cluster.New(t, "--node-address", s.host, "--listen", s.host+":"+strconv.Itoa(20000+rand.IntN(9999)))
	a := startAgent(t, c, "far", &s)
	wait(t, 20*time.Second)
	row("agent idle, PSS", "≤ 24 MiB", fmt.Sprintf("%.1f MiB", float64(pss(t, a.cmd.Process.Pid))/1024), "k3s agent 268 MB on a Pi 4")
	b0, p0 := s.counters(t)
	cpu := cpuSeconds(t, a.cmd.Process.Pid)
	wait(t, idleFor())
	b1, p1 := s.counters(t)
	d := idleFor().Seconds()
	row("idle CPU, agent", "≤ 0.5 %", fmt.Sprintf("%.2f %%", 100*(cpuSeconds(t, a.cmd.Process.Pid)-cpu)/d), "of one core")
	// The interface counts Ethernet's 14 bytes a packet too.
	g := a.status(t).Gossip
	row("idle node ↔ server on the wire, IP and TLS headers counted", "≤ 200 bytes/s", fmt.Sprintf("%.0f bytes/s", float64(b1-b0-14*(p1-p0))/d), fmt.Sprintf("%.1f packets/s, %d gossip members, %d leases by UDP so far", float64(p1-p0)/d, len(g.Members), g.LeasesByUDP))
}

// TestNodeKilled cuts one of three nodes off hard: its agent and its guests
// are killed, and its pods must run elsewhere.
func TestNodeKilled(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	victim := startAgent(t, c, "victim", nil)
	startAgent(t, c, "other", nil)
	c.Apply(strings.Replace(sleepers(6), "      runtimeClassName: wasm\n", "      runtimeClassName: wasm\n      nodeSelector: {kubernetes.io/os: linux}\n", 1))
	c.WaitReady("app=sleep", 6)
	var moved []string
	for _, p := range c.Pods("app=sleep") {
		if p.Spec.NodeName == "victim" {
			moved = append(moved, p.Name)
		}
	}
	if len(moved) == 0 {
		c.Apply(strings.Replace(sleepers(6), "{app: sleep}}\n    spec:", "{app: sleep}, annotations: {dunlin.dev/placement: spread}}\n    spec:", 1))
		c.Run("rollout", "status", "deploy/sleep", "--timeout", "60s")
	}
	start := time.Now()
	_ = victim.cmd.Process.Kill()
	_ = victim.cmd.Wait()
	c.Eventually(2*time.Minute, "six Ready pods elsewhere", func() error {
		good := 0
		for _, p := range c.Pods("app=sleep") {
			if p.Spec.NodeName != "victim" && cluster.Ready(&p) {
				good++
			}
		}
		if good < 6 {
			return fmt.Errorf("%d", good)
		}
		return nil
	})
	row("node killed → its pods running elsewhere", "≤ 10 s", fmt.Sprintf("%.1f s", time.Since(start).Seconds()), fmt.Sprintf("%d pods moved", len(moved)))
}

func TestStartToFirstLine(t *testing.T) {
	var all []time.Duration
	c := cluster.New(t)
	c.Import("print.wasm", cluster.Module(t, "print"))
	for i := range 5 {
		name := fmt.Sprintf("p%d", i)
		start := time.Now()
		c.Apply(fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec:\n  runtimeClassName: wasm\n  restartPolicy: Never\n  containers: [{name: c, image: print.wasm}]\n", name))
		c.Eventually(30*time.Second, "first line", func() error {
			out, err := c.Try("logs", name)
			if err == nil && out == "" {
				err = fmt.Errorf("no line yet")
			}
			return err
		})
		all = append(all, time.Since(start))
	}
	slices.Sort(all)
	row("apply → first log line read back, both by the command line", "(none)", fmt.Sprintf("p50 %d ms", all[2].Milliseconds()), "Nomad raw_exec submit → running 304 ms, docker run 107 ms")
}
