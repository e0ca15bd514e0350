// Package wire is the node protocol: its messages and their CBOR framing,
// shared by controlplane/nodeapi (server) and node/link (client). Field
// numbers are for ever; a reader ignores fields it does not know.
package wire

// ALPN names on port 6443. No ALPN means HTTP/1.1.
const (
	ALPNNode   = "dunlin-node/1"   // leases, pulls, reports: one connection a node
	ALPNStream = "dunlin-stream/1" // opened by the node when asked: logs, exec
	ALPNJoin   = "dunlin-join/1"   // no client certificate yet
	ALPNRaft   = "dunlin-raft/1"
	// ALPNRelay is a node's way to the leader by way of another server: a Hello
	// in each direction, and then whatever the leader and the node say to each
	// other, which is TLS of their own.
	ALPNRelay = "dunlin-relay/1"
)

// Hello is the first message in both directions on every connection.
type Hello struct {
	ClusterID string `cbor:"1,keyasint"`
	Epoch     uint64 `cbor:"2,keyasint"` // recovery epoch: lower than seen is refused
	Feature   uint32 `cbor:"3,keyasint"` // highest feature level this side speaks (feature.Level)
	Version   string `cbor:"4,keyasint"` // build version, for people
	NodeName  string `cbor:"5,keyasint,omitempty"`
	NodeUID   string `cbor:"6,keyasint,omitempty"`
	BootID    string `cbor:"7,keyasint,omitempty"`
	UnixMilli int64  `cbor:"8,keyasint,omitempty"` // sender's wall clock
	Term      uint64 `cbor:"9,keyasint,omitempty"` // server: its term
	Refused   string `cbor:"10,keyasint,omitempty"`
	// Node certificate only usable for Renew and Time when true (server).
	Limited bool `cbor:"11,keyasint,omitempty"`
	// GossipID is the server's member id in the gossip pool of its own site,
	// where leases may go by UDP; empty elsewhere.
	GossipID string `cbor:"12,keyasint,omitempty"`
	// Addresses are those of the sender: of a server; of a node, the one that
	// its connection has at its own end. Peers are all that a server knows of
	// the servers, by id.
	Addresses []string            `cbor:"13,keyasint,omitempty"`
	Peers     map[string][]string `cbor:"14,keyasint,omitempty"`
	// Leader are the addresses of the server that leads, when this one refuses
	// since it does not.
	Leader []string `cbor:"15,keyasint,omitempty"`
	// Stop, with Refused: what the cluster gave this node runs elsewhere (it
	// was declared dead, or it is the copy of another machine's disk), so it
	// stops those pods.
	Stop bool `cbor:"16,keyasint,omitempty"`
	// ClusterLevel is the cluster's feature level, between servers; 0 before it
	// is known.
	ClusterLevel uint32 `cbor:"17,keyasint,omitempty"`
}

// RefusedNotLeading is what Hello.Refused says when the server does not lead:
// the node goes to Hello.Leader, or comes again.
const RefusedNotLeading = "this server does not lead"

// LeaseRequest renews the node's lease. Sent every 2 s.
type LeaseRequest struct {
	Counter    uint64 `cbor:"1,keyasint"`           // within the boot id
	Generation uint64 `cbor:"2,keyasint,omitempty"` // assignment generation held
}

// LeaseReply is the leader's acknowledgement, end to end.
type LeaseReply struct {
	Counter    uint64 `cbor:"1,keyasint"`
	Term       uint64 `cbor:"2,keyasint,omitempty"`
	Generation uint64 `cbor:"3,keyasint,omitempty"` // newest assignment generation: pull if it differs
	Refused    string `cbor:"4,keyasint,omitempty"`
	// GossipID is as in Hello; sent when it is another than this connection
	// was told, since a server's pool starts after its port does.
	GossipID string `cbor:"5,keyasint,omitempty"`
	// Twin is where another machine is that has this node's key, and is refused.
	Twin string `cbor:"6,keyasint,omitempty"`
}

// Ref names an object inside an assignment.
type Ref struct {
	Kind      string `cbor:"1,keyasint"` // GroupKind form
	Namespace string `cbor:"2,keyasint,omitempty"`
	Name      string `cbor:"3,keyasint"`
}

// Object is one object as apimachinery CBOR, whole.
type Object struct {
	Ref             Ref    `cbor:"1,keyasint"`
	UID             string `cbor:"2,keyasint"`
	ResourceVersion uint64 `cbor:"3,keyasint"`
	Data            []byte `cbor:"4,keyasint"`
	// Revision is the object's version in the cluster when this content was
	// sent, for kinds whose ResourceVersion here is a hash of what the node
	// needs of them.
	Revision uint64 `cbor:"5,keyasint,omitempty"`
}

