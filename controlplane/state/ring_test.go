package state

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// small returns a machine with a ring of a few events.
func small(t *testing.T, bytes int64) (*Machine, *Local) {
	t.Helper()
	m := NewMachine(Options{RingBytes: bytes})
	l := NewLocal(m)
	must(t, l, Op{Type: OpBootstrap, ClusterID: "c", Feature: 1}, create(object(kindNamespace, "", "default")))
	return m, l
}

func TestRingIsBounded(t *testing.T) {
	m, l := small(t, 20*headerBytes)
	start := m.Snapshot().ResourceVersion()
	slow, err := m.Watch(kindPod, "", start)
	if err != nil {
		t.Fatal(err)
	}
	idle, err := m.Watch(kindNode, "", start)
	if err != nil {
		t.Fatal(err)
	}
	every, err := m.Watch("", "", start)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		must(t, l, create(newPod(fmt.Sprintf("p-%d", i), 1)))
	}
	if m.ring.bytes > m.ring.limit {
		t.Errorf("%d bytes, limit %d", m.ring.bytes, m.ring.limit)
	}
	ctx := t.Context()
	if _, _, err := slow.Next(ctx); !errors.Is(err, ErrTooOld) {
		t.Errorf("slow watcher: %v", err)
	}
	if _, _, err := every.Next(ctx); !errors.Is(err, ErrTooOld) {
		t.Errorf("slow watcher of everything: %v", err)
	}
	// A watcher of a quiet kind has missed nothing.
	must(t, l, create(newNode("n", 1, 1)))
	if batch, _, err := idle.Next(ctx); err != nil || len(batch) != 1 {
		t.Errorf("watcher of a quiet kind: %v %v", batch, err)
	}
	if _, err := m.Watch(kindPod, "", start); !errors.Is(err, ErrTooOld) {
		t.Errorf("late watch: %v", err)
	}
	if _, err := m.Watch(kindPod, "", m.Snapshot().ResourceVersion()-5); err != nil {
		t.Errorf("recent watch: %v", err)
	}
}

// TestWatchSeesEverything: list at a version and watch from it, at any
// moment, gives the state of any later moment.
func TestWatchSeesEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, l := newCluster(t)
		ctx, cancel := context.WithCancel(t.Context())
		const watchers, pods = 8, 300
		finals := make(chan map[string]uint64, watchers)
		for range watchers {
			go func() {
				s := m.Snapshot()
				seen := map[string]uint64{}
				s.Range(kindPod, "default", Key{}, func(r *Record) bool {
					seen[r.Header.Key.Name] = r.Header.ResourceVersion
					return true
				})
				w, err := m.Watch(kindPod, "default", s.ResourceVersion())
				if err != nil {
					t.Error(err)
				}
				for {
					batch, _, err := w.Next(ctx)
					if err != nil {
						finals <- seen
						return
					}
					for _, e := range batch {
						name := e.Record.Header.Key.Name
						if _, had := seen[name]; had == (e.Type == Added) {
							t.Errorf("%s: event %d, known %v", name, e.Type, had)
						}
						if e.Type == Deleted {
							delete(seen, name)
							continue
						}
						seen[name] = e.ResourceVersion
					}
				}
			}()
		}
		for i := range pods {
			p := newPod(fmt.Sprintf("p-%d", i%50), 1)
			k := p.Header.Key
			if old, ok := m.Snapshot().Get(k); ok {
				must(t, l, Op{Type: OpDelete, Key: &k, UID: old.Header.UID})
			} else {
				must(t, l, create(p))
			}
			if i%7 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		time.Sleep(time.Second)
		cancel()
		want := m.Snapshot().Len(kindPod, "")
		for range watchers {
			if seen := <-finals; len(seen) != want {
				t.Errorf("a watcher knows %d pods of %d", len(seen), want)
			}
		}
	})
}

func TestIdleWatchProgresses(t *testing.T) {
	m, l := newCluster(t)
	w, err := m.Watch(kindNode, "", m.Snapshot().ResourceVersion())
	if err != nil {
		t.Fatal(err)
	}
	must(t, l, create(newPod("p", 1)), Op{Type: OpTimeFloor, Unix: 5})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, at, err := w.Next(ctx)
	if !errors.Is(err, context.Canceled) || at != m.Snapshot().ResourceVersion() {
		t.Errorf("at %d of %d: %v", at, m.Snapshot().ResourceVersion(), err)
	}
}

func TestSoft(t *testing.T) {
	s := NewSoft(3, SoftOptions{Limits: map[string]Limit{"Event": {Count: 3, Bytes: 1 << 20}}})
	start := s.Snapshot().ResourceVersion()
	if start != 3<<32 {
		t.Errorf("starts at %d", start)
	}
	w, err := s.Watch("Event", "", start)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if res := s.Put(object("Event", "default", fmt.Sprintf("e-%d", i))); res.Reason != ReasonNone {
			t.Fatalf("%+v", res)
		}
	}
	if n := s.Snapshot().Len("Event", ""); n != 3 {
		t.Errorf("%d events", n)
	}
	if _, ok := s.Snapshot().Get(Key{"Event", "default", "e-1"}); ok {
		t.Error("the oldest was kept")
	}
	batch, _, err := w.Next(t.Context())
	if err != nil || len(batch) != 7 {
		t.Errorf("%d events seen, %v", len(batch), err)
	}
	lease := object("Lease.coordination.k8s.io", "kube-node-lease", "n1")
	first := s.PutIf(lease, "", 0)
	if first.Reason != ReasonNone || s.PutIf(lease, "", 0).Reason != ReasonExists {
		t.Errorf("%+v", first)
	}
	if res := s.PutIf(lease, lease.Header.UID, first.ResourceVersion+1); res.Reason != ReasonConflict {
		t.Errorf("%+v", res)
	}
	if res := s.PutIf(lease, "other", 0); res.Reason != ReasonUID {
		t.Errorf("%+v", res)
	}
	if res := s.PutIf(lease, lease.Header.UID, first.ResourceVersion); res.Reason != ReasonNone {
		t.Errorf("%+v", res)
	}
	if res := s.Delete(lease.Header.Key, lease.Header.UID, 0); res.Reason != ReasonNone {
		t.Errorf("%+v", res)
	}
	s.Reset(4)
	if _, _, err := w.Next(t.Context()); !errors.Is(err, ErrTooOld) {
		t.Errorf("after a new leadership: %v", err)
	}
	if n := s.Snapshot().Len("Event", ""); n != 0 {
		t.Errorf("%d events after a reset", n)
	}
}
