package consensus

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// BenchmarkCommit measures durable commits with some writers at once; bytes
// and fsyncs are counted at the disk.
func BenchmarkCommit(b *testing.B) {
	for _, writers := range []int{1, 16, 64} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			cfg := testConfig(b, b.TempDir())
			cfg.Log = slog.New(slog.DiscardHandler)
			cfg.Disk = &Disk{}
			n := openTest(b, cfg)
			mustPropose(b, n, state.Op{Type: state.OpCreate, Record: object("Namespace", "", "default")})
			before := cfg.Disk.Stats()
			var wg sync.WaitGroup
			b.ResetTimer()
			for w := range writers {
				wg.Go(func() {
					for i := w; i < b.N; i += writers {
						r := object("ConfigMap", "default", fmt.Sprintf("m-%d", i))
						if _, err := n.Propose(context.Background(), []state.Op{{Type: state.OpCreate, Record: r}}); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.StopTimer()
			after := cfg.Disk.Stats()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "commits/s")
			b.ReportMetric(float64(after.Syncs-before.Syncs)/float64(b.N), "fsyncs/commit")
			b.ReportMetric(float64(after.Bytes-before.Bytes)/float64(b.N), "bytes/commit")
			b.ReportMetric(float64(after.SyncP99.Microseconds()), "fsync-p99-µs")
		})
	}
}
