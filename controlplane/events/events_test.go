package events

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/clock"
)

func newStore(t *testing.T) *registry.Registry {
	t.Helper()
	m, soft := state.NewMachine(state.Options{}), state.NewSoft(1, state.SoftOptions{})
	local := state.NewLocal(m)
	r, err := registry.New(registry.Config{Durable: m, Proposer: local, Soft: soft, SoftProposer: registry.LocalSoft(soft, local)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, registry.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	return r
}

func stored(t *testing.T, r *registry.Registry) (out []*corev1.Event) {
	t.Helper()
	objs, err := r.List(eventGK, "", labels.Everything(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objs {
		out = append(out, o.(*corev1.Event))
	}
	return out
}

func about(name string) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: "default", Name: name, UID: "u"}
}

func TestRepeatsAreCountedAndSimilarOnesCombined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newStore(t)
		s := New(r, Config{Clock: clock.System, Similar: 3, Burst: 100})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		rec := s.For("test-controller")
		for range 5 {
			rec.Event(about("p"), Normal, "Same", "again")
			time.Sleep(time.Second)
		}
		for i := range 6 {
			rec.Event(about("p"), Warning, "Varies", fmt.Sprintf("attempt %d", i))
		}
		rec.Event(corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: "n"}, Normal, "Cluster", "scoped")
		synctest.Wait()
		got := map[string]int32{}
		for _, e := range stored(t, r) {
			got[e.Namespace+" "+e.Reason+" "+e.Message] = e.Count
			if e.Source.Component != "test-controller" || e.ReportingController != "test-controller" {
				t.Errorf("source %+v", e.Source)
			}
		}
		want := map[string]int32{
			"default Same again": 5, "default Varies attempt 0": 1, "default Varies attempt 1": 1, "default Varies attempt 2": 1,
			"default Varies (combined from similar events): attempt 5": 3, "default Cluster scoped": 1,
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("got %v\nwant %v", got, want)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestOneObjectCannotFlood(t *testing.T) {
	a := newAggregator(Config{}.withDefaults())
	now := time.Unix(1000, 0)
	count := func(at time.Time) (n int) {
		for i := range 100 {
			if _, ok := a.observe(Entry{About: about("p"), Reason: "R", Message: fmt.Sprint(i), Time: at}); ok {
				n++
			}
		}
		return n
	}
	if n := count(now); n != 25 {
		t.Fatalf("%d at once", n)
	}
	if n := count(now.Add(3 * time.Minute)); n != 3 {
		t.Fatalf("%d after three minutes", n)
	}
	if _, ok := a.observe(Entry{About: about("other"), Reason: "R", Time: now}); !ok {
		t.Fatal("another object pays for it")
	}
}

func TestQueueIsBoundedAndKeepsTheNewest(t *testing.T) {
	s := New(nil, Config{Queue: 10})
	for i := range 25 {
		s.Add(Entry{Message: fmt.Sprint(i)})
	}
	batch := s.take()
	if len(batch) != 10 || batch[0].Message != "15" || batch[9].Message != "24" || s.Dropped() != 15 {
		t.Fatalf("%d entries from %q, %d dropped", len(batch), batch[0].Message, s.Dropped())
	}
}

func TestTablesAreBounded(t *testing.T) {
	tb := newTable[int, int](3)
	for i := range 10 {
		tb.put(i, i)
		tb.get(7) // stays in use
	}
	if len(tb.m) != 3 {
		t.Fatal(len(tb.m))
	}
	if _, ok := tb.get(7); !ok {
		t.Fatal("the one in use was forgotten")
	}
}

// What is over is not shown any more, and is told again if it comes back.
func TestWhatIsOverIsRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newStore(t)
		s := New(r, Config{Clock: clock.System})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		add := func(host, message string, over bool) {
			s.Add(Entry{About: about("p"), Type: Warning, Reason: "R", Message: message, Component: "c", Host: host, Time: time.Now(), Over: over})
			synctest.Wait()
		}
		want := func(list ...string) {
			t.Helper()
			var got []string
			for _, e := range stored(t, r) {
				got = append(got, fmt.Sprint(e.Source.Host, " ", e.Message, " ", e.Count))
			}
			slices.Sort(got)
			if !slices.Equal(got, list) {
				t.Errorf("got %q, want %q", got, list)
			}
		}
		add("n1", "a", false)
		add("n1", "b", false)
		add("n2", "a", false)
		add("n1", "a", true)
		want("n1 b 1", "n2 a 1")
		add("n1", "a", false)
		want("n1 a 1", "n1 b 1", "n2 a 1")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
