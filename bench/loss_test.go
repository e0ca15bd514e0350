//go:build bench

package bench

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// starve puts a process into a control group with a 50th of a core, which it
// shares with a program that always wants to run.
func starve(t *testing.T, pid int) {
	t.Helper()
	root, quota, value := "/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "2000"
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		root, quota, value = "/sys/fs/cgroup", "cpu.max", "2000 100000"
	}
	dir := filepath.Join(root, fmt.Sprintf("dunlinbench%d", pid))
	hog := exec.Command("sh", "-c", "while :; do :; done")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := hog.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = hog.Process.Kill()
		_ = hog.Wait()
		_ = os.WriteFile(filepath.Join(root, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	for _, w := range [][2]string{{quota, value}, {"cgroup.procs", strconv.Itoa(pid)}, {"cgroup.procs", strconv.Itoa(hog.Process.Pid)}} {
		if err := os.WriteFile(filepath.Join(dir, w[0]), []byte(w[1]), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// lossy is a site whose links lose packets.
type lossy struct {
	*cluster.Cluster
	machines []*cluster.Machine
	agents   []*cluster.Agent
}

func newLossy(t *testing.T, n int) *lossy {
	t.Helper()
	s := cluster.NewSite(t)
	l := &lossy{Cluster: cluster.New(t, "--node-address", s.Host(), "--listen", s.Host()+":"+strconv.Itoa(20000+rand.IntN(9999)))}
	l.Import("sleep.wasm", cluster.Module(t, "sleep"))
	for i := range n {
		m := s.NewMachine()
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), m)
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		a.Start("--join", strings.TrimSpace(l.Run("token", "create")))
		l.machines, l.agents = append(l.machines, m), append(l.agents, a)
	}
	for _, a := range l.agents {
		l.Eventually(time.Minute, a.Name+" is Ready", func() error { return l.NodeReady(a.Name) })
	}
	return l
}

// places are the pods' nodes by uid; a container that was started again is
// another entry.
func (l *lossy) places() map[string]string {
	out := map[string]string{}
	for _, p := range l.Pods("app=sleep") {
		restarts := int32(0)
		for _, s := range p.Status.ContainerStatuses {
			restarts += s.RestartCount
		}
		out[fmt.Sprintf("%s/%d", p.UID, restarts)] = p.Spec.NodeName
	}
	return out
}

// unready lists the nodes that the control plane does not hold for Ready.
func (l *lossy) unready(t *testing.T) (out []string) {
	t.Helper()
	var list corev1.NodeList
	if err := l.Get("nodes", &list); err != nil {
		t.Fatal(err)
	}
	for _, n := range list.Items {
		ok := false
		for _, c := range n.Status.Conditions {
			ok = ok || (c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue)
		}
		if !ok {
			out = append(out, n.Name)
		}
	}
	return out
}

// reconnects counts the connections of all agents after their first.
func (l *lossy) reconnects(t *testing.T) int {
	t.Helper()
	n := 0
	for _, a := range l.agents {
		b, err := os.ReadFile(filepath.Join(a.Dir, "log"))
		if err != nil {
			t.Fatal(err)
		}
		n += strings.Count(string(b), "connected to the control plane") - strings.Count(string(b), "not connected to the control plane") - 1
	}
	return n
}

// TestFalseMoves loses 5 % of all packets, both ways, on every node's link
// and starves one agent of CPU: no pod may move or start again.
// DUNLIN_BENCH_LOSS=30m is the budget's own length.
func TestFalseMoves(t *testing.T) {
	const percent, nodes, pods = 5, 3, 9
	length := 2 * time.Minute
	if d, err := time.ParseDuration(os.Getenv("DUNLIN_BENCH_LOSS")); err == nil {
		length = d
	}
	l := newLossy(t, nodes)
	l.Apply(spread(sleepers(pods)))
	l.WaitReady("app=sleep", pods)
	before := l.places()
	for _, m := range l.machines {
		m.Lose(percent)
	}
	starve(t, l.agents[0].Cmd.Process.Pid)
	start, said, silent := time.Now(), time.Now(), 0
	tick := time.NewTicker(2 * time.Second)
	defer tick.Stop()
	for time.Since(start) < length && t.Context().Err() == nil {
		<-tick.C
		bad := l.unready(t)
		silent += len(bad)
		if len(bad) > 0 || time.Since(said) >= time.Minute {
			said = time.Now()
			t.Logf("%s of %s: not Ready: %v, %d reconnects", time.Since(start).Round(time.Second), length, bad, l.reconnects(t))
		}
	}
	after, moved := l.places(), 0
	for uid, node := range before {
		if after[uid] != node {
			moved++
		}
	}
	packets, dropped := 0, 0
	for _, m := range l.machines {
		p, d := m.Lost()
		packets, dropped = packets+p, dropped+d
	}
	udp := []string{}
	for _, a := range l.agents {
		s, err := a.Status()
		if err != nil {
			t.Fatal(err)
		}
		udp = append(udp, strconv.FormatUint(s.Gossip.LeasesByUDP, 10))
	}
	slices.Sort(udp)
	if packets == 0 || dropped == 0 {
		t.Errorf("%d of %d packets were lost: nothing was measured", dropped, packets)
	}
	row(fmt.Sprintf("false moves at %d %% loss both ways, one of %d agents starved of CPU", percent, nodes), "0 in 30 min",
		fmt.Sprintf("%d of %d pods moved or restarted in %s", moved, len(before), time.Since(start).Round(time.Second)), held(moved == 0),
		fmt.Sprintf("%.1f %% of %d packets lost, node not Ready %d times, %d reconnects, leases by UDP %s", 100*float64(dropped)/float64(max(packets, 1)), packets, silent, l.reconnects(t), strings.Join(udp, "/")))
}
