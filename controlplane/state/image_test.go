package state

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"
)

// TestImage: what is written is read back the same, totals and claims
// included, and an unreadable file changes nothing.
func TestImage(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m, l := newCluster(t)
		node := newNode("n1", 100_000, 1000)
		must(t, l, create(node))
		n := rapid.IntRange(0, 60).Draw(rt, "pods")
		for i := range n {
			p := newPod(fmt.Sprintf("p-%03d", i), int64(rapid.IntRange(0, 50).Draw(rt, "cpu")))
			p.Header.Claims = []string{fmt.Sprintf("c/%d", i)}
			p.Header.HostPorts = []HostPort{{Protocol: "TCP", Port: int32(i + 1)}}
			p.Spec.Data = make([]byte, rapid.SampledFrom([]int{0, 10, 5000, 40_000}).Draw(rt, "size"))
			must(t, l, create(p))
			if rapid.Bool().Draw(rt, "bind") {
				must(t, l, bindOp(p, node))
			}
		}
		path := filepath.Join(t.TempDir(), "image")
		if err := m.Image().Write(path); err != nil {
			rt.Fatal(err)
		}
		if err := m.Image().Write(path); err == nil {
			rt.Error("an existing file was overwritten")
		}
		other := NewMachine(Options{})
		if err := other.Restore(path); err != nil {
			rt.Fatal(err)
		}
		compareMachines(rt, m, other)
		// Both go on alike.
		p := newPod("next", 10)
		for _, l := range []*Local{l, NewLocal(other)} {
			propose(t, l, create(p), bindOp(p, node))
		}
		compareMachines(rt, m, other)
		if err := other.Restore(filepath.Join(t.TempDir(), "none")); err == nil {
			rt.Error("restored from nothing")
		}
		compareMachines(rt, m, other)
		if _, err := other.Watch(kindPod, "", 1); !errors.Is(err, ErrTooOld) {
			rt.Errorf("watch from before the snapshot: %v", err)
		}
	})
}

func compareMachines(t *rapid.T, a, b *Machine) {
	x, err := a.Hash()
	if err != nil {
		t.Fatal(err)
	}
	if y, err := b.Hash(); err != nil || x != y {
		t.Fatalf("hashes differ: %v", err)
	}
	p, _ := a.Snapshot().NodeTotals("n1")
	q, _ := b.Snapshot().NodeTotals("n1")
	for i := range max(len(p), len(q)) {
		if p[i] != q[i] {
			t.Fatalf("totals %v and %v", p, q)
		}
	}
	if a.Bytes() != b.Bytes() {
		t.Fatalf("bytes %d and %d", a.Bytes(), b.Bytes())
	}
}

func TestBodiesAreShared(t *testing.T) {
	m, l := newCluster(t)
	for i := range 10 {
		p := newPod(fmt.Sprintf("p-%d", i), 1)
		p.Spec.Data = []byte("one template")
		must(t, l, create(p))
	}
	if n := len(m.t.bodies); n != 2 { // the namespace's and the template's
		t.Errorf("%d bodies", n)
	}
	var first *Body
	m.Snapshot().Range(kindPod, "", Key{}, func(r *Record) bool {
		if first == nil {
			first = r.Spec
		}
		if r.Spec != first {
			t.Errorf("%s has its own copy", r.Header.Key.Name)
		}
		return true
	})
	for i := range 10 {
		p := newPod(fmt.Sprintf("p-%d", i), 1)
		must(t, l, Op{Type: OpDelete, Key: &p.Header.Key, UID: p.Header.UID})
	}
	if n := len(m.t.bodies); n != 1 {
		t.Errorf("%d bodies are left", n)
	}
}

func TestRangePages(t *testing.T) {
	m, l := newCluster(t)
	must(t, l, create(object(kindNamespace, "", "other")))
	for _, ns := range []string{"default", "other"} {
		for i := range 10 {
			must(t, l, create(object("ConfigMap", ns, fmt.Sprintf("c-%d", i))))
		}
	}
	for ns, want := range map[string]int{"": 20, "default": 10, "other": 10, "none": 0} {
		var after Key
		n := 0
		for pages := 0; pages < 10; pages++ {
			got := 0
			m.Snapshot().Range("ConfigMap", ns, after, func(r *Record) bool {
				got++
				after = r.Header.Key
				return got < 3
			})
			n += got
			if got == 0 {
				break
			}
		}
		if n != want || m.Snapshot().Len("ConfigMap", ns) != want {
			t.Errorf("namespace %q: %d in pages, Len %d, want %d", ns, n, m.Snapshot().Len("ConfigMap", ns), want)
		}
	}
}

// TestHalts: an entry of a newer version stops this replica for good and
// changes nothing.
func TestHalts(t *testing.T) {
	m, _ := newCluster(t)
	before, err := m.Hash()
	if err != nil {
		t.Fatal(err)
	}
	b, err := codec.enc.Marshal(entry{Version: EntryVersion, Ops: []Op{{Type: OpRecover}, {Type: opLast + 1}}})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := m.Apply(1, b); !errors.Is(err, ErrUnknownOp) {
			t.Errorf("applied: %v", err)
		}
	}
	good, err := EncodeEntry([]Op{{Type: OpRecover}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Apply(1, good); !errors.Is(err, ErrUnknownOp) {
		t.Errorf("went on: %v", err)
	}
	if after, _ := m.Hash(); after != before {
		t.Error("the state changed")
	}
}
