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

// entryTree is a copy-on-write b-tree: Copy is O(1), and a copy that nobody
// writes may be read by any number of goroutines without a lock. Its items
// carry their key, so that a look-up allocates nothing and chases no pointer.
type entryTree = btree.BTreeG[indexed]

// indexed is one entry of an index: what it is sorted by, and the record.
type indexed struct {
	group     string // the index's own part of the key: "", uid, node or owner
	kind      string // only where kinds mix under one group
	namespace string
	name      string
	rec       *Record
}

func lessIndexed(a, b indexed) bool {
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

func newTree[T any](less func(a, b T) bool) *btree.BTreeG[T] {
	return btree.NewBTreeGOptions(less, btree.Options{NoLocks: true})
}

func keyEntry(r *Record) indexed {
	return indexed{namespace: r.Header.Key.Namespace, name: r.Header.Key.Name, rec: r}
}

func uidEntry(r *Record) indexed { return indexed{group: r.Header.UID, rec: r} }

func nodeEntry(r *Record) indexed {
	return indexed{group: r.Header.NodeName, namespace: r.Header.Key.Namespace, name: r.Header.Key.Name, rec: r}
}

func ownerEntry(owner string, r *Record) indexed {
	k := &r.Header.Key
	return indexed{group: owner, kind: k.Kind, namespace: k.Namespace, name: k.Name, rec: r}
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
	kinds  map[string]*entryTree // never ranged over while applying
	names  []string              // the keys of kinds, sorted
	uids   *entryTree
	byNode *entryTree
	owners *entryTree
	claims *btree.BTreeG[claim]
	totals *btree.BTreeG[*totals]
	bodies bodies

	bytes int64 // of bodies and headers, roughly
	dirty map[string]bool
	other struct{ uids, byNode, owners, totals bool }
}

func newTables() *tables {
	return &tables{
		kinds:  map[string]*entryTree{},
		uids:   newTree(lessIndexed),
		byNode: newTree(lessIndexed),
		owners: newTree(lessIndexed),
		claims: newTree(lessClaim),
		totals: newTree(lessTotals),
		bodies: bodies{},
		dirty:  map[string]bool{},
	}
}

func (t *tables) get(k Key) *Record {
	tree := t.kinds[k.Kind]
	if tree == nil {
		return nil
	}
	e, _ := tree.Get(indexed{namespace: k.Namespace, name: k.Name})
	return e.rec
}

func (t *tables) byUID(uid string) *Record {
	e, _ := t.uids.Get(indexed{group: uid})
	return e.rec
}

func (t *tables) tree(kind string) *entryTree {
	tree := t.kinds[kind]
	if tree == nil {
		tree = newTree(lessIndexed)
		t.kinds[kind] = tree
		i, _ := slices.BinarySearch(t.names, kind)
		t.names = slices.Insert(t.names, i, kind)
	}
	t.dirty[kind] = true
	return tree
}

// put stores r in place of old (nil for a new record) and takes over its
// bodies. r must not be shared yet.
func (t *tables) put(r, old *Record) {
	t.bodies.intern(r)
	t.tree(r.Header.Key.Kind).Set(keyEntry(r))
	t.uids.Set(uidEntry(r))
	t.other.uids = true
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
	t.tree(old.Header.Key.Kind).Delete(keyEntry(old))
	t.uids.Delete(uidEntry(old))
	t.other.uids = true
	t.bytes -= recordBytes(old)
	t.reindexOwners(nil, old)
	t.reindexClaims(nil, old)
	if old.Header.Key.Kind == kindPod {
		t.reindexPod(nil, old)
	}
	t.bodies.release(old)
}

func (t *tables) reindexOwners(r, old *Record) {
	if old != nil {
		for i := range old.Header.Owners {
			t.owners.Delete(ownerEntry(old.Header.Owners[i].UID, old))
			t.other.owners = true
		}
	}
	if r != nil {
		for i := range r.Header.Owners {
			t.owners.Set(ownerEntry(r.Header.Owners[i].UID, r))
			t.other.owners = true
		}
	}
}

func (t *tables) reindexClaims(r, old *Record) {
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
	if old != nil && old.Header.NodeName != "" {
		t.byNode.Delete(nodeEntry(old))
		t.other.byNode = true
		if counted(old) {
			t.count(old, -1)
		}
	}
	if r != nil && r.Header.NodeName != "" {
		t.byNode.Set(nodeEntry(r))
		t.other.byNode = true
		if counted(r) {
			t.count(r, +1)
		}
	}
}

// publish returns a view of the tables as they are now. prev is the view
// published before; what did not change is shared with it.
func (t *tables) publish(prev *view) *view {
	v := &view{rv: prev.rv, facts: prev.facts, uids: prev.uids, byNode: prev.byNode, owners: prev.owners, totals: prev.totals}
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
	if t.other.totals {
		v.totals = t.totals.Copy()
	}
	t.other = struct{ uids, byNode, owners, totals bool }{}
	return v
}
