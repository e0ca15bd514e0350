package cgroup

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// The test binary is also the process that is limited; see victim. Linked
// statically it is the probe of a virtual machine with control groups v2.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "victim" {
		victim(os.Args[2])
		return
	}
	os.Exit(m.Run())
}

func victim(what string) {
	var b [1]byte
	_, _ = os.Stdin.Read(b[:]) // until it is in its group
	switch what {
	case "memory":
		var all [][]byte
		for {
			page := make([]byte, 1<<20)
			for i := range page {
				page[i] = byte(i)
			}
			all = append(all, page)
			_ = all
		}
	case "cpu":
		end := time.Now().Add(2 * time.Second)
		for time.Now().Before(end) {
		}
	case "wait":
		_, _ = os.Stdin.Read(b[:])
	}
}

func newTree(t *testing.T) *Tree {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: NEEDS ROOT: only root can make control groups; CI runs this as root")
	}
	tree := New(Config{Name: fmt.Sprintf("dunlin-test-%d-%d", os.Getpid(), time.Now().UnixNano())})
	if tree.Facts().Mode == None {
		t.Skip("SKIPPED: no control groups here: " + tree.Facts().Reason)
	}
	t.Logf("facts: %+v", tree.Facts())
	t.Cleanup(func() {
		if err := tree.Destroy(); err != nil {
			t.Error(err)
		}
	})
	return tree
}

// started is a victim, waited for once.
type started struct {
	*exec.Cmd
	once func() error
}

// Wait may be called again.
func (s *started) Wait() error { return s.once() }

// start puts a victim into a group and lets it go.
func start(t *testing.T, g Group, what string) *started {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "victim", what)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s := &started{cmd, sync.OnceValue(cmd.Wait)}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = s.Wait()
	})
	if err := g.Add(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	return s
}

func create(t *testing.T, tree *Tree, path string, l Limits) Group {
	t.Helper()
	g, err := tree.Create(path, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := g.Kill(ctx); err != nil {
			t.Error(err)
		}
		if err := g.Remove(); err != nil {
			t.Error(err)
		}
	})
	return g
}

func TestMemoryLimitKillsAndIsNamed(t *testing.T) {
	tree := newTree(t)
	if !tree.Facts().Memory {
		t.Skip("SKIPPED: " + tree.Facts().MemoryReason)
	}
	g := create(t, tree, "pods/burstable/u1/app-0", Limits{MemoryLimit: 32 << 20, CPURequestMilli: 100, PIDs: 64})
	other := create(t, tree, "pods/burstable/u1/other-0", Limits{MemoryLimit: 32 << 20})
	healthy := start(t, other, "wait")
	cmd := start(t, g, "memory")
	if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("it ended with %v", err)
	}
	st, err := g.Stats()
	if err != nil || st.OOMKills == 0 {
		t.Errorf("stats %+v, %v: no kill counted", st, err)
	}
	if o := g.OOM(); !o.Own || o.Limit != 32<<20 || !strings.HasPrefix(o.String(), "it used more memory than its limit") {
		t.Errorf("%+v: %s", o, o)
	}
	if o := other.OOM(); o.Kills != 0 {
		t.Errorf("the neighbour: %+v", o)
	}
	if st, err := other.Stats(); err != nil || st.OOMKills != 0 || st.PIDs == 0 {
		t.Errorf("the neighbour: %+v, %v", st, err)
	}
	if err := healthy.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the neighbour is gone: %v", err)
	}
}

func TestCPUQuota(t *testing.T) {
	tree := newTree(t)
	if !tree.Facts().CPU {
		t.Skip("SKIPPED: no cpu controller here")
	}
	g := create(t, tree, "pods/guaranteed/u2/app-0", Limits{CPULimitMilli: 200})
	if err := start(t, g, "cpu").Wait(); err != nil {
		t.Fatal(err)
	}
	st, err := g.Stats()
	if err != nil {
		t.Fatal(err)
	}
	used := time.Duration(st.CPUNanos)
	if used == 0 || used > 900*time.Millisecond {
		t.Errorf("a fifth of a core for 2 s gave %s", used)
	}
}

