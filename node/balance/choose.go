// Package balance chooses the endpoint of a connection or request: what the
// service proxy and the ingress share. A Pool is the decoded service table and
// who uses which endpoint; choose is pure.
//
// Owner and goroutines: none. A Pool is guarded by its owner; Targets and
// Backends have locks of their own.
package balance

import (
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

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
	failed bool    // could not be reached a moment ago
	tried  bool    // could not be reached by this very connection
}

// choose picks the endpoint of a new connection; -1 is none. Pure.
//
// Those that are ready and do not terminate come first; without any, those
// that still serve while they terminate (KEP-1669). Among them the least
// loaded by weight, near ones first; equals take turns by weight.
func choose(list []candidate, traffic wire.Traffic, local bool) int {
	usable := func(c *candidate, serving bool) bool {
		switch {
		case c.tried, local && c.tier != sameNode:
			return false
		case serving:
			return c.state&wire.EndpointServing != 0 && c.state&wire.EndpointTerminating != 0
		}
		return c.state&wire.EndpointReady != 0
	}
	for _, serving := range []bool{false, true} {
		for _, failed := range []bool{false, true} {
			best, at := (*candidate)(nil), -1
			for i := range list {
				c := &list[i]
				if !usable(c, serving) || c.failed != failed {
					continue
				}
				if best == nil || better(c, best, traffic) {
					best, at = c, i
				}
			}
			if best != nil {
				return at
			}
		}
	}
	return -1
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
	la, lb := float64(a.active)/a.weight, float64(b.active)/b.weight
	if traffic == wire.TrafficDefault {
		la, lb = la+penalty[ta], lb+penalty[tb]
	}
	if la != lb {
		return la < lb
	}
	return a.pass < b.pass
}

// reachable says whether a Service has anything to connect to; where it has
// not, nobody listens, and clients are refused at once.
func reachable(list []candidate, local bool) bool {
	return choose(list, wire.TrafficDefault, local) >= 0
}

const (
	// failedFor is how long an endpoint that could not be reached is the last
	// choice.
	failedFor = 5 * time.Second
	// IdleFor is how long nothing has to pass through a connection to an
	// endpoint that terminates until it is closed.
	IdleFor = 5 * time.Second
)
