package node

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// The kernel's word arrives: of the processor here, which a test can make
// scarce; and the watch ends with its context.
func TestStallsWake(t *testing.T) {
	const path = "/proc/pressure/cpu"
	if f, err := os.OpenFile(path, os.O_RDWR, 0); err != nil {
		t.Skipf("SKIPPED, NOTHING TESTED: this kernel has no pressure stall information that can be asked: %v", err)
	} else {
		_ = f.Close()
	}
	procs := 4 * runtime.NumCPU()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
	var over atomic.Bool
	defer over.Store(true)
	for range procs {
		go func() {
			for !over.Load() {
			}
		}()
	}
	ctx, cancel := context.WithCancel(t.Context())
	woken := make(chan struct{}, 1)
	done := make(chan error, 1)
	go func() {
		done <- WatchStalls(ctx, path, "some 100000 2000000", func() {
			select {
			case woken <- struct{}{}:
			default:
			}
		})
	}()
	select {
	case <-woken:
	case err := <-done:
		t.Fatalf("ended before it was told to: %v", err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

func TestStallsThatCannotBeWatched(t *testing.T) {
	if err := WatchStalls(t.Context(), "/nowhere/memory", StallTrigger, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

// A stall makes the agent look at the machine at once, not with the next
// round.
func TestStallMakesTheAgentLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		m := &stubMachine{f: MachineFacts{CPUMilli: 2000, Memory: 1 << 30, Addresses: []string{"192.0.2.1"}}}
		b.c.Machine = m
		var wake func()
		b.c.Stalls = func(ctx context.Context, w func()) error {
			wake = w
			<-ctx.Done()
			return nil
		}
		b.start()
		defer b.stop()
		b.after(2 * machineInterval)
		m.mu.Lock()
		m.f.Addresses = []string{"192.0.2.9"}
		m.mu.Unlock()
		b.after(time.Second - machineInterval/20) // none of the rounds
		before := b.link.node.Status.Addresses[0].Address
		wake()
		b.after(50 * time.Millisecond)
		if now := b.link.node.Status.Addresses[0].Address; before != "192.0.2.1" || now != "192.0.2.9" {
			t.Fatalf("before %s, after %s", before, now)
		}
	})
}
