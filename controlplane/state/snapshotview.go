package state

import (
	"slices"
	"strings"

	"github.com/tidwall/btree"
)

// Facts are what the state knows about the cluster as a whole.
type Facts struct {
	ClusterID string `cbor:"1,keyasint"`
	// Epoch is the recovery epoch: 1 at bootstrap, one more at each recovery.
	Epoch uint64 `cbor:"2,keyasint"`
	// Feature is the feature level: what every server is known to understand.
	Feature uint32 `cbor:"3,keyasint"`
	// TimeFloor is a wall clock reading (Unix seconds) that lies in the past.
	TimeFloor int64 `cbor:"4,keyasint,omitempty"`
	// Lost are the versions that recoveries gave up, oldest first: the last
	// maxLost.
	Lost []Lost `cbor:"5,keyasint,omitempty"`
}

// Lost are the versions after After and up to Before: who has seen one of
// them has seen a state of the cluster that was given up at the begin of an
// epoch. Everything that was written since is above Before.
type Lost struct {
	Epoch  uint64 `cbor:"1,keyasint"`
	After  uint64 `cbor:"2,keyasint"`
	Before uint64 `cbor:"3,keyasint"`
}

// maxLost bounds Facts.Lost. A node that was away for more recoveries than
// that is told nothing of the oldest: it follows them without a question if it
// is of the first epoch, and else holds what it has.
const maxLost = 16

// view is one immutable version of the tables; it implements Snapshot.
type view struct {
	rv     uint64
	facts  Facts
	kinds  []kindView // sorted by name
	uids   *refTree
	byNode *refTree
	owners *refTree
	claims *btree.BTreeG[claim]
	totals *btree.BTreeG[*totals]
}

type kindView struct {
	name string
	tree *recordTree
}

var _ Snapshot = (*view)(nil)

func newView(t *tables) *view {
	v := t.publish(&view{})
	v.uids, v.byNode, v.owners, v.claims, v.totals = t.uids.Copy(), t.byNode.Copy(), t.owners.Copy(), t.claims.Copy(), t.totals.Copy()
	return v
}

func (v *view) kind(name string) (kindView, bool) {
	i, ok := slices.BinarySearchFunc(v.kinds, name, func(k kindView, n string) int { return strings.Compare(k.name, n) })
	if !ok {
		return kindView{}, false
	}
	return v.kinds[i], true
}

func (v *view) ResourceVersion() uint64 { return v.rv }

func (v *view) FeatureLevel() uint32 { return v.facts.Feature }

func (v *view) Get(k Key) (*Record, bool) {
	kv, ok := v.kind(k.Kind)
	if !ok {
		return nil, false
	}
	e, ok := kv.tree.Get(item{namespace: k.Namespace, name: k.Name})
	return e.rec, ok
}

func (v *view) Range(kind, namespace string, after Key, f func(*Record) bool) {
	kv, ok := v.kind(kind)
	if !ok {
		return
	}
	from := Key{Namespace: namespace}
	skip := false
	if after.Name != "" || after.Namespace != "" {
		a := Key{Namespace: after.Namespace, Name: after.Name}
		if compareKeys(a, from) >= 0 {
			from, skip = a, true
		}
	}
	kv.tree.Ascend(item{namespace: from.Namespace, name: from.Name}, func(e item) bool {
		if namespace != "" && e.namespace != namespace {
			return false
		}
		if skip && e.namespace == from.Namespace && e.name == from.Name {
			return true
		}
		return f(e.rec)
	})
}

func (v *view) Len(kind, namespace string) int {
	kv, ok := v.kind(kind)
	if !ok {
		return 0
	}
	if namespace == "" {
		return kv.tree.Len()
	}
	n := 0
	v.Range(kind, namespace, Key{}, func(*Record) bool { n++; return true })
	return n
}

func (v *view) ByOwner(uid string, f func(*Record) bool) { v.group(v.owners, uid, f) }

func (v *view) PodsOnNode(node string, f func(*Record) bool) { v.group(v.byNode, node, f) }

// group calls f for the records of one group of an index.
func (v *view) group(t *refTree, group string, f func(*Record) bool) {
	if group == "" {
		return
	}
	t.Ascend(ref{group: group}, func(e ref) bool {
		if e.group != group {
			return false
		}
		r, ok := v.Get(e.key())
		return !ok || f(r) // an index never names what is not there
	})
}

func (v *view) Claimed(name string) bool {
	_, ok := v.claims.Get(claim{name: name})
	return ok
}

func (v *view) ByUID(uid string) (*Record, bool) {
	e, ok := first(v.uids, uid)
	if !ok {
		return nil, false
	}
	return v.Get(e.key())
}

func (v *view) Kinds() []string {
	out := make([]string, 0, len(v.kinds))
	for _, k := range v.kinds {
		if k.tree.Len() > 0 {
			out = append(out, k.name)
		}
	}
	return out
}

func (v *view) NodeTotals(node string) ([]Quantity, bool) {
	if _, ok := v.Get(Key{Kind: kindNode, Name: node}); !ok {
		return nil, false
	}
	t, ok := v.totals.Get(&totals{node: node})
	if !ok {
		return nil, true
	}
	return t.requested, true
}
