package state

import (
	"context"
	"errors"
)

// EventType is what happened to a record.
type EventType uint8

// Event types.
const (
	Added EventType = iota + 1
	Modified
	Deleted
)

// Event is one change. For Deleted, Record is the last version, with
// Header.ResourceVersion unchanged; ResourceVersion is the deletion's own.
// Prev is the version before, nil for Added: selectors need it to tell
// entering and leaving.
type Event struct {
	Type            EventType
	ResourceVersion uint64
	Record          *Record
	Prev            *Record
}

// ErrTooOld says that a watch cannot start or go on from where it asked,
// since the ring no longer holds it: list again (HTTP 410).
var ErrTooOld = errors.New("state: resource version too old")

// Reader is what everybody reads: the durable store (Machine) and the soft
// one (Soft) both are Readers.
type Reader interface {
	// Snapshot returns the current immutable view. Cheap: O(1).
	Snapshot() Snapshot
	// Watch delivers the events with ResourceVersion > after whose record is
	// of the kind ("" is every kind) and namespace ("" is every namespace),
	// from the ring. ErrTooOld if the ring lost them; an after in the future
	// simply waits.
	Watch(kind, namespace string, after uint64) (Watcher, error)
}

// Watcher reads the ring at its own pace and holds no queue of its own.
// It is not safe for concurrent use.
type Watcher interface {
	// Next blocks until there is at least one event, and returns a batch in
	// order. ErrTooOld when the reader fell out of the ring. progressed is the
	// highest resourceVersion covered, for bookmarks; on a plain wake-up
	// without matching events the batch may be empty and progressed higher.
	Next(ctx context.Context) (batch []Event, progressed uint64, err error)
}

// Snapshot is one immutable version of the store.
type Snapshot interface {
	// ResourceVersion of the newest op it holds.
	ResourceVersion() uint64
	Get(Key) (*Record, bool)
	// Range calls f in (namespace, name) order for every record of the kind
	// in the namespace ("" is all), starting after the key `after` (zero Key:
	// from the start), until f returns false.
	Range(kind, namespace string, after Key, f func(*Record) bool)
	// Len counts the records of a kind in a namespace ("" is all; then O(1)).
	Len(kind, namespace string) int
	// ByOwner calls f for every record that has the uid among its owners.
	ByOwner(uid string, f func(*Record) bool)
	// ByUID finds a live record of any kind.
	ByUID(uid string) (*Record, bool)
	// PodsOnNode calls f for every pod whose NodeName is the node.
	PodsOnNode(node string, f func(*Record) bool)
	// Claimed says whether a live record holds the claim.
	Claimed(claim string) bool
	// Kinds lists the kinds that have records, sorted.
	Kinds() []string
	// NodeTotals are the running totals of a node: what its bound, non-
	// terminal pods request. ok is false for an unknown node.
	NodeTotals(node string) (requested []Quantity, ok bool)
	// FeatureLevel is the cluster's feature level.
	FeatureLevel() uint32
}

// Proposer is the only way to change durable state; consensus implements it.
type Proposer interface {
	// Propose commits the ops in one or more Raft entries, waits until this
	// server applied them, and returns one Result an op, in order. An error
	// is about the commit itself (ErrNotLeader, ErrNoQuorum, context); then
	// the outcome of the ops may be unknown and the caller reads again.
	Propose(ctx context.Context, ops []Op) ([]Result, error)
	// Barrier returns after this server's state holds everything that was
	// committed anywhere before the call: the linearizable read.
	Barrier(ctx context.Context) error
	// Leadership returns the current term and whether this server leads it.
	Leadership() (term uint64, leading bool)
}

// Errors of Proposer.
var (
	ErrNotLeader = errors.New("state: this server is not the leader")
	ErrNoQuorum  = errors.New("state: no quorum")
	ErrDiskFull  = errors.New("state: the state folder is full or read-only")
)
