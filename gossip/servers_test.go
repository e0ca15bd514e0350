package gossip

import (
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// However members meet, and servers move and start again, all agree in the end
// on what each server last said of itself.
func TestServerBookConverges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const members = 5 // the first three with a server
		books := make([]*ServerBook, members)
		last := map[string][]string{}
		say := func(i, n int) {
			id := fmt.Sprintf("server-%d", i)
			last[id] = []string{fmt.Sprintf("10.0.%d.%d:6443", i, n)}
			books[i].set(id, last[id])
		}
		for i := range books {
			books[i] = &ServerBook{}
			if i < 3 {
				say(i, 0)
			}
		}
		meet := func(a, b int) {
			x, y := books[a].encode(), books[b].encode()
			books[a].merge(y)
			books[b].merge(x)
		}
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "what") {
			case 0: // moves
				say(rapid.IntRange(0, 2).Draw(t, "who"), rapid.IntRange(0, 5).Draw(t, "where"))
			case 1: // starts again, and knows nothing
				i := rapid.IntRange(0, 2).Draw(t, "who")
				books[i] = &ServerBook{}
				say(i, rapid.IntRange(0, 5).Draw(t, "where"))
			case 2:
				books[0].merge(rapid.SliceOf(rapid.Byte()).Draw(t, "junk"))
			default:
				meet(rapid.IntRange(0, members-1).Draw(t, "a"), rapid.IntRange(0, members-1).Draw(t, "b"))
			}
		}
		for range 3 { // everybody meets everybody
			for a := range books {
				for b := range a {
					meet(a, b)
				}
			}
		}
		for i, b := range books {
			all := b.All()
			for id, want := range last {
				if !slices.Equal(all[id], want) {
					t.Fatalf("member %d has %v of %s, which is at %v", i, all[id], id, want)
				}
			}
		}
	})
}

// Nobody can fill a member's memory.
func TestServerBookIsBounded(t *testing.T) {
	b := &ServerBook{}
	b.set("own", []string{"10.0.0.1:6443"})
	for i := range 10 * maxServers {
		b.merge(encodePlaces(map[string]place{fmt.Sprintf("s%d", i): {Addresses: []string{"x:1"}, Count: 1}}))
	}
	b.merge(encodePlaces(map[string]place{"s1": {Addresses: make([]string, 100), Count: 9}, string(make([]byte, 100)): {Count: 1}}))
	if n := len(b.All()); n != maxServers {
		t.Errorf("%d servers", n)
	}
	if len(b.All()["s1"]) != 1 {
		t.Errorf("%v", b.All()["s1"])
	}
}

// A server that was removed is forgotten by all, whoever met whom before; it
// makes room for others, and its own word counts if it should be one after all.
func TestServerBookForgets(t *testing.T) {
	var gone, a, b ServerBook
	gone.set("gone", []string{"10.0.0.9:6443"})
	gone.set("gone", []string{"10.0.0.10:6443"})
	a.merge(gone.encode())
	b.merge(gone.encode())
	if told := a.forget("gone"); told == nil {
		t.Fatal("forgotten, and nobody is told")
	}
	if told := a.forget("gone"); told != nil {
		t.Error("said again")
	}
	a.merge(b.encode())
	b.merge(a.encode())
	if all := a.All(); len(all) != 0 {
		t.Errorf("who forgot it knows %v", all)
	}
	if all := b.All(); len(all) != 0 {
		t.Errorf("who was told knows %v", all)
	}
	for i := range maxServers {
		var s ServerBook
		s.set(fmt.Sprint("server-", i), []string{"10.0.0.1:6443"})
		a.merge(s.encode())
	}
	if all := a.All(); len(all) != maxServers {
		t.Errorf("%d servers are known, of %d", len(all), maxServers)
	}
	gone.merge(b.encode())
	b.merge(gone.encode())
	if all := b.All(); len(all["gone"]) != 1 {
		t.Errorf("its own word does not count: %v", all)
	}
}
