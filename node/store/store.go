// Package store is the node's own database: the assignment it was given and
// what must survive an agent restart or a power cut for each pod. It alone
// is enough to run the node's work with no network and no server.
//
// Owner: the agent. Every write is durable when the call returns. Nothing is
// written that only says that time passed, so an idle node writes nothing.
// Values are CBOR with a checksum; field numbers are for ever.
package store

import (
	"errors"

	"github.com/dunlin-project/dunlin/node/network"
	"github.com/dunlin-project/dunlin/wire"
)

// Errors a caller decides on.
var (
	// ErrLocked: another process has the database open.
	ErrLocked = errors.New("the node database is in use by another process")
	// ErrDamaged: a record or the file is not what was written.
	ErrDamaged = errors.New("the node database is damaged")
	// ErrNewer: the database was written by a newer version of the program.
	ErrNewer = errors.New("the node database was written by a newer version: upgrade dunlin")
)

// Assignment is what the node holds of the control plane's wishes.
type Assignment struct {
	Epoch      uint64
	Generation uint64
	// Known is false until the first assignment ever was saved: until then the
	// node does not know what is an orphan.
	Known    bool
	PodCIDRs []string
	Servers  []string
	Keyring  [][]byte
	Site     string
	Seeds    []string
	Objects  map[string]wire.Object // by uid
	// Held are objects, by uid, about which the node does not follow the
	// control plane, which was restored to an older state.
	Held map[string]Hold
	// Lost names what was stored and cannot be opened: the sealing key or the
	// board is another one. Generation is 0 then, so it is fetched again. Not
	// stored.
	Lost []wire.Ref
}

// HoldKind is why an object is held.
type HoldKind uint8

// Kinds of a Hold. The numbers are for ever.
const (
	HoldPod  HoldKind = 1 // a pod that runs here and that the control plane does not know
	HoldOld  HoldKind = 2 // the control plane has an older content
	HoldRef  HoldKind = 3 // what held pods may refer to
	HoldBack HoldKind = 4 // a pod that is not started, since a held one has its place
)

// Hold is what the node remembers of a held object.
type Hold struct {
	Kind HoldKind `cbor:"1,keyasint"`
	// Offered, for HoldOld, is the ResourceVersion that the control plane had.
	Offered uint64 `cbor:"2,keyasint,omitempty"`
}

// Exit is how an attempt of a container ended.
type Exit struct {
	Attempt    int    `cbor:"1,keyasint"`
	Code       int32  `cbor:"2,keyasint,omitempty"`
	Signal     int32  `cbor:"3,keyasint,omitempty"`
	Reason     string `cbor:"4,keyasint,omitempty"`
	Message    string `cbor:"5,keyasint,omitempty"`
	StartedAt  int64  `cbor:"6,keyasint,omitempty"` // wall, unix milliseconds
	FinishedAt int64  `cbor:"7,keyasint,omitempty"`
	// NotStarted: the attempt was never seen running.
	NotStarted bool `cbor:"8,keyasint,omitempty"`
}

// Container is what must survive of one container.
type Container struct {
	Name    string `cbor:"1,keyasint"`
	Attempt int    `cbor:"2,keyasint,omitempty"` // also the restart count
	// Begun: Attempt was, or is about to be, handed to the runtime.
	Begun bool   `cbor:"3,keyasint,omitempty"`
	Boot  string `cbor:"4,keyasint,omitempty"` // machine boot in which it began
	Exit  *Exit  `cbor:"5,keyasint,omitempty"` // how Attempt ended
	Last  *Exit  `cbor:"6,keyasint,omitempty"` // how the attempt before ended
	// Backoff counts the restarts in a row that each ran too short.
	Backoff int    `cbor:"7,keyasint,omitempty"`
	Digest  string `cbor:"8,keyasint,omitempty"` // image of Attempt
	Image   string `cbor:"9,keyasint,omitempty"` // as the manifest named it then
	// Refused: the runtime could not start Attempt, and nothing ran since.
	Refused bool `cbor:"10,keyasint,omitempty"`
}

