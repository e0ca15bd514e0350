package wasm

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// shm is a run folder as on a machine: in memory.
func shm(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "dunlin-bench-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// BenchmarkStartToFirstLine is the agent told to start, until the guest's
// first line stands in its log: module and code in the cache, control group
// (as root), seccomp and landlock. Target: 25 ms for the C guest.
func BenchmarkStartToFirstLine(b *testing.B) {
	for _, module := range []string{"print", "chello"} {
		b.Run(module, func(b *testing.B) {
			r := newBench(b, benchConfig(b))
			r.ticker = 100 * time.Microsecond
			spec := r.spec(module, module)
			var took []time.Duration
			for i := range b.N {
				s := spec
				s.ID.Attempt = i
				s.LogPath = filepath.Join(r.logs, strconv.Itoa(i), "0.log")
				begin := time.Now()
				r.start(s)
				r.says(s, "hello")
				took = append(took, time.Since(begin))
				b.StopTimer()
				if err := r.Remove(context.Background(), s.ID); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[0].Microseconds())/1000, "min-ms")
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
		})
	}
}

func benchConfig(b *testing.B) func(*Config) {
	binary, run := slimHost(b), shm(b)
	groups := func(*Config) {}
	if os.Geteuid() == 0 {
		groups = withCgroups(b)
	}
	return func(c *Config) {
		c.HostBinary, c.RunDir = binary, run
		groups(c)
	}
}

// BenchmarkIdlePods prints what one more idle Wasm pod costs: 20 of them,
// PSS from smaps_rollup; run it with -benchtime 1x. Target: 2.5 MiB for the C
// guest.
func BenchmarkIdlePods(b *testing.B) {
	const pods = 20
	for _, module := range []string{"sleep", "chello"} {
		b.Run(module, func(b *testing.B) {
			r := newBench(b, benchConfig(b))
			for range b.N {
				var ids []workload.ID
				var pss uint64
				for i := range pods {
					s := r.spec(module, fmt.Sprintf("%s-%d", module, i))
					s.Resources = workload.Resources{MemoryLimit: 32 << 20}
					r.start(s)
					r.says(s, map[string]string{"sleep": "sleeping", "chello": "hello"}[module])
					ids = append(ids, s.ID)
				}
				for _, id := range ids {
					st, _, err := r.State(context.Background(), id)
					if err != nil {
						b.Fatal(err)
					}
					pss += PSS(b, st.PID)
				}
				for _, id := range ids {
					if err := r.Remove(context.Background(), id); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(pss)/pods/1024, "PSS-KiB/pod")
			}
		})
	}
}

// PSS is a process's proportional set size in bytes.
func PSS(t testing.TB, pid int) uint64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	sc := bufio.NewScanner(bytes.NewReader(text))
	for sc.Scan() {
		if v, ok := strings.CutPrefix(sc.Text(), "Pss:"); ok {
			kib, err := strconv.ParseUint(strings.Fields(v)[0], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatalf("no Pss of %d", pid)
	return 0
}
