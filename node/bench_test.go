package node

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/node/store"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// BenchmarkAgentRestart measures an agent that comes back to 100 running
// pods, with the real database, until all of them are reported again.
func BenchmarkAgentRestart(b *testing.B) {
	const pods = 100
	quiet := slog.New(slog.DiscardHandler)
	path := filepath.Join(b.TempDir(), "node.db")
	rt, link := newStubRuntime(), newStubLink()
	for i := range pods {
		link.put("Pod", wasmPod(fmt.Sprint("p", i)))
	}
	once := func() (time.Duration, uint64) {
		db, err := store.Open(path, nil, time.Second, quiet)
		if err != nil {
			b.Fatal(err)
		}
		link.mu.Lock()
		clear(link.status)
		link.mu.Unlock()
		began := time.Now()
		a, err := New(Config{
			NodeName: "n1", MachineBoot: "boot", Link: link, Store: db, Runtimes: map[string]workload.Runtime{wasmHandler: rt},
			Network: &stubNetwork{pods: map[string]network.Allocation{}}, Volumes: &stubVolumes{pods: map[string]bool{}},
			Machine: &stubMachine{f: MachineFacts{CPUMilli: 1 << 20, Memory: 1 << 40}}, Logger: quiet, StateDir: b.TempDir(),
		})
		if err != nil {
			b.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { defer close(done); _ = a.Run(ctx) }()
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for range tick.C {
			link.mu.Lock()
			n := 0
			for _, st := range link.status {
				if short(st) == "Running+Ready" {
					n++
				}
			}
			link.mu.Unlock()
			if n == pods {
				break
			}
		}
		took := time.Since(began)
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		cancel()
		<-done
		if err := db.Close(); err != nil {
			b.Fatal(err)
		}
		return took, m.HeapAlloc + m.StackInuse
	}
	first, _ := once()
	var sum time.Duration
	var mem uint64
	for b.Loop() {
		d, m := once()
		sum, mem = sum+d, m
	}
	b.ReportMetric(float64(first.Milliseconds()), "first-start-ms")
	b.ReportMetric(float64(sum.Milliseconds())/float64(b.N), "restart-ms")
	b.ReportMetric(float64(mem)/(1<<20), "heap+stack-MiB")
	if n := len(rt.started()); n != pods {
		b.Fatalf("%d starts of %d pods", n, pods)
	}
}

// BenchmarkStep measures one decision about a running pod with two probes.
func BenchmarkStep(b *testing.B) {
	pod := wasmPod("a")
	pod.Spec.Containers[0].LivenessProbe = tcpProbe(10, 3)
	m := &sim{s: newPodState(pod, nil, "boot", at(0))}
	m.step(observed{})
	b.ReportAllocs()
	for b.Loop() {
		_, _ = step(m.s, observed{}, at(0))
	}
}
