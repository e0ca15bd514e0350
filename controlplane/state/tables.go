package state

import (
	"cmp"
	"slices"
	"strings"

	"github.com/tidwall/btree"
)

// Kinds whose headers mean something to the state machine.
const (
	kindPod       = "Pod"
	kindNode      = "Node"
	kindNamespace = "Namespace"
)

// Trees are copy-on-write: Copy is O(1), and a copy that nobody writes may be
// read by any number of goroutines without a lock. A write after a copy copies
// the path to the leaf, so nodes are small, items carry their key (a look-up
// allocates nothing), and only a kind's own tree points at records: a change
// of a record touches no other index unless what that index is by changes.
type (
	recordTree = btree.BTreeG[item]
	refTree    = btree.BTreeG[ref]
)

// degree of the trees: measured best for writes after each copy.
const degree = 16

// item is a record in the tree of its kind.
type item struct {
	namespace, name string
	rec             *Record
}

func lessItem(a, b item) bool {
	if a.namespace != b.namespace {
		return a.namespace < b.namespace
	}
	return a.name < b.name
}

// ref is one entry of an index: what it is by (a uid, a node, an owner's
// uid), and the key of the record.
type ref struct {
	group                 string
	namespace, name, kind string
}

func lessRef(a, b ref) bool {
	if a.group != b.group {
		return a.group < b.group
	}
	if a.namespace != b.namespace {
		return a.namespace < b.namespace
	}
	if a.name != b.name {
		return a.name < b.name
	}
	return a.kind < b.kind
}

func refOf(group string, k Key) ref {
	return ref{group: group, kind: k.Kind, namespace: k.Namespace, name: k.Name}
}

func (r ref) key() Key { return Key{Kind: r.kind, Namespace: r.namespace, Name: r.name} }

func newTree[T any](less func(a, b T) bool) *btree.BTreeG[T] {
	return btree.NewBTreeGOptions(less, btree.Options{NoLocks: true, Degree: degree})
}

func compareKeys(a, b Key) int {
	return cmp.Or(
		strings.Compare(a.Kind, b.Kind),
		strings.Compare(a.Namespace, b.Namespace),
		strings.Compare(a.Name, b.Name),
	)
}

// claim says who holds a claim string.
type claim struct {
	name string
	key  Key
}

func lessClaim(a, b claim) bool { return a.name < b.name }

func lessTotals(a, b *totals) bool { return a.node < b.node }

// tables are the writer's working indexes. They belong to the one goroutine
// that applies; publish gives readers an immutable view of them.
type tables struct {
	kinds  map[string]*recordTree // never ranged over while applying
	names  []string               // the keys of kinds, sorted
	uids   *refTree
	byNode *refTree
	owners *refTree
	claims *btree.BTreeG[claim]
	totals *btree.BTreeG[*totals]
	bodies bodies
	shares shares

	bytes int64 // of bodies and headers, roughly
	dirty map[string]bool
	other struct{ uids, byNode, owners, claims, totals bool }
}

func newTables() *tables {
	return &tables{
		kinds:  map[string]*recordTree{},
		uids:   newTree(lessRef),
		byNode: newTree(lessRef),
		owners: newTree(lessRef),
		claims: newTree(lessClaim),
		totals: newTree(lessTotals),
		bodies: bodies{},
		shares: newShares(),
		dirty:  map[string]bool{},
	}
}

func (t *tables) get(k Key) *Record {
	tree := t.kinds[k.Kind]
	if tree == nil {
		return nil
	}
	e, _ := tree.Get(item{namespace: k.Namespace, name: k.Name})
	return e.rec
}

func (t *tables) byUID(uid string) *Record {
	if e, ok := first(t.uids, uid); ok {
		return t.get(e.key())
	}
	return nil
}

// first returns the first entry of a group.
func first(t *refTree, group string) (found ref, ok bool) {
	t.Ascend(ref{group: group}, func(e ref) bool {
		found, ok = e, e.group == group
		return false
	})
	return found, ok
}

func (t *tables) tree(kind string) *recordTree {
	tree := t.kinds[kind]
	if tree == nil {
		tree = newTree(lessItem)
		t.kinds[kind] = tree
		i, _ := slices.BinarySearch(t.names, kind)
		t.names = slices.Insert(t.names, i, kind)
	}
	t.dirty[kind] = true
	return tree
}

