// Package balance chooses the endpoint of a connection or request: what the
// service proxy and the ingress share. A Pool is the decoded service table and
// who uses which endpoint; choose is pure.
//
// Owner and goroutines: none. A Pool is guarded by its owner; Targets and
// Backends have locks of their own.
package balance

import "github.com/dunlin-project/dunlin/wire"

// tier says how far away an endpoint is.
type tier uint8

const (
	sameNode tier = iota
	sameZone
	elsewhere
)

// penalty of a tier, in connections: an endpoint farther away is taken once
// all nearer ones have that many more to do.
var penalty = [...]float64{sameNode: 0, sameZone: 1, elsewhere: 4}

// candidate is what choose knows of one endpoint.
type candidate struct {
	tier   tier
	weight float64 // > 0
	state  uint8   // wire.Endpoint...
	active int     // connections that it has
	pass   float64 // grows by 1/weight with each choice
	shared bool    // connections are shared out by weight: it differs among the endpoints
	failed bool    // could not be reached a moment ago
	tried  bool    // could not be reached by this very connection
	loop   bool    // leads back to the Service
	silent bool    // its node is not heard of
}

// Classes of candidates: a better one is always preferred, whatever the load.
const (
	classReady = iota
	classReadyFailed
	classServing // terminates and still serves (KEP-1669)
	classServingFailed
	classSilent // one of these, as its silent node said last
	classSilentFailed
	classUnusable
)

func (c *candidate) class(local bool) int {
	class := classUnusable
	switch {
	case c.tried, c.loop, local && c.tier != sameNode:
		return class
	case c.state&wire.EndpointReady != 0:
		class = classReady
	case c.state&wire.EndpointServing != 0 && c.state&wire.EndpointTerminating != 0:
		class = classServing
	default:
		return class
	}
	if c.silent {
		class = classSilent
	}
	if c.failed {
		class++
	}
	return class
}

// preferred says whether it is of the class that new connections go to.
func (c *candidate) preferred(local bool, best int) bool {
	class := c.class(local)
	return class != classUnusable && class == best
}

// choose picks the endpoint of a new connection among n, of which look says
// what there is to know; -1 is none. Pure.
//
// Those that are ready and do not terminate come first; without any, those
// that still serve while they terminate; and last those on nodes that are not
// heard of, which may only be out of the servers' sight. Among them the least
// loaded, near ones first; equals take turns. Where weights differ somebody
// says who gets how many, and neither load nor distance is asked (but for the
// Service's own traffic distribution). One pass and no memory: there may be
// thousands.
func choose(n int, look func(i int) candidate, traffic wire.Traffic, local bool) int {
	var best candidate
	at, class := -1, classUnusable
	for i := range n {
		c := look(i)
		k := c.class(local)
		if k > class || k == classUnusable || (k == class && !better(&c, &best, traffic)) {
			continue
		}
		best, at, class = c, i, k
	}
	return at
}

// better says whether a is to be taken rather than b.
func better(a, b *candidate, traffic wire.Traffic) bool {
	ta, tb := a.tier, b.tier
	if traffic == wire.TrafficSameZone {
		ta, tb = max(ta, sameZone), max(tb, sameZone)
	}
	if traffic != wire.TrafficDefault && ta != tb {
		return ta < tb
	}
	if a.shared {
		if a.pass != b.pass {
			return a.pass < b.pass
		}
		return a.weight > b.weight
	}
	la, lb := float64(a.active), float64(b.active)
	if traffic == wire.TrafficDefault {
		la, lb = la+penalty[ta], lb+penalty[tb]
	}
	if la != lb {
		return la < lb
	}
	return a.pass < b.pass
}
