package cli

import (
	"context"
	"log/slog"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/internal/resident"
)

// thrift keeps the memory of a long-running process small. It returns when
// the context ends.
func thrift(ctx context.Context, log *slog.Logger) {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { paceCollector(ctx) })
	if err := resident.Keep(ctx); err != nil {
		log.Debug("the program's own pages stay in memory until the kernel wants them", "error", err)
	}
}

// paceCollector lets the heap grow by less between two collections the more
// of it is in use, unless the operator set GOGC or GOMEMLIMIT. It returns
// when the context ends.
func paceCollector(ctx context.Context) {
	if os.Getenv("GOMEMLIMIT") != "" || os.Getenv("GOGC") != "" {
		return
	}
	percent := collectorPercent(0)
	debug.SetGCPercent(percent)
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		metrics.Read(live)
		// Setting it stops the world for a moment, so not for small changes.
		if p := collectorPercent(live[0].Value.Uint64()); p > percent+2 || p < percent-2 {
			percent = p
			debug.SetGCPercent(p)
		}
	}
}

// collectorPercent is GOGC for a heap of which so many bytes are in use: 50
// up to 64 MiB, where memory is what a small board lacks and collections cost
// nothing, and then less, down to 20 from 512 MiB on.
func collectorPercent(live uint64) int {
	const most, least, from, to = 50, 20, 64 << 20, 512 << 20
	switch {
	case live <= from:
		return most
	case live >= to:
		return least
	}
	return most - int((live-from)*(most-least)/(to-from))
}
