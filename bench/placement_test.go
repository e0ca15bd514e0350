//go:build bench

package bench

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// kindsOf are what the pods of a run ask for. Each of 100 apps speaks of its
// own pods.
var kindsOf = []struct {
	name, target string
	least        float64 // pods/s at 5,000 nodes
	set          func(p *corev1.Pod)
	// full puts pods of lower priority on every node first; churn lets pods
	// and nodes come and go meanwhile.
	full, churn bool
}{
	{name: "plain", least: 10_000, set: func(*corev1.Pod) {}},
	{name: "spread", least: 2_000, set: func(p *corev1.Pod) {
		p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{
			{MaxSkew: 1, TopologyKey: "topology.kubernetes.io/zone", WhenUnsatisfiable: corev1.DoNotSchedule, LabelSelector: &metav1.LabelSelector{MatchLabels: p.Labels}},
			{MaxSkew: 1, TopologyKey: "kubernetes.io/hostname", WhenUnsatisfiable: corev1.ScheduleAnyway, LabelSelector: &metav1.LabelSelector{MatchLabels: p.Labels}},
		}
	}},
	{name: "anti-affinity", least: 2_000, set: func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{
			{TopologyKey: "kubernetes.io/hostname", LabelSelector: &metav1.LabelSelector{MatchLabels: p.Labels}}}}}
	}},
	{name: "preemption", set: func(p *corev1.Pod) { p.Spec.Priority = new(int32(100)) }, full: true},
	{name: "churn", set: func(*corev1.Pod) {}, churn: true},
}

// TestPlacement measures committed binds of pods that were created before, at
// each size and with each kind of terms. Each is run DUNLIN_BENCH_REPEAT
// times (3), and the best counts: others use the machine, too. DUNLIN_BENCH_KIND
// names one kind.
func TestPlacement(t *testing.T) {
	pods := size("DUNLIN_BENCH_PODS", 10_000)
	for _, nodes := range []int{100, 1000, 5000} {
		if only := size("DUNLIN_BENCH_NODES", nodes); only != nodes {
			continue
		}
		for i := range kindsOf {
			k := &kindsOf[i]
			if only := os.Getenv("DUNLIN_BENCH_KIND"); only != "" && only != k.name {
				continue
			}
			var best placementRun
			for range size("DUNLIN_BENCH_REPEAT", 3) {
				if r := runPlacement(t, nodes, pods, i); r.rate() > best.rate() {
					best = r
				}
			}
			target, verdict := "(none)", noTarget
			if nodes == 5000 && k.least > 0 {
				target, verdict = fmt.Sprintf("≥ %.0f pods/s", k.least), held(best.rate() >= k.least)
			}
			row(fmt.Sprintf("scheduling, %s, %d nodes, %d pods", k.name, nodes, best.pods), target,
				fmt.Sprintf("%.0f pods/s, %.3f ms CPU a pod, %d conflicts", best.rate(), best.cpuEach(), best.conflicts), verdict, "Kubernetes at 1,000 nodes 329/s, 6 ms; Nomad with spread 64 to 91/s")
		}
	}
}

type placementRun struct {
	pods      int
	took, cpu time.Duration
	conflicts int
}

func (r placementRun) rate() float64 {
	if r.took == 0 {
		return 0
	}
	return float64(r.pods) / r.took.Seconds()
}

func (r placementRun) cpuEach() float64 {
	return float64(r.cpu.Microseconds()) / 1000 / float64(max(r.pods, 1))
}

