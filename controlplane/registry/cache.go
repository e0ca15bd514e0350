package registry

import (
	"container/list"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// cache is a bounded LRU of decoded objects. A record is immutable and kept
// by pointer, so an entry can never be stale: it is only ever unused.
type cache struct {
	mu    sync.Mutex
	max   int
	bytes int
	order *list.List // of *cached, most recently used first
	byRec map[*state.Record]*list.Element
}

type cached struct {
	rec  *state.Record
	obj  runtime.Object
	size int
}

func newCache(maxBytes int) *cache {
	return &cache{max: maxBytes, order: list.New(), byRec: map[*state.Record]*list.Element{}}
}

func (c *cache) get(rec *state.Record) (runtime.Object, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.byRec[rec]
	if !ok {
		return nil, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).obj, true
}

func (c *cache) put(rec *state.Record, obj runtime.Object) {
	// What decoding makes of a record is mostly maps, strings and structs full
	// of empty fields; measured with pods (64-bit): five times the bytes, and
	// some.
	const overhead, factor = 2 << 10, 5
	size := overhead
	for _, b := range []*state.Body{rec.Meta, rec.Spec, rec.Status} {
		if b != nil {
			size += factor * len(b.Data)
		}
	}
	if size > c.max/4 {
		return // one object must not push out all others
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.byRec[rec]; ok {
		return
	}
	c.byRec[rec] = c.order.PushFront(&cached{rec: rec, obj: obj, size: size})
	c.bytes += size
	for c.bytes > c.max {
		e := c.order.Back()
		old := c.order.Remove(e).(*cached)
		delete(c.byRec, old.rec)
		c.bytes -= old.size
	}
}
