package registry

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// slow is a disk that takes its time for each commit.
type slow struct {
	state.Proposer
	takes time.Duration
}

func (s slow) Propose(ctx context.Context, ops []state.Op) ([]state.Result, error) {
	time.Sleep(s.takes)
	return s.Proposer.Propose(ctx, ops)
}

// Writers of one object that come at once all succeed, and each decides about
// twice: once beside the others, once when it is its turn; also where few may
// compute at a time.
func TestManyWritersOfOneObject(t *testing.T) {
	t.Run("all at once", func(t *testing.T) { manyWriters(t, 0) })
	t.Run("two compute", func(t *testing.T) { manyWriters(t, 2) })
}

func manyWriters(t *testing.T, places int) {
	const many, commit = 100, 5 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, func(c *Config) { c.Proposer = slow{c.Proposer, commit} })
		w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "c"}})
		do := func(ctx context.Context, f func(context.Context)) { f(ctx) }
		if places > 0 {
			do = make(Turns, places).Do
		}
		var decided atomic.Int64
		failed := make(chan error, many)
		start := time.Now()
		for i := range many {
			go func() {
				var err error
				do(t.Context(), func(ctx context.Context) {
					_, err = w.Update(ctx, cmGK, "default", "c", Main, func(o runtime.Object) (runtime.Object, error) {
						decided.Add(1)
						c, ok := o.(*corev1.ConfigMap)
						if !ok {
							return nil, fmt.Errorf("%T", o)
						}
						if c.Data == nil {
							c.Data = map[string]string{}
						}
						c.Data[fmt.Sprint("k", i)] = "v"
						return c, nil
					}, WriteOptions{})
				})
				failed <- err
			}()
		}
		for range many {
			if err := <-failed; err != nil {
				t.Error(err)
			}
		}
		took := time.Since(start)
		o, err := w.Get(cmGK, "default", "c")
		c := as[*corev1.ConfigMap](t, o, err)
		if len(c.Data) != many {
			t.Errorf("%d of %d writes", len(c.Data), many)
		}
		if n := decided.Load(); n > 2*many {
			t.Errorf("%d decisions for %d writes", n, many)
		}
		if took > (many+2)*commit {
			t.Errorf("%s for %d commits of %s", took, many, commit)
		}
		if len(w.writers.of) != 0 {
			t.Errorf("%d turns are left", len(w.writers.of))
		}
	})
}

// Who is tired of waiting for its turn leaves nothing behind.
func TestATurnThatIsNotTaken(t *testing.T) {
	var ts writers
	key := state.Key{Kind: "ConfigMap", Namespace: "default", Name: "c"}
	done, err := ts.take(t.Context(), key)
	if err != nil || !ts.contended(key) || ts.contended(state.Key{Kind: "ConfigMap", Namespace: "default", Name: "d"}) {
		t.Fatalf("%v, contended %v", err, ts.contended(key))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := ts.take(ctx, key); err == nil {
		t.Fatal("two have it")
	}
	done()
	if ts.contended(key) || len(ts.of) != 0 {
		t.Errorf("left: %v", ts.of)
	}
}
