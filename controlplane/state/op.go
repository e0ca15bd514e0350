package state

import "errors"

// OpType is the verb of an Op. The numbers are on disk for ever.
type OpType uint8

// The verbs. An unknown one halts apply (ErrUnknownOp), it is never skipped.
const (
	// OpCreate inserts Record; refused with ReasonExists if the key is taken,
	// with ReasonNamespace if its namespace is missing or terminating (unless
	// Op.IgnoreNamespace), with ReasonClaim if a claim is held by another.
	OpCreate OpType = 1
	// OpUpdate replaces the record under Record.Header.Key. Bodies that are
	// nil in Record are kept when the matching Keep bit is set.
	OpUpdate OpType = 2
	// OpDelete removes the record. If finalizers are left it is refused with
	// ReasonFinalizers (mark deletion with OpUpdate first).
	OpDelete OpType = 3
	// OpBind sets Header.NodeName of a pod: pod uid, unbound, not deleting,
	// not gated; node uid, not deleting; totals fit; host ports free.
	OpBind OpType = 4
	// OpRaiseFeature raises the cluster's feature level. Irreversible.
	OpRaiseFeature OpType = 5
	// OpTimeFloor stores the leader's wall clock once a day (Op.Unix).
	OpTimeFloor OpType = 6
	// OpBootstrap makes an empty state a cluster: Op.ClusterID, epoch 1,
	// feature level Op.Feature. Refused with ReasonExists once there is one.
	OpBootstrap OpType = 7
	// OpRecover starts a new recovery epoch: what a restore from a backup, or
	// a start from less than everything, proposes first. The version counter
	// gains 2^32 and the watch ring is emptied, so that no version that was
	// ever handed out can come back with another meaning.
	OpRecover OpType = 8

	opLast = OpRecover
)

// Keep bits of Op.Keep.
const (
	KeepMeta uint8 = 1 << iota
	KeepSpec
	KeepStatus
)

// Op is one conditional change. Many independent Ops travel in one Raft
// entry, each with its own Result: there are no multi-object transactions.
type Op struct {
	Type   OpType  `cbor:"1,keyasint"`
	Record *Record `cbor:"2,keyasint,omitempty"` // create, update: the complete new record (ResourceVersion ignored)
	Keep   uint8   `cbor:"3,keyasint,omitempty"`
	Key    *Key    `cbor:"4,keyasint,omitempty"` // delete, bind
	// Preconditions; zero values are "any". UID is required for update,
	// delete and bind.
	UID             string `cbor:"5,keyasint,omitempty"`
	ResourceVersion uint64 `cbor:"6,keyasint,omitempty"`
	IgnoreNamespace bool   `cbor:"7,keyasint,omitempty"`
	// Bind.
	Node    string `cbor:"8,keyasint,omitempty"`
	NodeUID string `cbor:"9,keyasint,omitempty"`
	// Term, when not 0, is the leadership term in which the op was decided;
	// Apply refuses it with ReasonTerm if the entry's term differs (the fence).
	Term uint64 `cbor:"10,keyasint,omitempty"`
	// RaiseFeature, TimeFloor.
	Feature uint32 `cbor:"11,keyasint,omitempty"`
	Unix    int64  `cbor:"12,keyasint,omitempty"`
	// Bootstrap.
	ClusterID string `cbor:"13,keyasint,omitempty"`
}

// Reason says why Apply refused an Op.
type Reason uint8

// Reasons. 0 is success.
const (
	ReasonNone Reason = iota
	ReasonExists
	ReasonNotFound
	ReasonUID        // another object lives under the key
	ReasonConflict   // resourceVersion differs
	ReasonNamespace  // namespace missing or terminating
	ReasonClaim      // Result.Detail names the claim
	ReasonFinalizers // delete with finalizers left
	ReasonTerm       // decided in another term
	ReasonBound      // pod already has a node
	ReasonDeleting   // pod or node is being deleted
	ReasonGated      // pod has scheduling gates
	ReasonNoNode     // node missing or replaced
	ReasonNoFit      // Result.Detail: "cpu: needs 500, free 200 of 2000"
	ReasonHostPort   // Result.Detail names the port
	ReasonInvalid    // malformed op: a defect of the proposer
)

// Result is the outcome of one Op. On success ResourceVersion is the
// version it was given (for a delete: of the deletion).
type Result struct {
	Reason          Reason
	Detail          string
	ResourceVersion uint64
	// Record is the record after the op (nil after a delete), or, on refusal
	// for a reason that concerns an existing record, that record.
	Record *Record
}

// ErrUnknownOp halts a replica that meets an op newer than itself.
var ErrUnknownOp = errors.New("state: operation unknown to this version; upgrade this server")
