package state

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

func object(kind, ns, name string) *Record {
	return &Record{
		Header: Header{Key: Key{Kind: kind, Namespace: ns, Name: name}, APIVersion: "v1", UID: "uid-" + kind + "-" + ns + "-" + name},
		Spec:   &Body{Codec: CodecKubeCBOR, Data: []byte("spec of " + name)},
	}
}

// propose applies ops to a Local and fails the test on an error.
func propose(t *testing.T, p Proposer, ops ...Op) []Result {
	t.Helper()
	res, err := p.Propose(context.Background(), ops)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func must(t *testing.T, p Proposer, ops ...Op) []Result {
	t.Helper()
	res := propose(t, p, ops...)
	for i, r := range res {
		if r.Reason != ReasonNone {
			t.Fatalf("op %d refused: %d %s", i, r.Reason, r.Detail)
		}
	}
	return res
}

func newNode(name string, cpu, pods int64) *Record {
	r := object(kindNode, "", name)
	r.Header.Allocatable = []Quantity{{"cpu", cpu}, {"pods", pods}}
	return r
}

func newPod(name string, cpu int64) *Record {
	r := object(kindPod, "default", name)
	r.Header.Phase = PodPending
	r.Header.Requests = []Quantity{{"cpu", cpu}, {"pods", 1}}
	return r
}

func create(r *Record) Op { return Op{Type: OpCreate, Record: r} }

func bindOp(pod, node *Record) Op {
	return Op{Type: OpBind, Key: &pod.Header.Key, UID: pod.Header.UID, Node: node.Header.Key.Name, NodeUID: node.Header.UID}
}

func newCluster(t *testing.T) (*Machine, *Local) {
	t.Helper()
	m := NewMachine(Options{})
	l := NewLocal(m)
	must(t, l, Op{Type: OpBootstrap, ClusterID: "c", Feature: 1}, create(object(kindNamespace, "", "default")))
	return m, l
}

func TestApply(t *testing.T) {
	m, l := newCluster(t)
	node := newNode("n1", 1000, 2)
	a, b, c := newPod("a", 600), newPod("b", 600), newPod("c", 100)
	b.Header.HostPorts = []HostPort{{Protocol: "TCP", Port: 80}}
	must(t, l, create(node), create(a), create(b), create(c))
	must(t, l, bindOp(a, node))
	res := propose(t, l, bindOp(b, node), bindOp(a, node), bindOp(c, node))
	if res[0].Reason != ReasonNoFit || res[0].Detail != "cpu: needs 600, free 400 of 1000" {
		t.Errorf("bind b: %+v", res[0])
	}
	if res[1].Reason != ReasonBound || res[2].Reason != ReasonNone {
		t.Errorf("bind again: %+v; bind c: %+v", res[1], res[2])
	}
	got, ok := m.Snapshot().NodeTotals("n1")
	if !ok || len(got) != 2 || got[0] != (Quantity{"cpu", 700}) || got[1] != (Quantity{"pods", 2}) {
		t.Errorf("totals: %v", got)
	}
	n := 0
	m.Snapshot().PodsOnNode("n1", func(*Record) bool { n++; return true })
	if n != 2 {
		t.Errorf("%d pods on the node", n)
	}
	// A terminal pod takes no room.
	done, _ := m.Snapshot().Get(a.Header.Key)
	fin := *done
	fin.Header.Phase = PodSucceeded
	must(t, l, Op{Type: OpUpdate, Record: &fin, UID: fin.Header.UID, ResourceVersion: done.Header.ResourceVersion})
	must(t, l, bindOp(b, node))
	other := newPod("ghost", 1)
	other.Header.Key.Namespace = "nowhere"
	if res := propose(t, l, create(other)); res[0].Reason != ReasonNamespace {
		t.Errorf("create in a missing namespace: %+v", res[0])
	}
}

func TestSnapshotIsImmutable(t *testing.T) {
	m, l := newCluster(t)
	must(t, l, create(newPod("a", 1)))
	before := m.Snapshot()
	must(t, l, create(newPod("b", 1)), Op{Type: OpDelete, Key: &Key{kindPod, "default", "a"}, UID: newPod("a", 1).Header.UID})
	if before.Len(kindPod, "") != 1 || m.Snapshot().Len(kindPod, "") != 1 {
		t.Error("lengths differ")
	}
	if _, ok := before.Get(Key{kindPod, "default", "a"}); !ok {
		t.Error("the old snapshot lost its record")
	}
	if _, ok := before.Get(Key{kindPod, "default", "b"}); ok {
		t.Error("the old snapshot gained a record")
	}
}

func TestWatch(t *testing.T) {
	m, l := newCluster(t)
	from := m.Snapshot().ResourceVersion()
	w, err := m.Watch(kindPod, "default", from)
	if err != nil {
		t.Fatal(err)
	}
	must(t, l, create(newPod("a", 1)), create(newNode("n", 1, 1)), create(newPod("b", 1)))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	batch, at, err := w.Next(ctx)
	if err != nil || len(batch) != 2 || batch[0].Record.Header.Key.Name != "a" || at != m.Snapshot().ResourceVersion() {
		t.Fatalf("batch %v at %d: %v", batch, at, err)
	}
	must(t, l, Op{Type: OpRecover})
	if _, _, err := w.Next(ctx); !errors.Is(err, ErrTooOld) {
		t.Errorf("after a recovery: %v", err)
	}
	if _, err := m.Watch(kindPod, "", from); !errors.Is(err, ErrTooOld) {
		t.Errorf("old watch after a recovery: %v", err)
	}
	if got := m.Facts().Epoch; got != 2 {
		t.Errorf("epoch %d", got)
	}
}

// Each recovery gives up the versions that it skips; steps at once are one.
func TestRecoveriesTellWhatIsLost(t *testing.T) {
	m, l := newCluster(t)
	must(t, l, create(newPod("a", 1)))
	first := m.Snapshot().ResourceVersion()
	must(t, l, Op{Type: OpRecover})
	view := m.Facts().Lost
	must(t, l, Op{Type: OpRecover}, create(newPod("b", 1)))
	second := m.Snapshot().ResourceVersion()
	if want := []Lost{{Epoch: 3, After: first, Before: first + 2<<32}}; !slices.Equal(m.Facts().Lost, want) || second != want[0].Before+1 {
		t.Fatalf("lost %v at %d, want %v", m.Facts().Lost, second, want)
	}
	if want := []Lost{{Epoch: 2, After: first, Before: first + 1<<32}}; !slices.Equal(view, want) {
		t.Errorf("an older view changed: %v", view)
	}
	must(t, l, Op{Type: OpRecover})
	if got := m.Facts().Lost; len(got) != 2 || got[1] != (Lost{Epoch: 4, After: second, Before: second + 1<<32}) {
		t.Errorf("lost %v after %d", got, second)
	}
	for i := range maxLost {
		must(t, l, create(newPod(fmt.Sprint("p", i), 1)), Op{Type: OpRecover})
	}
	if got := m.Facts().Lost; len(got) != maxLost || got[maxLost-1].Epoch != m.Facts().Epoch {
		t.Errorf("%d are kept, the last of epoch %d", len(got), got[len(got)-1].Epoch)
	}
}
