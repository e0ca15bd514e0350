package nodeapi

import (
	"fmt"
	"maps"
	"testing"

	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/wire"
)

// follower is a node that takes pages as package node/services does.
type follower struct {
	items   map[string]string
	gen     uint64
	staging map[string]string
	at      uint64
}

func digestOf(items map[string]string) (sum uint64) {
	for k, v := range items {
		sum += wire.ItemDigest(k, []byte(v))
	}
	return sum
}

// step asks once and says whether there is more.
func (f *follower) step(t *rapid.T, tab *table) bool {
	r := &wire.ServicesRequest{Generation: f.gen, Digest: digestOf(f.items)}
	if f.staging != nil {
		r = &wire.ServicesRequest{Generation: f.at, Filling: true}
	}
	p := tab.page(r)
	if p.Unchanged {
		f.gen, f.staging = p.Generation, nil
		return false
	}
	if p.Full {
		f.staging = map[string]string{}
	}
	into := &f.items
	if f.staging != nil {
		into = &f.staging
	}
	for _, it := range p.Items {
		(*into)[it.Key] = string(it.Data)
	}
	for _, k := range p.Gone {
		delete(*into, k)
	}
	if f.staging != nil {
		f.at = p.Generation
	} else {
		f.gen = p.Generation
	}
	if p.More {
		return true
	}
	if digestOf(*into) != p.Digest {
		if f.staging != nil {
			t.Fatal("a whole table differs from the server's")
		}
		f.gen, f.staging = 0, nil // as a node does: ask for everything
		return true
	}
	if f.staging != nil {
		f.items, f.gen, f.staging = f.staging, f.at, nil
	}
	return false
}

// A node that asks now and then, at any server of a cluster that applied the
// same log, ends with what there is, and in pages of which none is too large.
func TestServiceTableConverges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		model := map[string]string{}
		servers := []*table{newTable()}
		f := &follower{items: map[string]string{}}
		version := uint64(10)
		for range rapid.IntRange(1, 150).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "do") {
			case 0: // another server starts, from the state as it is
				n := newTable()
				for k, v := range model {
					n.put(k, []byte(v), version)
				}
				n.begin(version)
				servers = append(servers, n)
			case 1, 2:
				f.step(t, servers[rapid.IntRange(0, len(servers)-1).Draw(t, "server")])
			default:
				version++
				k := fmt.Sprint("s/n/", rapid.IntRange(0, 20).Draw(t, "key"))
				v := fmt.Sprint(rapid.IntRange(0, 3).Draw(t, "value"))
				if rapid.IntRange(0, 2).Draw(t, "delete") == 0 {
					delete(model, k)
					for _, s := range servers {
						s.put(k, nil, version)
					}
					continue
				}
				model[k] = v
				for _, s := range servers {
					s.put(k, []byte(v), version)
				}
			}
		}
		last := servers[rapid.IntRange(0, len(servers)-1).Draw(t, "last")]
		for i := 0; f.step(t, last); i++ {
			if i > 100 {
				t.Fatal("no end")
			}
		}
		if !maps.Equal(f.items, model) {
			t.Fatalf("have %v, want %v", f.items, model)
		}
	})
}

// A table of many items travels in pages, and deletions that are forgotten
// are found all the same.
func TestServiceTablePagesAndForgets(t *testing.T) {
	tab := newTable()
	data := make([]byte, 4096)
	for i := range 1000 {
		tab.put(fmt.Sprint("e/n/", i), data, uint64(i+1))
	}
	got, pages := 0, 0
	for r := (&wire.ServicesRequest{}); ; {
		p := tab.page(r)
		pages++
		got += len(p.Items)
		if b, err := wire.Marshal(p); err != nil || len(b) > wire.TypeServicesReply.MaxSize() {
			t.Fatalf("page of %d bytes: %v", len(b), err)
		}
		if !p.More {
			break
		}
		r = &wire.ServicesRequest{Generation: p.Generation, Filling: true}
	}
	if got != 1000 || pages < 5 {
		t.Fatalf("%d items in %d pages", got, pages)
	}
	v := uint64(2000)
	for i := range 3 * tableGone {
		k := fmt.Sprint("s/n/", i)
		tab.put(k, data[:8], v)
		tab.put(k, nil, v+1)
		v += 2
	}
	if len(tab.items) > 1000+tableGone+1 || len(tab.log) > 4*(1000+tableGone)+tableLogSlack {
		t.Fatalf("%d items and %d lines are kept", len(tab.items), len(tab.log))
	}
	if p := tab.page(&wire.ServicesRequest{Generation: 1500}); !p.Full {
		t.Fatal("a node that missed forgotten deletions must get everything")
	}
	if p := tab.page(&wire.ServicesRequest{Generation: v - 4, Digest: 1}); p.Full || len(p.Gone) > 2 {
		t.Fatalf("full %v, %d gone", p.Full, len(p.Gone))
	}
}
