package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestALeakerWithoutALimitDiesFirst: all groups together are bounded; who runs
// into the bound is killed by its score, and who is beside it lives.
func TestALeakerWithoutALimitDiesFirst(t *testing.T) {
	tree := newTree(t)
	if !tree.Facts().Memory {
		t.Skip("SKIPPED: " + tree.Facts().MemoryReason)
	}
	if err := tree.Bound("pods", Bound{MemoryBytes: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	neighbour := start(t, create(t, tree, "pods/burstable/u1/app-0", Limits{MemoryRequest: 1 << 20}), "wait")
	g := create(t, tree, "pods/besteffort/u2/app-0", Limits{})
	leaker := start(t, g, "memory")
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", leaker.Process.Pid), []byte("1000"), 0)
	if err := leaker.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("it ended with %v", err)
	}
	if st, err := g.Stats(); err != nil || st.OOMKills == 0 {
		t.Errorf("stats %+v, %v: no kill counted", st, err)
	}
	if err := neighbour.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the neighbour is gone: %v", err)
	}
}

// TestTheLimitOfAnotherIsNotItsOwn: who is killed since all groups together
// used too much is not told that its own limit was too small.
func TestTheLimitOfAnotherIsNotItsOwn(t *testing.T) {
	tree := newTree(t)
	if !tree.Facts().Memory {
		t.Skip("SKIPPED: " + tree.Facts().MemoryReason)
	}
	if err := tree.Bound("pods", Bound{MemoryBytes: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	g := create(t, tree, "pods/burstable/u1/app-0", Limits{MemoryLimit: 512 << 20})
	if err := start(t, g, "memory").Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("it ended with %v", err)
	}
	if o := g.OOM(); o.Kills == 0 || o.Own || o.Limit != 512<<20 || !strings.Contains(o.String(), "MiB at most of its limit of 512 MiB") {
		t.Errorf("%+v: %s", o, o)
	}
}

// TestRootComesBack: somebody removed all groups, which were empty.
func TestRootComesBack(t *testing.T) {
	tree := newTree(t)
	if !tree.Facts().Memory {
		t.Skip("SKIPPED: " + tree.Facts().MemoryReason)
	}
	if err := tree.Bound("pods", Bound{MemoryBytes: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := tree.Destroy(); err != nil {
		t.Fatal(err)
	}
	g := create(t, tree, "pods/burstable/u1/app-0", Limits{})
	pods := &group{tree: tree, path: "pods", v2: tree.Facts().Mode == V2}
	dir, _ := pods.dir("memory")
	file := "memory.limit_in_bytes"
	if pods.v2 {
		file = "memory.max"
	}
	if b, err := os.ReadFile(filepath.Join(dir, file)); err != nil || strings.TrimSpace(string(b)) != fmt.Sprint(64<<20) {
		t.Errorf("the bound of all pods is %q, %v", b, err)
	}
	if err := start(t, g, "memory").Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("it ended with %v", err)
	}
}

// TestBoundComesBack: the group goes when it is empty, its bound does not.
func TestBoundComesBack(t *testing.T) {
	tree := newTree(t)
	if !tree.Facts().Memory {
		t.Skip("SKIPPED: " + tree.Facts().MemoryReason)
	}
	if err := tree.Bound("pods", Bound{MemoryBytes: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		g, err := tree.Create("pods/besteffort/u/app-0", Limits{})
		if err != nil {
			t.Fatal(err)
		}
		pods := &group{tree: tree, path: "pods", v2: tree.Facts().Mode == V2}
		d, _ := pods.dir("memory")
		file := "memory.limit_in_bytes"
		if pods.v2 {
			file = "memory.max"
		}
		if got := number(readFile(t, filepath.Join(d, file))); got != 64<<20 {
			t.Errorf("bound %d", got)
		}
		if err := g.Remove(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(d); err == nil {
			t.Error("the empty group is left")
		}
	}
}

// TestWeightsCountOnEveryLevel: a request means something only if the pod's
// group, and that of its class, weigh as much as what is in them.
func TestWeightsCountOnEveryLevel(t *testing.T) {
	tree := newTree(t)
	if !tree.Facts().CPU {
		t.Skip("SKIPPED: no cpu controller here")
	}
	create(t, tree, "pods/burstable/u1/a-0", Limits{CPURequestMilli: 1000, MemoryRequest: 4 << 20})
	create(t, tree, "pods/burstable/u1/b-0", Limits{CPURequestMilli: 500, MemoryRequest: 2 << 20})
	create(t, tree, "pods/burstable/u2/a-0", Limits{CPURequestMilli: 250})
	gone, err := tree.Create("pods/burstable/u3/a-0", Limits{CPURequestMilli: 2000, MemoryRequest: 8 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := gone.Remove(); err != nil {
		t.Fatal(err)
	}
	create(t, tree, "pods/besteffort/u4/a-0", Limits{})
	weightOf := func(p string) uint64 {
		g := &group{tree: tree, path: p, v2: tree.Facts().Mode == V2}
		d, _ := g.dir("cpu")
		if g.v2 {
			return number(readFile(t, filepath.Join(d, "cpu.weight")))
		}
		return number(readFile(t, filepath.Join(d, "cpu.shares")))
	}
	sums := map[string][]string{
		"pods/burstable/u1": {"pods/burstable/u1/a-0", "pods/burstable/u1/b-0"}, "pods/burstable": {"pods/burstable/u1", "pods/burstable/u2"},
		"pods/besteffort": {"pods/besteffort/u4/a-0"},
	}
	for p, parts := range sums {
		var want uint64
		for _, q := range parts {
			want += weightOf(q)
		}
		if got := weightOf(p); got != want {
			t.Errorf("%s weighs %d, what is in it %d", p, got, want)
		}
	}
	if b, e := weightOf("pods/burstable"), weightOf("pods/besteffort"); b < 20*e {
		t.Errorf("burstable %d, besteffort %d", b, e)
	}
	if tree.Facts().Mode == V2 && tree.Facts().Memory {
		for _, p := range []string{"pods/burstable/u1", "pods/burstable", "pods", "."} {
			if got := number(readFile(t, filepath.Join(tree.roots["v2"], p, "memory.low"))); got != 6<<20 {
				t.Errorf("%s protects %d bytes", p, got)
			}
		}
	}
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