// PullRequest asks for the assignment. Have lists what the node holds, so
// that unchanged objects are not sent again.
type PullRequest struct {
	Generation uint64            `cbor:"1,keyasint,omitempty"`
	Have       map[string]uint64 `cbor:"2,keyasint,omitempty"` // object uid -> resourceVersion
}

// Assignment is everything the node shall run and all that it refers to:
// Pods, ConfigMaps, Secrets, the Node itself, RuntimeClasses, the cluster
// CA. It is persisted (fsynced) before the node acts on it.
type Assignment struct {
	Epoch      uint64 `cbor:"1,keyasint"`
	Generation uint64 `cbor:"2,keyasint"` // changes whenever the content does
	// Unchanged: the node's generation is current; the rest is empty.
	Unchanged bool     `cbor:"3,keyasint,omitempty"`
	Objects   []Object `cbor:"4,keyasint,omitempty"` // new or changed, compared with Have
	Keep      []string `cbor:"5,keyasint,omitempty"` // uids of unchanged objects that stay
	PodCIDRs  []string `cbor:"6,keyasint,omitempty"`
	Servers   []string `cbor:"7,keyasint,omitempty"` // host:port list, to persist
	UnixMilli int64    `cbor:"8,keyasint,omitempty"` // time hint
	Keyring   [][]byte `cbor:"9,keyasint,omitempty"` // gossip keys of the site, first is primary
	Site      string   `cbor:"10,keyasint,omitempty"`
	Seeds     []string `cbor:"11,keyasint,omitempty"` // gossip addresses of the site
	// Lost are the versions that recoveries of the cluster gave up.
	Lost []Lost `cbor:"12,keyasint,omitempty"`
}

// Lost are the versions after After and up to Before, which were given up when
// Epoch began.
type Lost struct {
	Epoch  uint64 `cbor:"1,keyasint"`
	After  uint64 `cbor:"2,keyasint"`
	Before uint64 `cbor:"3,keyasint"`
}

// PodReport is the newest status of one pod. Terminal entries are kept by
// the node until acknowledged.
type PodReport struct {
	Namespace string `cbor:"1,keyasint"`
	Name      string `cbor:"2,keyasint"`
	UID       string `cbor:"3,keyasint"`
	Status    []byte `cbor:"4,keyasint,omitempty"` // corev1.PodStatus, apimachinery CBOR
	Terminal  bool   `cbor:"5,keyasint,omitempty"`
	// Gone: everything of the pod is removed from the node; the API object may
	// go (the node's final delete, guarded by uid).
	Gone bool `cbor:"6,keyasint,omitempty"`
	// Mirror: the pod is a static pod of the node; Object is the whole mirror
	// Pod to create if it is missing.
	Mirror []byte `cbor:"7,keyasint,omitempty"`
	// Ports maps containerPort to the port where it is really reached, on
	// nodes without a pod network (annotation dunlin.dev/ports).
	Ports map[int32]int32 `cbor:"8,keyasint,omitempty"`
}

// EventReport is one Event for the soft store.
type EventReport struct {
	Object    Ref    `cbor:"1,keyasint"`
	UID       string `cbor:"2,keyasint,omitempty"`
	FieldPath string `cbor:"3,keyasint,omitempty"`
	Type      string `cbor:"4,keyasint"` // Normal, Warning
	Reason    string `cbor:"5,keyasint"`
	Message   string `cbor:"6,keyasint"`
	Component string `cbor:"7,keyasint"`
	UnixMilli int64  `cbor:"8,keyasint"`
	Count     int32  `cbor:"9,keyasint,omitempty"`
	// Over: what this very event said is not so any more. It is removed, and
	// nothing new is told.
	Over bool `cbor:"10,keyasint,omitempty"`
}

// Report carries a batch of news. Older (BootID, Seq) pairs are dropped.
type Report struct {
	BootID string        `cbor:"1,keyasint"`
	Seq    uint64        `cbor:"2,keyasint"`
	Pods   []PodReport   `cbor:"3,keyasint,omitempty"`
	Node   []byte        `cbor:"4,keyasint,omitempty"` // corev1.Node: labels, annotations and status the node owns
	Events []EventReport `cbor:"5,keyasint,omitempty"`
	// Volumes are those that the node was told to remove. Their uids come back
	// in ReportReply.Committed or Retry.
	Volumes []VolumeReport `cbor:"6,keyasint,omitempty"`
}

