package nodelifecycle

import "time"

// Leases tells how long ago each node renewed its lease, on the leader's
// monotonic clock. Implemented by controlplane/nodeapi.
type Leases interface {
	// InTerm returns a private map by node name; false until the leases of that
	// leadership are kept, which may begin after the controllers. A node that has not renewed
	// in this term and has not expired yet is present with the age of the fresh
	// TTL that the new leader gave it.
	InTerm(term uint64) (leases map[string]LeaseInfo, ok bool)
	// Expired says whether the node's lease has run out now; false for a node
	// that has none.
	Expired(node string) bool
}

// LeaseInfo is one node's lease.
type LeaseInfo struct {
	// Age since the last renewal was received (or the fresh TTL began).
	Age time.Duration
	// Renewed says that a renewal was received in this term: without one, and
	// before it expires, nothing is known of the node.
	Renewed bool
	// Expired says that the lease ran out (sweep lateness already allowed for).
	Expired bool
	// Stale says that the node renews again but has not reported its pods
	// since: its lost pods keep their mark until it has.
	Stale bool
}
