package plan

import (
	"fmt"
	"slices"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

func drawNodes(t *rapid.T) *Nodes {
	n := NewNodes()
	for i := range rapid.IntRange(0, 12).Draw(t, "nodes") {
		n.Set(drawNode(t, fmt.Sprintf("n%d", i)))
	}
	for i := range rapid.IntRange(0, 2).Draw(t, "removed") {
		n.Remove(fmt.Sprintf("n%d", i*3))
	}
	return n
}

func drawNode(t *rapid.T, name string) Node {
	labels := map[string]string{}
	if rapid.Bool().Draw(t, "ssd") {
		labels["disk"] = "ssd"
	}
	if rapid.Bool().Draw(t, "wasm") {
		labels[RuntimeLabel("wazero")] = "true"
	}
	var taints []corev1.Taint
	if rapid.IntRange(0, 3).Draw(t, "taint") == 0 {
		effect := rapid.SampledFrom([]corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute}).Draw(t, "effect")
		taints = []corev1.Taint{{Key: "k", Value: "v", Effect: effect}}
	}
	alloc := []state.Quantity{
		{Name: "cpu", Value: rapid.Int64Range(0, 4000).Draw(t, "cpu")},
		{Name: "memory", Value: rapid.Int64Range(0, 1<<32).Draw(t, "memory")},
		{Name: "pods", Value: rapid.Int64Range(0, 8).Draw(t, "pods")},
	}
	if rapid.Bool().Draw(t, "gpu") {
		alloc = append(alloc, state.Quantity{Name: "gpu", Value: 2})
	}
	return Node{Name: name, UID: name, Labels: labels, Taints: taints, Allocatable: alloc, Images: drawImages(t),
		Unschedulable: rapid.IntRange(0, 5).Draw(t, "cordon") == 0, NotReady: rapid.IntRange(0, 5).Draw(t, "ready") == 0}
}

var someImages = []string{"docker.io/library/big:latest", "r.example/app:1", "hello.wasm"}

func drawImages(t *rapid.T) (out []Image) {
	for _, name := range someImages {
		if rapid.IntRange(0, 2).Draw(t, name) == 0 {
			out = append(out, Image{Names: []string{name}, Size: rapid.Int64Range(0, 2<<30).Draw(t, "size")})
		}
	}
	return out
}

func drawGroup(t *rapid.T) *Group {
	s := &Shape{}
	if rapid.IntRange(0, 3).Draw(t, "selector") == 0 {
		s.Selector = map[string]string{"disk": "ssd"}
	}
	if rapid.Bool().Draw(t, "runtime") {
		s.Handler, s.RuntimeClass = "wazero", "wasm"
	}
	if rapid.Bool().Draw(t, "tolerates") {
		s.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}
	}
	if rapid.IntRange(0, 3).Draw(t, "prefers") == 0 {
		s.Preferred = []corev1.PreferredSchedulingTerm{{Weight: 3, Preference: corev1.NodeSelectorTerm{
			MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpExists}}}}}
	}
	g := &Group{Shape: s, Count: rapid.IntRange(1, 20).Draw(t, "count"), Spread: rapid.Bool().Draw(t, "spread"), Images: rapid.SliceOfN(rapid.Map(rapid.SampledFrom(someImages), ImageName), 0, 3).Draw(t, "images"), Requests: []state.Quantity{
		{Name: "cpu", Value: rapid.Int64Range(0, 1000).Draw(t, "cpu")},
		{Name: "memory", Value: rapid.Int64Range(0, 1<<30).Draw(t, "memory")},
		{Name: "pods", Value: 1},
	}}
	if rapid.IntRange(0, 4).Draw(t, "gpu") == 0 {
		g.Requests = append(g.Requests, state.Quantity{Name: "gpu", Value: 1})
	}
	if rapid.IntRange(0, 4).Draw(t, "port") == 0 {
		g.HostPorts = []state.HostPort{{Protocol: "TCP", Port: 80}}
	}
	return g
}

// For every decision: each filter holds, nothing is overcommitted, those
// that were left out fit nowhere, the same input gives the same output, and
// a group is placed as its pods one by one would be.
func TestPlaceProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := drawNodes(t)
		for range rapid.IntRange(1, 4).Draw(t, "groups") {
			g := drawGroup(t)
			got := Place(n, g)
			if again := Place(n, g); !slices.Equal(got, again) {
				t.Fatalf("two answers: %v %v", got, again)
			}
			fresh := *g
			fresh.Shape = &Shape{Selector: g.Shape.Selector, Required: g.Shape.Required, Preferred: g.Shape.Preferred,
				Tolerations: g.Shape.Tolerations, RuntimeClass: g.Shape.RuntimeClass, Handler: g.Shape.Handler}
			if again := Place(n, &fresh); !slices.Equal(got, again) {
				t.Fatalf("remembered verdicts differ: %v %v", got, again)
			}
			one := *g
			one.Count, one.Siblings = 1, map[string]int{}
			for k, slot := range got {
				single := Place(n, &one)
				if len(single) != 1 || single[0] != slot {
					t.Fatalf("pod %d of the group goes to %d, alone to %v", k, slot, single)
				}
				node := n.At(slot)
				if !n.live[slot] || g.Shape.check(node) != fits {
					t.Fatalf("placed on %+v", node)
				}
				if !n.portsFree(slot, g.HostPorts) {
					t.Fatal("host port is taken")
				}
				n.Take(slot, g.Requests, g.HostPorts)
				one.Siblings[node.Name]++
				for _, q := range g.Requests {
					if q.Value > 0 && n.Free(slot, q.Name) < 0 {
						t.Fatalf("%s overcommitted on %s by %d", q.Name, node.Name, -n.Free(slot, q.Name))
					}
				}
			}
			if len(got) < g.Count {
				if rest := Place(n, &one); len(rest) != 0 {
					t.Fatalf("left out, but fits on %v", rest)
				}
				if e := Explain(n, &one); e.Message == "" {
					t.Fatalf("no reason: %+v", e)
				}
			}
			if rapid.Bool().Draw(t, "change") && n.Len() > 0 {
				n.Set(drawNode(t, "n1"))
			}
		}
	})
}