// VolumeReport is the node's word on a PersistentVolume of its own.
type VolumeReport struct {
	Name    string `cbor:"1,keyasint"`
	UID     string `cbor:"2,keyasint"`
	Removed bool   `cbor:"3,keyasint,omitempty"` // nothing of its data is left
}

// ReportReply acknowledges what is committed.
type ReportReply struct {
	Seq uint64 `cbor:"1,keyasint"`
	// Committed and Unknown are pod uids: durable now, and not (or no longer)
	// in the cluster: the node stops such a pod unless it is static.
	Committed []string `cbor:"2,keyasint,omitempty"`
	Unknown   []string `cbor:"3,keyasint,omitempty"`
	Retry     []string `cbor:"4,keyasint,omitempty"` // lost a race: send again
	Refused   string   `cbor:"5,keyasint,omitempty"`
	// Epoch is the recovery epoch in which this was said: a node that has no
	// assignment of it yet does not act on Unknown. 0: not told.
	Epoch uint64 `cbor:"6,keyasint,omitempty"`
}

// StreamRequest asks the node, over its own connection, to open a stream
// back (ALPNStream) and serve it.
type StreamRequest struct {
	ID        string `cbor:"1,keyasint"` // unguessable, single use
	Kind      string `cbor:"2,keyasint"` // logs, metrics, usage, netcheck; exec, attach, portforward: see streams.go
	Namespace string `cbor:"3,keyasint,omitempty"`
	Pod       string `cbor:"4,keyasint,omitempty"`
	UID       string `cbor:"5,keyasint,omitempty"`
	Container string `cbor:"6,keyasint,omitempty"`
	Options   []byte `cbor:"7,keyasint,omitempty"` // corev1.PodLogOptions as apimachinery CBOR
}

// StreamHeader is the first frame on a stream connection, node to server,
// and names the request. A second one follows as soon as the node knows
// whether it can serve it (at the latest with the first byte): with Error, or
// empty, and then raw bytes follow until close (of exec, attach and
// portforward: the frames of wire/mux, in both directions). A stream that
// breaks off ends without TLS's closing alert.
type StreamHeader struct {
	ID    string `cbor:"1,keyasint"`
	Error string `cbor:"2,keyasint,omitempty"`
	Code  int32  `cbor:"3,keyasint,omitempty"` // HTTP status for Error
}

// JoinRequest is sent over ALPNJoin, after the server's chain was checked
// against the CA pin of the join line.
type JoinRequest struct {
	TokenID   string            `cbor:"1,keyasint"`
	Proof     []byte            `cbor:"2,keyasint"` // HMAC(token secret, TLS exporter || CSR): the secret never travels
	CSR       []byte            `cbor:"3,keyasint"` // DER
	NodeName  string            `cbor:"4,keyasint"`
	BootID    string            `cbor:"5,keyasint"`
	Facts     map[string]string `cbor:"6,keyasint,omitempty"` // machine-id, board serial, mac: clone detection
	Addresses []string          `cbor:"7,keyasint,omitempty"`
	Server    bool              `cbor:"8,keyasint,omitempty"`
}

// JoinReply grants an identity.
type JoinReply struct {
	Refused   string   `cbor:"1,keyasint,omitempty"`
	Cert      []byte   `cbor:"2,keyasint,omitempty"` // DER chain, leaf first, concatenated
	CA        []byte   `cbor:"3,keyasint,omitempty"` // DER
	ClusterID string   `cbor:"4,keyasint,omitempty"`
	Epoch     uint64   `cbor:"5,keyasint,omitempty"`
	NodeName  string   `cbor:"6,keyasint,omitempty"` // what the server made of the name
	NodeUID   string   `cbor:"7,keyasint,omitempty"`
	Servers   []string `cbor:"8,keyasint,omitempty"`
	// Leader are the addresses of the server to ask instead, when this one
	// refuses since it does not lead.
	Leader []string `cbor:"9,keyasint,omitempty"`
	// Notice is for people: what is not as they may expect.
	Notice string `cbor:"10,keyasint,omitempty"`
}

// RenewRequest asks for a new certificate with the same or a new key.
type RenewRequest struct {
	CSR []byte `cbor:"1,keyasint"`
}

// RenewReply grants it.
type RenewReply struct {
	Refused string `cbor:"1,keyasint,omitempty"`
	Cert    []byte `cbor:"2,keyasint,omitempty"`
}

// Nudge is a hint from the server that something changed.
type Nudge struct {
	Generation uint64 `cbor:"1,keyasint,omitempty"`
	// Services is the newest generation of the service table.
	Services uint64 `cbor:"2,keyasint,omitempty"`
}
