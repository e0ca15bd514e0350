package nodeapi

import (
	"bytes"
	"slices"
	"sort"
	"sync"

	"github.com/dunlin-project/dunlin/wire"
)

// Bounds of the service table's history and of one page of it.
const (
	tablePage     = 512 << 10 // bytes of items, about
	tableGone     = 4096      // deletions that are remembered
	pageGone      = 4096      // deletions in one page
	itemOverhead  = 16        // framing of an item in a page
	tableLogSlack = 1024      // outdated lines of the history before it is compacted
)

// table is the service table with its history: which item changed when. A
// generation is the version of the store at which an item changed, so every
// server counts the same way, and a node may go from one to another.
//
// A node whose generation is below floor may have missed a deletion that is
// no longer remembered: it gets everything, unless its digest says that it
// holds what there is.
type table struct {
	mu     sync.Mutex
	items  map[string]*tableItem
	log    []tableLine // by version; a line whose item changed later is outdated
	gone   int         // items without data
	gen    uint64      // newest change
	floor  uint64
	digest uint64
}

type tableItem struct {
	data    []byte // nil: deleted
	changed uint64
	digest  uint64
}

type tableLine struct {
	version uint64
	key     string
}

func newTable() *table { return &table{items: map[string]*tableItem{}} }

// put sets an item (nil data removes it) as of a version of the store, and
// says whether that changed anything. Versions do not fall.
func (t *table) put(key string, data []byte, version uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	it := t.items[key]
	if it == nil {
		if data == nil {
			return false
		}
		it = &tableItem{}
		t.items[key] = it
	} else if bytes.Equal(it.data, data) && (it.data == nil) == (data == nil) {
		return false
	}
	t.digest -= it.digest
	if it.data == nil && it.changed != 0 {
		t.gone--
	}
	it.data, it.digest = data, 0
	if data != nil {
		it.digest = wire.ItemDigest(key, data)
	} else {
		t.gone++
	}
	t.digest += it.digest
	it.changed = max(version, t.gen)
	t.gen = it.changed
	t.log = append(t.log, tableLine{it.changed, key})
	t.compact()
	return true
}

// compact drops outdated lines and the oldest deletions.
func (t *table) compact() {
	if len(t.log) < 2*len(t.items)+tableLogSlack && t.gone <= tableGone {
		return
	}
	drop := 0
	if t.gone > tableGone {
		drop = t.gone - tableGone/2
	}
	keep := make([]tableLine, 0, len(t.items))
	for _, l := range t.log {
		it := t.items[l.key]
		if it == nil || it.changed != l.version {
			continue
		}
		if it.data == nil && drop > 0 {
			drop--
			t.gone--
			t.floor = max(t.floor, l.version)
			delete(t.items, l.key)
			continue
		}
		keep = append(keep, l)
	}
	t.log = keep
}

// begin says that what was deleted up to a version of the store is not known.
func (t *table) begin(version uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.floor, t.gen = max(t.floor, version), max(t.gen, version)
}

// keys lists the items that exist.
func (t *table) keys() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]string, 0, len(t.items))
	for k, it := range t.items {
		if it.data != nil {
			out = append(out, k)
		}
	}
	slices.Sort(out)
	return out
}

// generation is the newest one.
func (t *table) generation() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.gen
}

// page answers a request.
func (t *table) page(r *wire.ServicesRequest) *wire.ServicesReply {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := &wire.ServicesReply{Generation: t.gen, Digest: t.digest}
	if !r.Filling && r.Generation != 0 && r.Digest == t.digest {
		out.Unchanged = true
		return out
	}
	from := r.Generation
	if !r.Filling && (from < t.floor || from == 0 || from >= t.gen) {
		// What lies at or beyond our newest generation and yet differs is of
		// another history.
		out.Full, from = true, 0
	}
	start := sort.Search(len(t.log), func(i int) bool { return t.log[i].version > from })
	size := 0
	for i, l := range t.log[start:] {
		if (size >= tablePage || len(out.Gone) >= pageGone) && l.version != t.log[start+i-1].version {
			out.More, out.Generation, out.Digest = true, t.log[start+i-1].version, 0
			break
		}
		it := t.items[l.key]
		switch {
		case it == nil || it.changed != l.version:
		case it.data != nil:
			out.Items = append(out.Items, wire.ServiceItem{Key: l.key, Data: it.data})
			size += len(l.key) + len(it.data) + itemOverhead
		case !out.Full:
			out.Gone = append(out.Gone, l.key)
		}
	}
	return out
}
