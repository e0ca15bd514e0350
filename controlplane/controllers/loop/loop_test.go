package loop

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

func TestQueueDeduplicatesAndKeepsOrder(t *testing.T) {
	q := NewQueue[string](0, Backoff{})
	for _, k := range []string{"a", "b", "a", "c", "b"} {
		q.Add(k)
	}
	var got string
	for {
		k, ok := q.TryGet()
		if !ok {
			break
		}
		got += k
		q.Done(k)
	}
	if got != "abc" {
		t.Fatal(got)
	}
}

func TestKeyAddedWhileHeldComesBack(t *testing.T) {
	q := NewQueue[string](0, Backoff{})
	q.Add("a")
	k, _ := q.TryGet()
	q.Add("a")
	q.Add("a")
	if _, ok := q.TryGet(); ok {
		t.Fatal("one key held by two workers")
	}
	q.Done(k)
	if k, ok := q.TryGet(); !ok || k != "a" {
		t.Fatal("lost")
	}
	q.Done("a")
	if _, ok := q.TryGet(); ok {
		t.Fatal("came back twice")
	}
}

func TestDelays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue[string](0, Backoff{})
		start := time.Now()
		q.AddAfter("late", 10*time.Second)
		q.AddAfter("late", 20*time.Second) // no later than it was
		q.AddAfter("soon", 5*time.Second)
		q.AddAfter("now", time.Hour)
		q.Add("now")
		for _, want := range []struct {
			key string
			at  time.Duration
		}{{"now", 0}, {"soon", 5 * time.Second}, {"late", 10 * time.Second}} {
			k, ok := q.Get(t.Context())
			if !ok || k != want.key || time.Since(start) != want.at {
				t.Fatalf("%s after %v, want %+v", k, time.Since(start), want)
			}
			q.Done(k)
		}
		if q.Len() != 0 {
			t.Fatal("something is left")
		}
	})
}

func TestBackoffGrowsIsBoundedAndForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue[string](0, Backoff{Base: time.Second, Max: 8 * time.Second})
		for _, want := range []time.Duration{1, 2, 4, 8, 8, 8} {
			if d := q.AddFailed("k"); d != want*time.Second {
				t.Fatalf("delay %v, want %v", d, want*time.Second)
			}
			k, _ := q.Get(t.Context())
			q.Done(k)
		}
		q.Forget("k")
		if d := q.AddFailed("k"); d != time.Second {
			t.Fatalf("after Forget: %v", d)
		}
	})
}

func TestJitterSpreads(t *testing.T) {
	for _, r := range []float64{0, 0.5, 0.999} {
		b := Backoff{Base: time.Second, Rand: func() float64 { return r }}
		if d := b.Delay(1); d < 800*time.Millisecond || d > 1200*time.Millisecond {
			t.Fatal(d)
		}
	}
}

func TestOverflowAsksForARelist(t *testing.T) {
	q := NewQueue[int](10, Backoff{})
	for i := range 50 {
		q.Add(i)
	}
	if q.Len() != 10 {
		t.Fatal(q.Len())
	}
	if q.Overflowed() {
		t.Fatal("no room yet")
	}
	for range 6 {
		k, _ := q.TryGet()
		q.Done(k)
	}
	if !q.Overflowed() {
		t.Fatal("the refused keys are forgotten")
	}
	if q.Overflowed() {
		t.Fatal("asked twice")
	}
}

func TestCloseEndsGet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := NewQueue[int](0, Backoff{})
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if _, ok := q.Get(t.Context()); ok {
					t.Error("got a key")
				}
			})
		}
		synctest.Wait()
		q.Close()
		wg.Wait()
	})
}

// store is a Machine without its registry: records are put by key.
type store struct {
	*state.Machine
	local *state.Local
	t     *testing.T
}

func newStore(t *testing.T, o state.Options) *store {
	m := state.NewMachine(o)
	return &store{m, state.NewLocal(m), t}
}

func (s *store) put(name string) {
	s.t.Helper()
	_, err := s.local.Propose(context.Background(), []state.Op{{Type: state.OpCreate, Record: &state.Record{
		Header: state.Header{Version: state.HeaderVersion, Key: state.Key{Kind: "Thing", Name: name}, UID: "uid-" + name},
		Spec:   &state.Body{Codec: state.CodecKubeCBOR, Data: make([]byte, 256)},
	}}})
	if err != nil {
		s.t.Fatal(err)
	}
}

