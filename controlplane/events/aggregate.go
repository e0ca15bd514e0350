package events

import (
	"container/list"
	"fmt"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const combinedPrefix = "(combined from similar events): "

// aggregator decides, for each entry, whether it is written at all, and as a
// new Event or as a higher count of one it made before. It is pure apart from
// its own bounded tables: time comes with the entries.
type aggregator struct {
	cfg     Config
	events  *table[string, *known]
	similar *table[string, *family]
	budget  *table[string, *bucket]
	serial  uint64
}

type known struct{ name string }

type family struct {
	messages map[string]struct{}
	since    time.Time
}

type bucket struct {
	tokens float64
	at     time.Time
}

func newAggregator(cfg Config) *aggregator {
	return &aggregator{
		cfg:     cfg,
		events:  newTable[string, *known](cfg.Remember),
		similar: newTable[string, *family](cfg.Remember),
		budget:  newTable[string, *bucket](cfg.Remember),
	}
}

func (a *aggregator) observe(e Entry) (written, bool) {
	object := e.About.Kind + "\x00" + e.About.Namespace + "\x00" + e.About.Name + "\x00" + string(e.About.UID)
	if !a.spend(object+"\x00"+e.Component, e.Time) {
		return written{}, false
	}
	kind := object + "\x00" + e.Component + "\x00" + e.Host + "\x00" + e.Type + "\x00" + e.Reason + "\x00" + e.About.FieldPath
	message, key := clip(e.Message), kind+"\x00"+e.Message
	if a.combined(kind, e) {
		message, key = clip(combinedPrefix+e.Message), kind
	}
	w := written{namespace: e.About.Namespace, message: message}
	if w.namespace == "" {
		w.namespace = metav1.NamespaceDefault
	}
	if k, ok := a.events.get(key); ok {
		w.name, w.update = k.name, true
		return w, true
	}
	a.serial++
	w.name = fmt.Sprintf("%s.%s", e.About.Name, strconv.FormatUint(uint64(e.Time.UnixNano())+a.serial, 16))
	a.events.put(key, &known{name: w.name})
	return w, true
}

// spend takes one token of the object's budget.
func (a *aggregator) spend(key string, now time.Time) bool {
	b, ok := a.budget.get(key)
	if !ok {
		b = &bucket{tokens: float64(a.cfg.Burst), at: now}
		a.budget.put(key, b)
	}
	if d := now.Sub(b.at); d > 0 {
		b.tokens = min(b.tokens+float64(d)/float64(a.cfg.Refill), float64(a.cfg.Burst))
	}
	b.at = now
	if b.tokens < 1 {
		return false
	}
	b.tokens--
	return true
}

// combined says whether the reason had so many different messages lately
// that they share one Event.
func (a *aggregator) combined(kind string, e Entry) bool {
	f, ok := a.similar.get(kind)
	if !ok || e.Time.Sub(f.since) > a.cfg.Window || e.Time.Before(f.since) {
		f = &family{messages: map[string]struct{}{}, since: e.Time}
		a.similar.put(kind, f)
	}
	if _, seen := f.messages[e.Message]; seen {
		return false
	}
	if len(f.messages) >= a.cfg.Similar {
		return true
	}
	f.messages[e.Message] = struct{}{}
	return false
}

// table is a map of bounded size that forgets the least recently used entry.
type table[K comparable, V any] struct {
	limit int
	m     map[K]*list.Element
	order *list.List
}

type cell[K comparable, V any] struct {
	key K
	val V
}

func newTable[K comparable, V any](limit int) *table[K, V] {
	return &table[K, V]{limit: limit, m: map[K]*list.Element{}, order: list.New()}
}

func (t *table[K, V]) get(k K) (V, bool) {
	el, ok := t.m[k]
	if !ok {
		var zero V
		return zero, false
	}
	t.order.MoveToFront(el)
	return el.Value.(*cell[K, V]).val, true
}

func (t *table[K, V]) put(k K, v V) {
	if el, ok := t.m[k]; ok {
		el.Value.(*cell[K, V]).val = v
		t.order.MoveToFront(el)
		return
	}
	t.m[k] = t.order.PushFront(&cell[K, V]{k, v})
	if t.order.Len() > t.limit {
		last := t.order.Back()
		delete(t.m, t.order.Remove(last).(*cell[K, V]).key)
	}
}
