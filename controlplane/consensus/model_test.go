package consensus

import (
	"cmp"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

var modelOps = flag.Int("model.ops", 10_000, "random operations of TestModel")

// model is the plain thing that the state must be equal to: a map, and
// totals that are summed up anew each time.
type model struct {
	objects map[state.Key]*state.Record
	rv      uint64
}

func (m *model) byUID(uid string) bool {
	for _, r := range m.objects {
		if r.Header.UID == uid {
			return true
		}
	}
	return false
}

func (m *model) claimed(c string, but state.Key) bool {
	for k, r := range m.objects {
		if k != but && slices.Contains(r.Header.Claims, c) {
			return true
		}
	}
	return false
}

func (m *model) taken(node string) (cpu int64, ports []int32) {
	for _, r := range m.objects {
		h := &r.Header
		if h.Key.Kind != "Pod" || h.NodeName != node || h.Phase == "Succeeded" || h.Phase == "Failed" {
			continue
		}
		cpu += h.Requests[0].Value
		for _, p := range h.HostPorts {
			ports = append(ports, p.Port)
		}
	}
	return cpu, ports
}

// apply returns the reason that the op must get, and applies it.
func (m *model) apply(o *state.Op) state.Reason {
	switch o.Type {
	case state.OpCreate:
		return m.create(o)
	case state.OpUpdate:
		old, reason := m.find(o.Record.Header.Key, o)
		switch {
		case reason != state.ReasonNone:
			return reason
		case old.Header.Deleted != 0 && o.Record.Header.Deleted == 0, old.Header.NodeName != o.Record.Header.NodeName:
			return state.ReasonConflict
		}
		for _, c := range o.Record.Header.Claims {
			if m.claimed(c, old.Header.Key) {
				return state.ReasonClaim
			}
		}
		r := *o.Record
		if o.Keep&state.KeepSpec != 0 {
			r.Spec = old.Spec
		}
		return m.set(&r)
	case state.OpDelete:
		old, reason := m.find(*o.Key, o)
		if reason != state.ReasonNone {
			return reason
		}
		if len(old.Header.Finalizers) > 0 {
			return state.ReasonFinalizers
		}
		delete(m.objects, *o.Key)
		m.rv++
		return state.ReasonNone
	case state.OpBind:
		return m.bind(o)
	}
	panic("unknown op")
}

func (m *model) set(r *state.Record) state.Reason {
	m.rv++
	r.Header.ResourceVersion = m.rv
	r.Header.Version = state.HeaderVersion
	m.objects[r.Header.Key] = r
	return state.ReasonNone
}

func (m *model) create(o *state.Op) state.Reason {
	k := o.Record.Header.Key
	switch {
	case m.objects[k] != nil:
		return state.ReasonExists
	case m.byUID(o.Record.Header.UID):
		return state.ReasonInvalid
	}
	if k.Namespace != "" {
		ns := m.objects[state.Key{Kind: "Namespace", Name: k.Namespace}]
		if ns == nil || ns.Header.Deleted != 0 {
			return state.ReasonNamespace
		}
	}
	for _, c := range o.Record.Header.Claims {
		if m.claimed(c, k) {
			return state.ReasonClaim
		}
	}
	r := *o.Record
	return m.set(&r)
}

func (m *model) find(k state.Key, o *state.Op) (*state.Record, state.Reason) {
	old := m.objects[k]
	switch {
	case old == nil:
		return nil, state.ReasonNotFound
	case old.Header.UID != o.UID:
		return nil, state.ReasonUID
	case o.ResourceVersion != 0 && o.ResourceVersion != old.Header.ResourceVersion:
		return nil, state.ReasonConflict
	}
	return old, state.ReasonNone
}

func (m *model) bind(o *state.Op) state.Reason {
	pod, reason := m.find(*o.Key, o)
	if reason != state.ReasonNone {
		return reason
	}
	node := m.objects[state.Key{Kind: "Node", Name: o.Node}]
	h := &pod.Header
	switch {
	case h.NodeName != "":
		return state.ReasonBound
	case h.Deleted != 0:
		return state.ReasonDeleting
	case h.Phase == "Succeeded" || h.Phase == "Failed":
		return state.ReasonConflict
	case node == nil || node.Header.UID != o.NodeUID:
		return state.ReasonNoNode
	case node.Header.Deleted != 0:
		return state.ReasonDeleting
	}
	cpu, ports := m.taken(o.Node)
	if v := h.Requests[0].Value; v > 0 && v > node.Header.Allocatable[0].Value-cpu {
		return state.ReasonNoFit
	}
	for _, p := range h.HostPorts {
		if slices.Contains(ports, p.Port) {
			return state.ReasonHostPort
		}
	}
	r := *pod
	r.Header.NodeName = o.Node
	return m.set(&r)
}

// source makes random ops over a small world, so that they collide.
type source struct {
	*rand.Rand
	m   *model
	uid int
}

func (s *source) key() state.Key {
	switch s.IntN(10) {
	case 0:
		return state.Key{Kind: "Namespace", Name: fmt.Sprintf("ns-%d", s.IntN(3))}
	case 1:
		return state.Key{Kind: "Node", Name: fmt.Sprintf("n-%d", s.IntN(4))}
	case 2, 3:
		return state.Key{Kind: "Service", Namespace: fmt.Sprintf("ns-%d", s.IntN(3)), Name: fmt.Sprintf("s-%d", s.IntN(10))}
	}
	return state.Key{Kind: "Pod", Namespace: fmt.Sprintf("ns-%d", s.IntN(3)), Name: fmt.Sprintf("p-%d", s.IntN(30))}
}

func (s *source) record(k state.Key, uid string) *state.Record {
	r := &state.Record{Header: state.Header{Key: k, UID: uid, APIVersion: "v1"}}
	r.Spec = &state.Body{Codec: state.CodecKubeCBOR, Data: fmt.Appendf(nil, "spec %d %0*d", s.IntN(5), s.IntN(200), 7)}
	r.Status = &state.Body{Codec: state.CodecKubeCBOR, Data: fmt.Appendf(nil, "status %d", s.IntN(5))}
	r.Header.Labels = map[string]string{"a": fmt.Sprint(s.IntN(3)), "b": fmt.Sprint(s.IntN(3))}
	if s.IntN(8) == 0 {
		r.Header.Finalizers = []string{"x"}
	}
	if s.IntN(20) == 0 && (k.Namespace != "" || s.IntN(10) == 0) {
		r.Header.Deleted = 1
	}
	switch k.Kind {
	case "Service":
		r.Header.Claims = []string{fmt.Sprintf("port/%d", s.IntN(12))}
	case "Node":
		r.Header.Allocatable = []state.Quantity{{Name: "cpu", Value: int64(1000 * s.IntN(4))}}
	case "Pod":
		r.Header.Requests = []state.Quantity{{Name: "cpu", Value: int64(100 * s.IntN(6))}}
		r.Header.Phase = []string{"Pending", "Pending", "Running", "Succeeded", "Failed"}[s.IntN(5)]
		if s.IntN(4) == 0 {
			r.Header.HostPorts = []state.HostPort{{Protocol: "TCP", Port: int32(s.IntN(4))}}
		}
		if s.IntN(6) == 0 {
			r.Header.NodeName = fmt.Sprintf("n-%d", s.IntN(4))
		}
		r.Header.Owners = []state.Owner{{UID: fmt.Sprintf("owner-%d", s.IntN(5)), Kind: "ReplicaSet.apps", Name: "rs"}}
	}
	return r
}

func (s *source) op() state.Op {
	k := s.key()
	verb := s.IntN(6)
	if verb == 3 && k.Namespace == "" && s.IntN(5) > 0 {
		verb = 2 // namespaces and nodes go rarely
	}
	old := s.m.objects[k]
	uid, rv := "other", uint64(0)
	if old != nil && s.IntN(20) > 0 {
		uid = old.Header.UID
		if s.IntN(2) == 0 {
			rv = old.Header.ResourceVersion + uint64(s.IntN(8)/7)
		}
	}
	switch verb {
	case 0, 1:
		s.uid++
		return state.Op{Type: state.OpCreate, Record: s.record(k, fmt.Sprintf("u-%d", s.uid))}
	case 2:
		r := s.record(k, uid)
		if old != nil && s.IntN(10) > 0 {
			r.Header.NodeName = old.Header.NodeName
		}
		return state.Op{Type: state.OpUpdate, Record: r, UID: uid, ResourceVersion: rv, Keep: uint8(s.IntN(2)) * state.KeepSpec}
	case 3:
		return state.Op{Type: state.OpDelete, Key: &k, UID: uid, ResourceVersion: rv}
	}
	k = state.Key{Kind: "Pod", Namespace: fmt.Sprintf("ns-%d", s.IntN(3)), Name: fmt.Sprintf("p-%d", s.IntN(30))}
	uid = "other"
	if p := s.m.objects[k]; p != nil {
		uid = p.Header.UID
	}
	node := fmt.Sprintf("n-%d", s.IntN(4))
	nodeUID := "other"
	if n := s.m.objects[state.Key{Kind: "Node", Name: node}]; n != nil {
		nodeUID = n.Header.UID
	}
	return state.Op{Type: state.OpBind, Key: &k, UID: uid, Node: node, NodeUID: nodeUID}
}

// compare checks every read of the snapshot against the model.
func (m *model) compare(t *testing.T, s state.Snapshot) {
	t.Helper()
	if s.ResourceVersion() != m.rv {
		t.Fatalf("version %d, want %d", s.ResourceVersion(), m.rv)
	}
	n := 0
	for _, kind := range s.Kinds() {
		var last state.Key
		s.Range(kind, "", state.Key{}, func(r *state.Record) bool {
			n++
			want := m.objects[r.Header.Key]
			if want == nil || !equalRecord(t, r, want) {
				t.Fatalf("%v: got %+v, want %+v", r.Header.Key, r, want)
			}
			if c := cmp.Or(cmp.Compare(last.Namespace, r.Header.Key.Namespace), cmp.Compare(last.Name, r.Header.Key.Name)); c >= 0 && last.Name != "" {
				t.Fatalf("%v after %v", r.Header.Key, last)
			}
			last = r.Header.Key
			if byUID, ok := s.ByUID(r.Header.UID); !ok || byUID != r {
				t.Fatalf("%v: not found by uid", r.Header.Key)
			}
			return true
		})
	}
	if n != len(m.objects) {
		t.Fatalf("%d records, want %d", n, len(m.objects))
	}
	m.compareIndexes(t, s)
}

func (m *model) compareIndexes(t *testing.T, s state.Snapshot) {
	t.Helper()
	for i := range 4 {
		node := fmt.Sprintf("n-%d", i)
		cpu, _ := m.taken(node)
		got, ok := s.NodeTotals(node)
		if ok != (m.objects[state.Key{Kind: "Node", Name: node}] != nil) {
			t.Fatalf("totals of %s: %v", node, ok)
		}
		if ok && (len(got) > 0 && got[0].Value != cpu || len(got) == 0 && cpu != 0) {
			t.Fatalf("totals of %s: %v, want %d", node, got, cpu)
		}
		on := 0
		s.PodsOnNode(node, func(*state.Record) bool { on++; return true })
		for r := range maps.Values(m.objects) {
			if r.Header.Key.Kind == "Pod" && r.Header.NodeName == node {
				on--
			}
		}
		if on != 0 {
			t.Fatalf("pods on %s: %d too many", node, on)
		}
	}
	for i := range 5 {
		owner := fmt.Sprintf("owner-%d", i)
		owned := 0
		s.ByOwner(owner, func(*state.Record) bool { owned++; return true })
		for r := range maps.Values(m.objects) {
			if len(r.Header.Owners) > 0 && r.Header.Owners[0].UID == owner {
				owned--
			}
		}
		if owned != 0 {
			t.Fatalf("owned by %s: %d too many", owner, owned)
		}
	}
}

func equalRecord(t *testing.T, a, b *state.Record) bool {
	t.Helper()
	x, err := state.EncodeRecord(a)
	if err != nil {
		t.Fatal(err)
	}
	y, err := state.EncodeRecord(b)
	if err != nil {
		t.Fatal(err)
	}
	return slices.Equal(x, y)
}

// TestModel runs random operations against the model, with restarts, small
// segments and small snapshots.
func TestModel(t *testing.T) {
	const seed = 1
	cfg := testConfig(t, t.TempDir())
	cfg.SegmentBytes, cfg.SnapshotBytes = 64<<10, 64<<10
	n := openTest(t, cfg)
	m := &model{objects: map[state.Key]*state.Record{}, rv: n.State().Snapshot().ResourceVersion()}
	s := &source{Rand: rand.New(rand.NewPCG(seed, seed)), m: m}
	var refused, restarts int
	for done := 0; done < *modelOps; {
		ops := make([]state.Op, 1+s.IntN(40))
		want := make([]state.Reason, len(ops))
		for i := range ops {
			ops[i] = s.op()
			want[i] = m.apply(&ops[i])
		}
		res, err := n.Propose(testContext(t), ops)
		if err != nil {
			t.Fatal(err)
		}
		for i, r := range res {
			if r.Reason != want[i] {
				t.Fatalf("op %d %+v: reason %d (%s), want %d", done+i, ops[i], r.Reason, r.Detail, want[i])
			}
			if r.Reason != state.ReasonNone {
				refused++
			}
		}
		done += len(ops)
		if s.IntN(25) == 0 {
			m.compare(t, n.State().Snapshot())
			if err := n.Close(); err != nil {
				t.Fatal(err)
			}
			n = openTest(t, cfg)
			restarts++
		}
		m.compare(t, n.State().Snapshot())
	}
	st := n.Stats()
	if st.SnapshotIndex == 0 || restarts == 0 {
		t.Errorf("no snapshot or no restart: %+v", st)
	}
	t.Logf("%d refused, %d restarts, %d objects, snapshot at %d of %d", refused, restarts, len(m.objects), st.SnapshotIndex, st.LastIndex)
}
