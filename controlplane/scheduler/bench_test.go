package scheduler

import (
	"context"
	"fmt"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
)

func cpuSeconds(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Sec+u.Stime.Sec) + float64(u.Utime.Usec+u.Stime.Usec)/1e6
}

// The scheduler over the real state machine (without Raft): 5,000 nodes and
// 10,000 pods of ten templates that exist already. What is measured is taking
// them in, deciding, and binding in batches.
func BenchmarkBind10000PodsOn5000Nodes(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		w := fixture.New(b)
		for i := range 5000 {
			w.AddNode(fmt.Sprintf("n%04d", i))
		}
		for i := range 10000 {
			w.Create(pod(fmt.Sprintf("p%05d", i), func(p *corev1.Pod) { p.Spec.Containers[0].Image = fmt.Sprintf("file:///app%d.wasm", i%10) }))
		}
		s := newScheduler(w)
		start := cpuSeconds(b)
		b.StartTimer()
		if err := s.Settle(context.Background()); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		b.ReportMetric((cpuSeconds(b)-start)*1e3/10000, "cpu-ms/pod")
		if n := len(s.queue.pods); n != 0 {
			b.Fatalf("%d pods are left", n)
		}
		b.StartTimer()
	}
}