// put stores r in place of old (nil for a new record) and takes over its
// bodies and what its header shares with others. r must not be shared yet.
func (t *tables) put(r, old *Record) {
	t.bodies.intern(r)
	t.shares.put(r, old)
	k := r.Header.Key
	t.tree(k.Kind).Set(item{k.Namespace, k.Name, r})
	if old == nil {
		t.uids.Set(refOf(r.Header.UID, k))
		t.other.uids = true
	}
	t.bytes += recordBytes(r)
	if old != nil {
		t.bytes -= recordBytes(old)
	}
	t.reindexOwners(r, old)
	t.reindexClaims(r, old)
	if r.Header.Key.Kind == kindPod {
		t.reindexPod(r, old)
	}
	if old != nil {
		t.bodies.release(old)
	}
}

func (t *tables) remove(old *Record) {
	k := old.Header.Key
	t.tree(k.Kind).Delete(item{namespace: k.Namespace, name: k.Name})
	t.uids.Delete(refOf(old.Header.UID, k))
	t.other.uids = true
	t.bytes -= recordBytes(old)
	t.reindexOwners(nil, old)
	t.reindexClaims(nil, old)
	if old.Header.Key.Kind == kindPod {
		t.reindexPod(nil, old)
	}
	t.bodies.release(old)
	t.shares.remove(old)
}

func (t *tables) reindexOwners(r, old *Record) {
	if r != nil && old != nil && slices.EqualFunc(r.Header.Owners, old.Header.Owners, func(a, b Owner) bool { return a.UID == b.UID }) {
		return
	}
	if old != nil {
		for i := range old.Header.Owners {
			t.owners.Delete(refOf(old.Header.Owners[i].UID, old.Header.Key))
			t.other.owners = true
		}
	}
	if r != nil {
		for i := range r.Header.Owners {
			t.owners.Set(refOf(r.Header.Owners[i].UID, r.Header.Key))
			t.other.owners = true
		}
	}
}

func (t *tables) reindexClaims(r, old *Record) {
	if r != nil && old != nil && slices.Equal(r.Header.Claims, old.Header.Claims) {
		return
	}
	t.other.claims = true
	if old != nil {
		for _, c := range old.Header.Claims {
			t.claims.Delete(claim{name: c})
		}
	}
	if r != nil {
		for _, c := range r.Header.Claims {
			t.claims.Set(claim{name: c, key: r.Header.Key})
		}
	}
}

// claimedByOther returns the first claim of r that another record holds.
func (t *tables) claimedByOther(r *Record) (string, bool) {
	for _, c := range r.Header.Claims {
		if held, ok := t.claims.Get(claim{name: c}); ok && held.key != r.Header.Key {
			return c, true
		}
	}
	return "", false
}

func (t *tables) reindexPod(r, old *Record) {
	if r == nil || old == nil || r.Header.NodeName != old.Header.NodeName {
		if old != nil && old.Header.NodeName != "" {
			t.byNode.Delete(refOf(old.Header.NodeName, old.Header.Key))
			t.other.byNode = true
		}
		if r != nil && r.Header.NodeName != "" {
			t.byNode.Set(refOf(r.Header.NodeName, r.Header.Key))
			t.other.byNode = true
		}
	}
	was, is := old != nil && counted(old), r != nil && counted(r)
	if was && is && r.Header.NodeName == old.Header.NodeName &&
		slices.Equal(r.Header.Requests, old.Header.Requests) && slices.Equal(r.Header.HostPorts, old.Header.HostPorts) {
		return
	}
	if was {
		t.count(old, -1)
	}
	if is {
		t.count(r, +1)
	}
}

// publish returns a view of the tables as they are now. prev is the view
// published before; what did not change is shared with it.
func (t *tables) publish(prev *view) *view {
	v := &view{rv: prev.rv, facts: prev.facts, uids: prev.uids, byNode: prev.byNode, owners: prev.owners, claims: prev.claims, totals: prev.totals}
	v.kinds = prev.kinds
	if len(t.dirty) > 0 {
		v.kinds = make([]kindView, 0, len(t.names))
		for _, name := range t.names {
			kv, ok := prev.kind(name)
			if !ok || t.dirty[name] {
				kv = kindView{name: name, tree: t.kinds[name].Copy()}
			}
			v.kinds = append(v.kinds, kv)
		}
		clear(t.dirty)
	}
	if t.other.uids {
		v.uids = t.uids.Copy()
	}
	if t.other.byNode {
		v.byNode = t.byNode.Copy()
	}
	if t.other.owners {
		v.owners = t.owners.Copy()
	}
	if t.other.claims {
		v.claims = t.claims.Copy()
	}
	if t.other.totals {
		v.totals = t.totals.Copy()
	}
	t.other = struct{ uids, byNode, owners, claims, totals bool }{}
	return v
}