func run(t *testing.T, s *store, m *Metrics, c *Controller) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	env := Env{Reader: s, Log: slog.New(slog.DiscardHandler), Rand: func() float64 { return 0.5 }}
	go func() { done <- Run(ctx, env, m, c) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestFourOutcomesAndPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, state.Options{})
		for _, n := range []string{"done", "after", "error", "terminal", "panic"} {
			s.put(n)
		}
		var mu sync.Mutex
		count := map[string]int{}
		reg := prometheus.NewRegistry()
		m := NewMetrics(reg)
		stop := run(t, s, m, &Controller{Name: "c", Workers: 2, Sources: []Source{Self("Thing")}, Backoff: Backoff{Base: 10 * time.Second, Max: 10 * time.Second},
			Reconcile: func(_ context.Context, k state.Key) (time.Duration, error) {
				mu.Lock()
				defer mu.Unlock()
				count[k.Name]++
				switch k.Name {
				case "after":
					return 10 * time.Second, nil
				case "error":
					return 0, errors.New("no")
				case "terminal":
					return 0, Terminal(errors.New("never"))
				case "panic":
					panic("boom")
				}
				return 0, nil
			}})
		time.Sleep(35 * time.Second)
		synctest.Wait()
		mu.Lock()
		if fmt.Sprint(count) != "map[after:4 done:1 error:4 panic:4 terminal:1]" {
			t.Errorf("reconciles: %v", count)
		}
		mu.Unlock()
		queues := func() (depth, delayed float64) {
			t.Helper()
			families, err := reg.Gather()
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range families {
				switch f.GetName() {
				case "dunlin_controller_queue_depth":
					depth = f.GetMetric()[0].GetGauge().GetValue()
				case "dunlin_controller_queue_delayed":
					delayed = f.GetMetric()[0].GetGauge().GetValue()
				}
			}
			return depth, delayed
		}
		if depth, delayed := queues(); depth != 0 || delayed != 3 { // after, error and panic come again
			t.Errorf("%v keys wait and %v come later, want 0 and 3", depth, delayed)
		}
		stop()
		if depth, delayed := queues(); depth != 0 || delayed != 0 {
			t.Errorf("after the term %v keys wait and %v come later", depth, delayed)
		}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		counted := map[string]float64{}
		for _, f := range families {
			if f.GetName() == "dunlin_controller_reconcile_total" {
				for _, x := range f.GetMetric() {
					counted[x.GetLabel()[1].GetValue()] = x.GetCounter().GetValue()
				}
			}
		}
		if counted[outcomeError] != 8 || counted[outcomeTerminal] != 1 || counted[outcomeAfter] != 4 || counted[outcomeDone] != 1 {
			t.Errorf("counted %v", counted)
		}
	})
}

func TestEventsAndResync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, state.Options{})
		s.put("first")
		var n atomic.Int64
		stop := run(t, s, nil, &Controller{Name: "c", Sources: []Source{Self("Thing")},
			Reconcile: func(context.Context, state.Key) (time.Duration, error) { n.Add(1); return 0, nil }})
		synctest.Wait()
		if n.Load() != 1 {
			t.Fatalf("%d after the first list", n.Load())
		}
		s.put("second")
		synctest.Wait()
		if n.Load() != 2 {
			t.Fatalf("%d after an event", n.Load())
		}
		time.Sleep(resyncEvery + time.Second)
		synctest.Wait()
		if n.Load() != 4 {
			t.Fatalf("%d after the resync", n.Load())
		}
		stop()
	})
}

// A feeder that fell out of the ring lists anew and misses nothing.
func TestTooOldRelists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, state.Options{RingBytes: 4 << 10})
		var mu sync.Mutex
		seen := map[string]bool{}
		slow := make(chan struct{})
		first := true
		stop := run(t, s, nil, &Controller{Name: "c", Sources: []Source{{Kind: "Thing", Keys: func(ev state.Event, add func(state.Key)) {
			if first {
				first = false
				<-slow // meanwhile the ring moves on
			}
			add(ev.Record.Header.Key)
		}}}, Reconcile: func(_ context.Context, k state.Key) (time.Duration, error) {
			mu.Lock()
			defer mu.Unlock()
			seen[k.Name] = true
			return 0, nil
		}})
		synctest.Wait()
		for i := range 300 {
			s.put(fmt.Sprint(i))
		}
		close(slow)
		synctest.Wait()
		mu.Lock()
		if len(seen) != 300 {
			t.Errorf("saw %d of 300", len(seen))
		}
		mu.Unlock()
		stop()
	})
}

// Keys that did not fit into the queue come with a relist.
func TestOverflowedQueueMissesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, state.Options{})
		for i := range 100 {
			s.put(fmt.Sprint(i))
		}
		var mu sync.Mutex
		seen := map[string]bool{}
		stop := run(t, s, nil, &Controller{Name: "c", Limit: 8, Sources: []Source{Self("Thing")},
			Reconcile: func(_ context.Context, k state.Key) (time.Duration, error) {
				time.Sleep(time.Millisecond)
				mu.Lock()
				defer mu.Unlock()
				seen[k.Name] = true
				return 0, nil
			}})
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		mu.Lock()
		if len(seen) != 100 {
			t.Errorf("saw %d of 100", len(seen))
		}
		mu.Unlock()
		stop()
	})
}
