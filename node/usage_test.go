package node

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
	"github.com/dunlin-project/dunlin/wire"
)

// TestUsage: a rate over two samples, taken only when somebody asks; later
// questions reach back to the one before.
func TestUsage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		began := time.Now()
		// A quarter of a core since the start.
		b.rt.onUsage = func() workload.Stats {
			return workload.Stats{CPUNanos: uint64(time.Since(began)) / 4, MemoryBytes: 3 << 20}
		}
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		b.after(10 * time.Second)
		ask := func() (*wire.NodeUsage, time.Duration) {
			t.Helper()
			at := time.Now()
			var buf bytes.Buffer
			if err := b.agent.Usage(t.Context(), &buf); err != nil {
				t.Fatal(err)
			}
			u := new(wire.NodeUsage)
			if err := wire.ReadMessage(&buf, u); err != nil {
				t.Fatal(err)
			}
			if len(u.Pods) != 1 || len(u.Pods[0].Containers) != 1 || u.Pods[0].Name != "a" {
				t.Fatalf("usage %+v", u)
			}
			if c := u.Pods[0].Containers[0]; c.Name != "main" || c.CPUNanos != 250_000_000 || c.MemoryBytes != 3<<20 {
				t.Errorf("container %+v", c)
			}
			return u, time.Since(at)
		}
		if u, took := ask(); took != sampleGap || u.WindowMillis != 1000 {
			t.Errorf("the first took %s, window %d ms", took, u.WindowMillis)
		}
		b.after(20 * time.Second)
		if u, took := ask(); took != 0 || u.WindowMillis != 20000 {
			t.Errorf("the next took %s, window %d ms", took, u.WindowMillis)
		}
		b.after(time.Hour)
		if u, took := ask(); took != sampleGap || u.WindowMillis != 1000 {
			t.Errorf("after an hour it took %s, window %d ms", took, u.WindowMillis)
		}
	})
}