func runPlacement(t *testing.T, nodes, pods, kind int) placementRun {
	k := &kindsOf[kind]
	// Small nodes hold fewer: 100 nodes have room for 100 x 110 pods, and
	// each app has one pod a node at most with anti-affinity.
	pods = min(pods, nodes*100)
	p := newPlane(t)
	p.fill(t, 1, func(int) interface{ metav1.Object } {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	})
	p.fill(t, nodes, func(i int) interface{ metav1.Object } { return node(i) })
	perNode := 0
	if k.full { // as many low pods as all of the pods replace
		perNode = (pods + nodes - 1) / nodes
		p.fill(t, perNode*nodes, func(i int) interface{ metav1.Object } { return low(i, nodes, perNode) })
	}
	p.fill(t, pods, func(i int) interface{ metav1.Object } {
		x := pod(i)
		x.Name = "new-" + x.Name
		if perNode > 0 { // needs one of the low pods' room
			x.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = cpuOf(8000/perNode - 1)
		}
		k.set(x)
		return x
	})
	term, _ := p.raft.Leadership()
	reg := prometheus.NewRegistry()
	metrics := scheduler.NewMetrics(reg)
	s := scheduler.New(scheduler.Config{Store: p.store, Term: term, Clock: clock.System, Log: slog.New(slog.DiscardHandler), Events: quiet{}, Rand: func() float64 { return 0.5 }, Metrics: metrics})
	ctx, cancel := context.WithCancel(t.Context())
	var others sync.WaitGroup
	cpu, start := cpuSelf(), time.Now()
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	if k.full {
		others.Go(func() { p.finishVictims(ctx) })
	}
	if k.churn {
		others.Go(func() { p.churn(ctx, nodes) })
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for p.boundNew() < pods && time.Since(start) < 3*time.Minute {
		<-tick.C
	}
	r := placementRun{pods: p.boundNew(), took: time.Since(start), cpu: cpuSelf() - cpu}
	cancel()
	others.Wait()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if r.pods != pods {
		t.Errorf("%s at %d nodes: %d of %d pods were bound", k.name, nodes, r.pods, pods)
	}
	r.conflicts = counterOf(t, reg, "bind_conflicts_total")
	if err := p.raft.Close(); err != nil {
		t.Error(err)
	}
	return r
}

// low is a pod of low priority, on a node already.
func low(i, nodes, perNode int) *corev1.Pod {
	x := pod(i)
	x.Name = "low-" + strconv.Itoa(i)
	x.Spec.NodeName = fmt.Sprintf("node-%05d", i%nodes)
	x.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = cpuOf(8000 / perNode)
	return x
}

func cpuOf(milli int) resource.Quantity {
	return *resource.NewMilliQuantity(int64(milli), resource.DecimalSI)
}

// finishVictims plays the nodes: what is being deleted is gone at once.
func (p *plane) finishVictims(ctx context.Context) {
	reader := p.raft.State()
	w, err := reader.Watch("Pod", "", reader.Snapshot().ResourceVersion())
	if err != nil {
		return
	}
	work := make(chan state.Key, 4096)
	var g sync.WaitGroup
	for range 64 {
		g.Go(func() {
			zero := int64(0)
			for key := range work {
				_, _, _ = p.store.Delete(ctx, registryKind("Pod"), key.Namespace, key.Name, registry.DeleteOptions{GracePeriodSeconds: &zero})
			}
		})
	}
	for {
		batch, _, err := w.Next(ctx)
		for _, ev := range batch {
			if ev.Type != state.Deleted && ev.Record.Header.Deleted != 0 {
				select {
				case work <- ev.Record.Header.Key:
				case <-ctx.Done():
				}
			}
		}
		if err != nil {
			close(work)
			g.Wait()
			return
		}
	}
}

// churn creates bound pods and deletes them, and changes labels of nodes, as
// fast as two writers can.
func (p *plane) churn(ctx context.Context, nodes int) {
	var g sync.WaitGroup
	for w := range 2 {
		g.Go(func() {
			zero := int64(0)
			for i := w; ctx.Err() == nil; i += 2 {
				x := pod(i)
				x.Name, x.Spec.NodeName = fmt.Sprintf("churn-%d", i), fmt.Sprintf("node-%05d", i%nodes)
				if _, err := p.store.Create(ctx, x, registry.WriteOptions{}); err != nil {
					return
				}
				_, _, _ = p.store.Delete(ctx, registryKind("Pod"), "default", x.Name, registry.DeleteOptions{GracePeriodSeconds: &zero})
			}
		})
	}
	g.Wait()
}

func (p *plane) boundNew() (n int) {
	p.raft.State().Snapshot().Range("Pod", "", state.Key{}, func(r *state.Record) bool {
		if r.Header.NodeName != "" && strings.HasPrefix(r.Header.Key.Name, "new-") {
			n++
		}
		return true
	})
	return n
}

func counterOf(t *testing.T, reg *prometheus.Registry, name string) int {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return int(f.GetMetric()[0].GetCounter().GetValue())
		}
	}
	return 0
}
