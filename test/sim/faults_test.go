package sim

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"time"
)

// further draws more faults, apart from the others so that these are what
// they were for a seed that failed once.
func (p *plan) further(seed uint64) {
	r := rand.New(rand.NewPCG(seed, 2))
	for at := time.Duration(0); at < faultTime; {
		at += time.Duration(1+r.IntN(90000)) * time.Millisecond
		p.faults = append(p.faults, p.ofGossip(r, at)...)
	}
}

// ofGossip draws one fault of gossip, which alone must move nothing.
func (p *plan) ofGossip(r *rand.Rand, at time.Duration) []step {
	n, d := r.IntN(p.size.nodes), span(r)
	end := at + d
	nested := func(name string, f func(w *world, by int)) []step {
		return []step{{at, name, func(w *world) { f(w, 1) }}, {end, "end of: " + name, func(w *world) { f(w, -1) }}}
	}
	switch r.IntN(4) {
	case 0:
		return nested(fmt.Sprintf("no datagrams to n%d for %s", n+1, d), func(w *world, by int) { w.blockUDP(w.hosts[n].ip, by) })
	case 1:
		return nested(fmt.Sprintf("no datagrams to s0 for %s", d), func(w *world, by int) { w.blockUDP(w.servers[0].ip, by) })
	case 2:
		return nested(fmt.Sprintf("gossip in two halves for %s", d), func(w *world, by int) {
			w.pairs(func(a, b netip.Addr) { w.part(a, b, by) })
		})
	}
	return nested(fmt.Sprintf("nobody's gossip reaches n%d for %s", n+1, d), func(w *world, by int) {
		for i, h := range w.hosts {
			if i != n {
				w.part(h.ip, w.hosts[n].ip, by)
			}
		}
	})
}
