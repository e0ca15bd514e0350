package controlplane

import "github.com/dunlin-project/dunlin/controlplane/state"

// Bounds of what a server keeps only to be quick: the watch ring, from which
// watchers go on after a break instead of listing anew, and the cache of
// decoded objects. A machine of 2 GiB and more has room for all of it.
const (
	leastKept   = 4 << 20
	mostRing    = 32 << 20
	mostObjects = 24 << 20
	leastEvents = 2 << 20
	mostEvents  = 16 << 20
)

// Events have as much as objects, 2 to 16 MiB, and half of that for their
// watches.
func eventRoom(memory uint64) state.SoftOptions {
	room := int64(mostEvents)
	if memory != 0 {
		room = int64(min(max(memory/128, leastEvents), mostEvents))
	}
	return state.SoftOptions{Default: state.Limit{Bytes: room}, RingBytes: room / 2}
}

// rooms are the bounds, in bytes, on a machine with so much memory (0: not
// known): a 64th and a 128th of it, since the collector lets the heap grow to
// half more than what is kept.
func rooms(memory uint64) (ring int64, objects int) {
	if memory == 0 {
		return mostRing, mostObjects
	}
	share := func(of, most uint64) uint64 { return min(max(memory/of, leastKept), most) }
	return int64(share(64, mostRing)), int(share(128, mostObjects))
}