// Verdict is why a pod failed as a whole: rejected, deadline, evicted.
type Verdict struct {
	Reason  string `cbor:"1,keyasint"`
	Message string `cbor:"2,keyasint,omitempty"`
	// Rejected: the pod never started anything here.
	Rejected bool `cbor:"3,keyasint,omitempty"`
	// Grace bounds, in seconds, what its containers get to end.
	Grace *int64 `cbor:"4,keyasint,omitempty"`
}

// Pod is what must survive of one pod.
type Pod struct {
	UID       string `cbor:"1,keyasint"`
	Namespace string `cbor:"2,keyasint"`
	Name      string `cbor:"3,keyasint"`
	Static    bool   `cbor:"4,keyasint,omitempty"`
	// Object is the pod as apimachinery CBOR, kept only while the assignment
	// no longer holds it but its containers are still to be stopped.
	Object     []byte              `cbor:"5,keyasint,omitempty"`
	StartTime  int64               `cbor:"6,keyasint,omitempty"` // wall, unix milliseconds
	Containers []Container         `cbor:"7,keyasint,omitempty"`
	Allocation *network.Allocation `cbor:"8,keyasint,omitempty"`
	// Volumes: something was prepared on disk and must be taken down.
	Volumes bool     `cbor:"9,keyasint,omitempty"`
	Verdict *Verdict `cbor:"10,keyasint,omitempty"`
	// Stopping: the stop began and is not taken back; at this wall time.
	Stopping int64 `cbor:"11,keyasint,omitempty"`
	// Initialized: all init containers were done once.
	Initialized bool `cbor:"12,keyasint,omitempty"`
	// Finished: all containers ended for good; resources may be released.
	Finished bool `cbor:"13,keyasint,omitempty"`
	// IPs stay known after the addresses were given back.
	IPs []string `cbor:"14,keyasint,omitempty"`
	// Claims are the names of the volumes of the pod's claims: their data stays
	// for as long as the record does.
	Claims []string `cbor:"15,keyasint,omitempty"`
}

// Gone is the tombstone of a pod whose last report is not acknowledged yet,
// or that the assignment still lists: it is never started again.
type Gone struct {
	UID       string `cbor:"1,keyasint"`
	Namespace string `cbor:"2,keyasint"`
	Name      string `cbor:"3,keyasint"`
	Status    []byte `cbor:"4,keyasint,omitempty"` // final corev1.PodStatus, apimachinery CBOR
	Acked     bool   `cbor:"5,keyasint,omitempty"`
}

// Store is the database. Safe for concurrent use.
type Store interface {
	// Assignment returns what was saved last; the caller may keep and change
	// the maps, not the object data.
	Assignment() (Assignment, error)
	// SaveAssignment replaces it, writing only the objects that changed.
	SaveAssignment(a Assignment) error

	Pods() ([]Pod, error)
	SavePod(p Pod) error
	// DeletePod removes the pod's record; gone, when not nil, is written in
	// the same step.
	DeletePod(uid string, gone *Gone) error

	Gones() ([]Gone, error)
	SaveGone(g Gone) error
	DeleteGone(uid string) error

	// Check says why nothing can be saved, after another try: nil, and nothing
	// is written, when the last write succeeded.
	Check() error

	// Boots counts the opens of this database, this one included.
	Boots() uint64
	Close() error
}

// changed says which objects of next must be written, and which of old
// removed.
func changed(old, next map[string]wire.Object) (put []wire.Object, del []string) {
	for uid, o := range next {
		if was, ok := old[uid]; ok && was.ResourceVersion == o.ResourceVersion && len(was.Data) == len(o.Data) {
			continue
		}
		put = append(put, o)
	}
	for uid := range old {
		if _, ok := next[uid]; !ok {
			del = append(del, uid)
		}
	}
	return put, del
}