func TestKillAndRemove(t *testing.T) {
	tree := newTree(t)
	g := create(t, tree, "pods/besteffort/u3/app-0", Limits{PIDs: 16})
	cmd := start(t, g, "wait")
	st, err := g.Stats()
	if err != nil || (tree.Facts().PIDs && st.PIDs == 0) {
		t.Errorf("stats %+v, %v", st, err)
	}
	if err := g.Remove(); err == nil {
		t.Error("a group with a process in it was removed")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	go func() { _ = cmd.Wait() }()
	if err := g.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if err := g.Remove(); err != nil {
		t.Fatal(err)
	}
	for _, root := range tree.roots {
		if left, err := filepath.Glob(filepath.Join(root, "pods")); err != nil || len(left) > 0 {
			t.Errorf("left: %v %v", left, err)
		}
	}
	if err := tree.Open("pods/besteffort/u3/app-0").Remove(); err != nil {
		t.Errorf("removing what is gone: %v", err)
	}
}

func TestPathsStayBelowTheRootGroup(t *testing.T) {
	tree := &Tree{facts: Facts{Mode: V2}, roots: map[string]string{"v2": "/nonexistent"}}
	for _, p := range []string{"", "/", "..", "../x", "pods/../..", "/pods/x", "pods//x", "pods/x/", "a\nb"} {
		if _, err := tree.Create(p, Limits{}); err == nil {
			t.Errorf("%q was accepted", p)
		}
	}
}

func TestParseMounts(t *testing.T) {
	hybrid := `31 25 0:27 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
33 31 0:29 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
34 31 0:30 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
35 31 0:31 / /elsewhere/pids rw,relatime - cgroup cgroup rw,pids
`
	m := parseMounts(hybrid, "/sys/fs/cgroup")
	if m.v2 != "/sys/fs/cgroup/unified" || m.v1["cpu"] != "/sys/fs/cgroup/cpu,cpuacct" || m.v1["cpuacct"] != m.v1["cpu"] || m.v1["memory"] == "" || m.v1["pids"] != "" {
		t.Errorf("%+v", m)
	}
	m = parseMounts("31 25 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n", "/sys/fs/cgroup")
	if m.v2 != "/sys/fs/cgroup" || len(m.v1) != 0 {
		t.Errorf("%+v", m)
	}
}

func TestMemoryReason(t *testing.T) {
	newer := func(p string) bool { return p == "/boot/firmware/cmdline.txt" || p == "/boot/cmdline.txt" }
	older := func(p string) bool { return p == "/boot/cmdline.txt" }
	none := func(string) bool { return false }
	for _, c := range []struct {
		name, cmdline string
		mode          Mode
		root          bool
		exists        func(string) bool
		want          string
	}{
		{"new image", "console=serial0", V2, true, newer, "/boot/firmware/cmdline.txt"},
		{"old image", "console=serial0", V1, true, older, "/boot/cmdline.txt"},
		{"flag without controller", "cgroup_enable=memory cgroup_memory=1", V2, true, newer, "flag present but controller absent: this kernel"},
		{"switched off by hand", "cgroup_disable=memory", V2, true, none, "remove it and reboot"},
		{"switched off by the firmware", "cgroup_disable=memory", V2, true, newer, "/boot/firmware/cmdline.txt"},
		{"a desktop", "quiet", V2, true, none, "the boot loader's kernel command line"},
		{"no root", "quiet", None, false, none, "only root"},
	} {
		got := memoryReason(Facts{Mode: c.mode, Reason: "x"}, c.cmdline, c.root, c.exists)
		if !strings.Contains(got, c.want) {
			t.Errorf("%s: %q does not say %q", c.name, got, c.want)
		}
	}
}

func TestWeight(t *testing.T) {
	for milli, want := range map[int64][2]int64{0: {2, 1}, 100: {102, 4}, 1000: {1024, 39}, 1 << 40: {262144, 10000}} {
		if s := shares(milli); s != want[0] || weight(s) != want[1] {
			t.Errorf("%s m: shares %d, weight %d, want %v", strconv.FormatInt(milli, 10), s, weight(s), want)
		}
	}
}
