package proxy

import "testing"

// What a burst needed is given back, what is in use all the time stays.
func TestPipesOfABurstAreClosed(t *testing.T) {
	var p pipePool
	take := func(n int) {
		t.Helper()
		var all []*pipe
		for range n {
			x, err := p.get()
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, x)
		}
		for _, x := range all {
			p.put(x)
		}
	}
	take(40)
	if len(p.free) != 40 {
		t.Fatalf("%d are free", len(p.free))
	}
	for range 20 {
		p.trim()
		take(3)
	}
	if n := len(p.free); n < 3 || n > 5 {
		t.Fatalf("%d are free while three are used", n)
	}
	for range 20 {
		p.trim()
	}
	if len(p.free) != 0 {
		t.Fatalf("%d are free", len(p.free))
	}
	take(2)
	take(freePipes + 5)
	if len(p.free) != freePipes {
		t.Fatalf("%d are free", len(p.free))
	}
	for range 20 {
		p.trim()
	}
}
