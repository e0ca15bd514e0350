package ingress

import (
	"bytes"
	"maps"
	"strings"
	"sync"

	"github.com/dunlin-project/dunlin/node/services"
	"github.com/dunlin-project/dunlin/wire"
)

// Secrets are the node's: PEM of a certificate and its private key; false if
// it has no such Secret.
type Secrets func(namespace, name string) (Certificate, bool)

// feed is the part of the service table that Ingresses lead to, with their
// certificates. It is the agent's: the process never sees the rest.
type feed struct {
	sub     *services.Subscription
	secrets Secrets
	news    chan struct{}
	stop    chan struct{}
	once    sync.Once

	raw    map[string][]byte // Ingresses, Services, slices and silent nodes; the data is the table's
	owner  map[string]string // slice: its Service
	sent   map[string][]byte
	dirty  map[string]bool // keys that are to be sent
	closed sync.WaitGroup
}

// newFeed begins with everything. changed is signalled when Secrets may be
// others.
func newFeed(t *services.Table, secrets Secrets, changed <-chan struct{}) *feed {
	f := &feed{sub: t.Subscribe(), secrets: secrets, news: make(chan struct{}, 1), stop: make(chan struct{}),
		raw: map[string][]byte{}, owner: map[string]string{}, sent: map[string][]byte{}, dirty: map[string]bool{}}
	f.closed.Go(func() {
		for {
			select {
			case <-f.stop:
				return
			case <-f.sub.News():
			case <-changed:
			}
			select {
			case f.news <- struct{}{}:
			default:
			}
		}
	})
	return f
}

// News implements companion.Feed.
func (f *feed) News() <-chan struct{} { return f.news }

// Close implements companion.Feed.
func (f *feed) Close() {
	f.once.Do(func() { close(f.stop) })
	f.closed.Wait()
	f.sub.Close()
}

// Take implements companion.Feed.
func (f *feed) Take(limit int) (items []wire.ServiceItem, gone []string, more bool) {
	if len(f.dirty) == 0 {
		f.read()
		f.compare(f.wanted())
	}
	size := 0
	for k := range f.dirty {
		if size >= limit {
			return items, gone, true
		}
		delete(f.dirty, k)
		size += len(k)
		if data, ok := f.sent[k]; ok {
			items = append(items, wire.ServiceItem{Key: k, Data: data})
			size += len(data)
		} else {
			gone = append(gone, k)
		}
	}
	return items, gone, false
}

// read takes what changed in the service table.
func (f *feed) read() {
	for more := true; more; {
		var items []wire.ServiceItem
		var gone []string
		items, gone, more = f.sub.Take(1 << 20)
		for _, it := range items {
			switch {
			case strings.HasPrefix(it.Key, wire.ItemSlice):
				var s wire.Slice
				if wire.DecodeItem(it.Data, &s) != nil {
					continue // the service proxy warns
				}
				ns, _, _ := strings.Cut(it.Key[len(wire.ItemSlice):], "/")
				f.owner[it.Key] = wire.ItemService + ns + "/" + s.Service
			case strings.HasPrefix(it.Key, wire.ItemNodeInfo):
				var n wire.NodeInfo
				if wire.DecodeItem(it.Data, &n) != nil || !n.Silent {
					delete(f.raw, it.Key) // the process goes by silent ones alone
					continue
				}
			case !strings.HasPrefix(it.Key, wire.ItemService) && !strings.HasPrefix(it.Key, wire.ItemIngress):
				continue
			}
			f.raw[it.Key] = it.Data
		}
		for _, k := range gone {
			delete(f.raw, k)
			delete(f.owner, k)
		}
	}
}

// wanted are the items that the process needs.
func (f *feed) wanted() map[string][]byte {
	out, used := map[string][]byte{}, map[string]bool{}
	for k, data := range f.raw {
		name, ok := strings.CutPrefix(k, wire.ItemIngress)
		var ing wire.Ingress
		if !ok || wire.DecodeItem(data, &ing) != nil {
			continue
		}
		out[k] = data
		ns, _, _ := strings.Cut(name, "/")
		use := func(b *wire.IngressBackend) {
			if b != nil && b.Service != "" {
				used[wire.ItemService+ns+"/"+b.Service] = true
			}
		}
		use(ing.Default)
		for i := range ing.Rules {
			for j := range ing.Rules[i].Paths {
				use(&ing.Rules[i].Paths[j].Backend)
			}
		}
		for _, t := range ing.TLS {
			if c, ok := f.secrets(ns, t.Secret); ok && t.Secret != "" {
				if b, err := wire.EncodeItem(&c); err == nil {
					out[itemCertificate+ns+"/"+t.Secret] = b
				}
			}
		}
	}
	for k := range used {
		if data, ok := f.raw[k]; ok {
			out[k] = data
		}
	}
	for k, service := range f.owner {
		if used[service] {
			out[k] = f.raw[k]
		}
	}
	for k, data := range f.raw {
		if len(used) > 0 && strings.HasPrefix(k, wire.ItemNodeInfo) {
			out[k] = data
		}
	}
	return out
}

// compare notes what has to be sent.
func (f *feed) compare(want map[string][]byte) {
	for k, data := range want {
		if old, ok := f.sent[k]; !ok || !bytes.Equal(old, data) {
			f.dirty[k] = true
		}
	}
	for k := range f.sent {
		if _, ok := want[k]; !ok {
			f.dirty[k] = true
		}
	}
	f.sent = maps.Clone(want)
}
