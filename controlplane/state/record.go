// Package state is the replicated state machine: every durable object of the
// cluster as one immutable Record, changed only by Ops that Raft has committed.
//
// Owner and goroutines: Machine.Apply is called by one goroutine (the Raft
// FSM); every reader works on an immutable Snapshot and never blocks it.
// The package never decodes a Kubernetes type and never reads a clock, a
// random source or a map in iteration order while applying: times and ids
// travel in the Op (design invariant 4).
package state

// HeaderVersion is the newest Header layout this binary writes.
const HeaderVersion = 1

// Codec names how a Body's bytes are encoded.
type Codec uint8

// CodecKubeCBOR is apimachinery's CBOR serializer (self-described tag
// stripped).
const CodecKubeCBOR Codec = 1

// CodecSealed is a CodecKubeCBOR body sealed by the proposer with the
// cluster's key (Secrets): the state, the log and snapshots hold none of
// them in clear. To the state machine it is as opaque as any other.
const CodecSealed Codec = 2

// Key names one object. Kind is schema.GroupKind.String(): "Pod",
// "Deployment.apps". Namespace is empty for cluster-scoped kinds.
type Key struct {
	Kind      string `cbor:"1,keyasint"`
	Namespace string `cbor:"2,keyasint,omitempty"`
	Name      string `cbor:"3,keyasint"`
}

// Owner is one metadata.ownerReferences entry, as garbage collection needs it.
type Owner struct {
	UID        string `cbor:"1,keyasint"`
	Kind       string `cbor:"2,keyasint"` // GroupKind form, like Key.Kind
	Name       string `cbor:"3,keyasint"`
	Controller bool   `cbor:"4,keyasint,omitempty"`
	Block      bool   `cbor:"5,keyasint,omitempty"` // blockOwnerDeletion
}

// HostPort is one port that a bound pod takes on its node.
type HostPort struct {
	IP       string `cbor:"1,keyasint,omitempty"` // "" is every address
	Protocol string `cbor:"2,keyasint"`           // TCP, UDP, SCTP
	Port     int32  `cbor:"3,keyasint"`
}

// Quantity is one entry of a resource vector. Units: millicores for "cpu",
// bytes for "memory" and "ephemeral-storage", a count for everything else.
type Quantity struct {
	Name  string `cbor:"1,keyasint"`
	Value int64  `cbor:"2,keyasint"`
}

// Header is the part of an object that the state machine, the controllers'
// indexes and the scheduler read without decoding a body. Its layout is
// pinned by golden files.
type Header struct {
	Version         uint8             `cbor:"1,keyasint"`
	Key             Key               `cbor:"2,keyasint"`
	APIVersion      string            `cbor:"3,keyasint"` // "v1", "apps/v1": what the bodies were encoded from
	UID             string            `cbor:"4,keyasint"`
	ResourceVersion uint64            `cbor:"5,keyasint"` // set by Apply
	Generation      int64             `cbor:"6,keyasint,omitempty"`
	Created         int64             `cbor:"7,keyasint"` // Unix seconds
	Owners          []Owner           `cbor:"8,keyasint,omitempty"`
	Finalizers      []string          `cbor:"9,keyasint,omitempty"`
	Deleted         int64             `cbor:"10,keyasint,omitempty"` // deletionTimestamp, Unix seconds; 0 is not deleting
	DeletionGrace   *int64            `cbor:"11,keyasint,omitempty"` // seconds
	Labels          map[string]string `cbor:"12,keyasint,omitempty"`
	// Pods only:
	NodeName  string     `cbor:"13,keyasint,omitempty"`
	Phase     string     `cbor:"14,keyasint,omitempty"` // also Namespace
	Requests  []Quantity `cbor:"15,keyasint,omitempty"` // effective pod requests, sorted by name; includes "pods":1
	HostPorts []HostPort `cbor:"16,keyasint,omitempty"`
	Gated     bool       `cbor:"17,keyasint,omitempty"` // has spec.schedulingGates
	// Nodes only: status.allocatable, sorted by name.
	Allocatable []Quantity `cbor:"18,keyasint,omitempty"`
	// Claims are strings that at most one live record may hold, such as
	// "clusterip/10.43.0.10", "nodeport/30080" or "podcidr/10.42.3.0/24".
	Claims []string `cbor:"19,keyasint,omitempty"`
	// Ready mirrors the pod's Ready condition, so that endpoint and replica
	// controllers count without decoding.
	Ready bool `cbor:"20,keyasint,omitempty"`
}

// Body is an opaque, immutable blob. Bodies are interned by hash, so equal
// bodies of many records share memory. Never modify Data.
type Body struct {
	Codec Codec  `cbor:"1,keyasint"`
	Data  []byte `cbor:"2,keyasint"`
}

// Record is one version of one object. It is immutable: Apply makes a new
// Record for every change, and readers may keep and share the pointer.
//
// Meta is what of metadata is not in the Header (annotations, managedFields,
// generateName, ...), Spec is the whole rest of the object without metadata
// and status (so "data" of a ConfigMap too), Status is the status field.
type Record struct {
	Header Header `cbor:"1,keyasint"`
	Meta   *Body  `cbor:"2,keyasint,omitempty"`
	Spec   *Body  `cbor:"3,keyasint,omitempty"`
	Status *Body  `cbor:"4,keyasint,omitempty"` // nil where the kind has none or it is empty
}
