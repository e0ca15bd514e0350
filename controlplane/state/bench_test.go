package state

import (
	"fmt"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// benchPod is as real ones are: a spec of 1.5 KB shared by the replicas of a
// template, labels, an owner, requests, a status of its own.
func benchPod(i int) *Record {
	name := fmt.Sprintf("web-%03d-5d4f8c7b9-%05d", i/100, i)
	r := newPod(name, 10)
	r.Header.UID = fmt.Sprintf("0b5f7c1e-5a0e-4a57-9d35-%012d", i)
	r.Header.Labels = map[string]string{"app": fmt.Sprintf("web-%03d", i/100), "pod-template-hash": "5d4f8c7b9"}
	r.Header.Owners = []Owner{{UID: fmt.Sprintf("rs-%d", i/100), Kind: "ReplicaSet.apps", Name: fmt.Sprintf("web-%03d-5d4f8c7b9", i/100), Controller: true}}
	r.Spec = &Body{CodecKubeCBOR, append(make([]byte, 1500), byte(i/100), byte(i/25600))}
	r.Status = &Body{CodecKubeCBOR, fmt.Appendf(make([]byte, 600), "%d", i)}
	return r
}

func benchEntries(b *testing.B, n, per int, op func(i int) Op) [][]byte {
	b.Helper()
	var entries [][]byte
	for i := 0; i < n; i += per {
		var ops []Op
		for j := i; j < min(n, i+per); j++ {
			ops = append(ops, op(j))
		}
		e, err := EncodeEntry(ops)
		if err != nil {
			b.Fatal(err)
		}
		entries = append(entries, e)
	}
	return entries
}

// BenchmarkApply fills a state with 100,000 pods on 1,000 nodes and binds
// them, 64 ops an entry; memory is live heap a pod with an empty ring.
func BenchmarkApply(b *testing.B) {
	const pods, nodes = 100_000, 1000
	creates := benchEntries(b, pods, 64, func(i int) Op { return create(benchPod(i)) })
	bound := benchEntries(b, pods, 64, func(i int) Op {
		return bindOp(benchPod(i), newNode(fmt.Sprintf("n-%d", i%nodes), 0, 0))
	})
	var heap [2]runtime.MemStats
	for b.Loop() {
		runtime.GC()
		runtime.ReadMemStats(&heap[0])
		m := NewMachine(Options{RingBytes: 1 << 16})
		l := NewLocal(m)
		ops := []Op{create(object(kindNamespace, "", "default"))}
		for i := range nodes {
			ops = append(ops, create(newNode(fmt.Sprintf("n-%d", i), 100_000, 200)))
		}
		if _, err := l.Propose(b.Context(), ops); err != nil {
			b.Fatal(err)
		}
		apply := func(entries [][]byte) float64 {
			start := cpuTime(b)
			for _, e := range entries {
				res, err := m.Apply(1, e)
				if err != nil || res[0].Reason != ReasonNone {
					b.Fatal(err, res[0])
				}
			}
			return float64((cpuTime(b) - start).Microseconds()) / pods
		}
		b.ReportMetric(apply(creates), "cpu-µs/create")
		b.ReportMetric(apply(bound), "cpu-µs/bind")
		runtime.GC()
		runtime.ReadMemStats(&heap[1])
		b.ReportMetric(float64(heap[1].HeapAlloc-heap[0].HeapAlloc)/pods, "heap-bytes/pod")
		runtime.KeepAlive(m)
	}
}

// cpuTime is what this process has used: the machine may be shared.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