func TestGiveUndoesTake(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := NewNodes()
		n.Set(drawNode(t, "n"))
		g := drawGroup(t)
		before := []int64{n.Free(0, "cpu"), n.Free(0, "memory"), n.Free(0, "pods"), n.Free(0, "gpu")}
		n.Take(0, g.Requests, g.HostPorts)
		n.Give(0, g.Requests, g.HostPorts)
		after := []int64{n.Free(0, "cpu"), n.Free(0, "memory"), n.Free(0, "pods"), n.Free(0, "gpu")}
		if !slices.Equal(before, after) || len(n.ports[0]) != 0 {
			t.Fatalf("%v became %v", before, after)
		}
	})
}

func TestTolerates(t *testing.T) {
	taint := &corev1.Taint{Key: "k", Value: "v", Effect: corev1.TaintEffectNoSchedule}
	for _, c := range []struct {
		o    corev1.Toleration
		want bool
	}{
		{corev1.Toleration{Operator: corev1.TolerationOpExists}, true},
		{corev1.Toleration{Key: "k", Value: "v"}, true},
		{corev1.Toleration{Key: "k", Operator: corev1.TolerationOpEqual, Value: "v", Effect: corev1.TaintEffectNoSchedule}, true},
		{corev1.Toleration{Key: "k", Value: "w"}, false},
		{corev1.Toleration{Key: "k", Value: "v", Effect: corev1.TaintEffectNoExecute}, false},
		{corev1.Toleration{Key: "x", Operator: corev1.TolerationOpExists}, false},
		{corev1.Toleration{}, false},
	} {
		if got := Tolerates(&c.o, taint); got != c.want {
			t.Errorf("%+v: %v", c.o, got)
		}
	}
}

func TestMessagesDifferOnlyInFigures(t *testing.T) {
	a := "0/2 nodes are available: 1 Insufficient cpu (needs 2, most free 1500m), 1 Insufficient memory (needs 1Gi, most free 3Mi)."
	if got := WithoutFigures(a); got != "0/2 nodes are available: 1 Insufficient cpu, 1 Insufficient memory." {
		t.Fatal(got)
	}
}

func benchNodes(count int) *Nodes {
	n := NewNodes()
	for i := range count {
		n.Set(Node{Name: fmt.Sprintf("n%05d", i), UID: fmt.Sprint(i), Labels: map[string]string{RuntimeLabel("wazero"): "true"},
			Allocatable: []state.Quantity{{Name: "cpu", Value: 4000}, {Name: "memory", Value: 8 << 30}, {Name: "pods", Value: 110}}})
		n.Take(i, []state.Quantity{{Name: "cpu", Value: int64(i*37) % 3000}, {Name: "memory", Value: int64(i*7919) % (6 << 30)}, {Name: "pods", Value: int64(i) % 60}}, nil)
	}
	return n
}

// cpuSeconds of this process: wall time says little on a machine that others
// use too.
func cpuSeconds(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)/1e6
}

// One decision at a time, each for another pod: the hot loop over all nodes.
func BenchmarkDecision5000Nodes(b *testing.B) {
	n := benchNodes(5000)
	g := &Group{Shape: &Shape{Handler: "wazero", RuntimeClass: "wasm"}, Count: 1, Requests: []state.Quantity{{Name: "cpu", Value: 100}, {Name: "memory", Value: 64 << 20}, {Name: "pods", Value: 1}}}
	b.ReportAllocs()
	start := cpuSeconds(b)
	for b.Loop() {
		slots := Place(n, g)
		if len(slots) == 1 {
			n.Take(slots[0], g.Requests, nil)
			n.Give(slots[0], g.Requests, nil)
		}
	}
	b.ReportMetric(float64(b.N)/(cpuSeconds(b)-start), "decisions/cpu-s")
}

// A batch of identical pods: one pass, then a heap.
func BenchmarkGroupOf1000At5000Nodes(b *testing.B) {
	n := benchNodes(5000)
	g := &Group{Shape: &Shape{}, Count: 1000, Requests: []state.Quantity{{Name: "cpu", Value: 100}, {Name: "memory", Value: 64 << 20}, {Name: "pods", Value: 1}}}
	start := cpuSeconds(b)
	for b.Loop() {
		if len(Place(n, g)) != 1000 {
			b.Fatal("does not fit")
		}
	}
	b.ReportMetric(1000*float64(b.N)/(cpuSeconds(b)-start), "decisions/cpu-s")
}
