//go:build bench

package bench

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
	"github.com/dunlin-project/dunlin/controlplane/events"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
)

func size(env string, def int) int {
	if n, err := strconv.Atoi(os.Getenv(env)); err == nil && n > 0 {
		return n
	}
	return def
}

type quiet struct{}

func (quiet) Event(corev1.ObjectReference, string, string, string) {}

var _ events.Recorder = quiet{}

// plane is a control plane's state with one voter and fsync on.
type plane struct {
	raft  *consensus.Node
	store *registry.Registry
}

func newPlane(t *testing.T) *plane {
	t.Helper()
	n, err := consensus.Open(t.Context(), consensus.Config{Dir: t.TempDir(), ClusterID: "bench", ServerID: "bench", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.Close() })
	if _, err := n.WaitLeading(t.Context()); err != nil {
		t.Fatal(err)
	}
	soft := state.NewSoft(1, state.SoftOptions{})
	st, err := registry.New(registry.Config{Durable: n.State(), Proposer: n, Soft: soft, SoftProposer: registry.LocalSoft(soft, n)})
	if err != nil {
		t.Fatal(err)
	}
	return &plane{n, st}
}

// fill creates n objects with 64 writers.
func (p *plane) fill(t *testing.T, n int, make func(i int) (obj interface{ metav1.Object })) {
	t.Helper()
	var wg sync.WaitGroup
	for w := range 64 {
		wg.Go(func() {
			for i := w; i < n; i += 64 {
				var err error
				switch o := make(i).(type) {
				case *corev1.Node:
					_, err = p.store.Create(context.Background(), o, registry.WriteOptions{})
				case *corev1.Pod:
					_, err = p.store.Create(context.Background(), o, registry.WriteOptions{})
				case *corev1.Namespace:
					_, err = p.store.Create(context.Background(), o, registry.WriteOptions{})
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

func node(i int) *corev1.Node {
	alloc := corev1.ResourceList{
		corev1.ResourceCPU: *resource.NewQuantity(8, resource.DecimalSI), corev1.ResourceMemory: *resource.NewQuantity(16<<30, resource.BinarySI), corev1.ResourcePods: *resource.NewQuantity(110, resource.DecimalSI),
	}
	name := fmt.Sprintf("node-%05d", i)
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/hostname": name, "kubernetes.io/arch": "arm64", "dunlin.dev/runtime.wazero": "true", "topology.kubernetes.io/zone": fmt.Sprintf("site-%d", i%50)}},
		Status:     corev1.NodeStatus{Capacity: alloc, Allocatable: alloc, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}},
	}
}

func pod(i int) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("pod-%06d", i), Labels: map[string]string{"app": fmt.Sprintf("app-%d", i%100)}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: fmt.Sprintf("app-%d.wasm", i%100), Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("32Mi")}}}}},
	}
}

func cpuSelf() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func TestScheduling(t *testing.T) {
	nodes, pods := size("DUNLIN_BENCH_NODES", 5000), size("DUNLIN_BENCH_PODS", 30000)
	p := newPlane(t)
	p.fill(t, 1, func(int) interface{ metav1.Object } {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	})
	p.fill(t, nodes, func(i int) interface{ metav1.Object } { return node(i) })
	// Allocatable is status: written the way nodes report it.
	for i := range nodes {
		n := node(i)
		if _, err := p.store.Update(t.Context(), registryKind("Node"), "", n.Name, registry.Status, replaceStatus(n), registry.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now()
	p.fill(t, pods, func(i int) interface{ metav1.Object } { return pod(i) })
	created := time.Since(start)
	term, _ := p.raft.Leadership()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	s := scheduler.New(scheduler.Config{Store: p.store, Term: term, Clock: clock.System, Log: slog.New(slog.DiscardHandler), Events: quiet{}, Rand: func() float64 { return 0.5 }})
	cpu := cpuSelf()
	start = time.Now()
	go func() { done <- s.Run(ctx) }()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for bound(p) < pods && time.Since(start) < 5*time.Minute {
		<-tick.C
	}
	took := time.Since(start)
	used := cpuSelf() - cpu
	got := bound(p)
	cancel()
	if err := <-done; err != nil && ctx.Err() == nil {
		t.Error(err)
	}
	if got != pods {
		t.Errorf("%d of %d pods were bound", got, pods)
	}
	rate, each := float64(got)/took.Seconds(), float64(used.Microseconds())/1000/float64(got)
	row(fmt.Sprintf("scheduling, %d nodes, %d pods created before, committed binds", nodes, pods), "≥ 10,000 pods/s, ≤ 0.2 ms CPU a pod",
		fmt.Sprintf("%.0f pods/s, %.3f ms CPU a pod", rate, each), held(rate >= 10_000 && each <= 0.2), "Kubernetes at 1,000 nodes: 329/s, 6 ms")
	row("creating those pods, 64 writers, one voter, fsync on", "(none)", fmt.Sprintf("%.0f pods/s", float64(pods)/created.Seconds()), noTarget, "Kubernetes API: 556 to 1,138/s")
}

func bound(p *plane) int {
	n := 0
	s := p.raft.State().Snapshot()
	s.Range("Pod", "", state.Key{}, func(r *state.Record) bool {
		if r.Header.NodeName != "" {
			n++
		}
		return true
	})
	return n
}
