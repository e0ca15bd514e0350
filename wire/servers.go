package wire

// ALPNServer is what servers say to each other beside Raft: forwarded writes,
// read indexes, who they are. Both ends show a server's certificate.
const ALPNServer = "dunlin-server/1"

// ProposeRequest hands ops to the leader. Entry is as it would stand in the
// log (state.EncodeEntry).
type ProposeRequest struct {
	Entry []byte `cbor:"1,keyasint"`
}

// ProposeReply has the results of the ops, in order (state.EncodeResults).
// Version is that of the state that holds them.
type ProposeReply struct {
	Results []byte `cbor:"1,keyasint,omitempty"`
	Version uint64 `cbor:"2,keyasint,omitempty"`
}

// ReadRequest asks the leader which version a read must show that begins
// now.
type ReadRequest struct{}

// ReadReply names it, after the leader made sure that it still leads.
type ReadReply struct {
	Version uint64 `cbor:"1,keyasint"`
}

// ServerStatusRequest asks a server how it is.
type ServerStatusRequest struct {
	// SyncMicros is the slow fsync of the slowest server, as far as the leader
	// that asks knows; 0 is not said.
	SyncMicros int64 `cbor:"1,keyasint,omitempty"`
}

// ServerStatusReply answers.
type ServerStatusReply struct {
	Version   uint64   `cbor:"1,keyasint"`           // of the state
	Epoch     uint64   `cbor:"2,keyasint"`           // recovery epoch
	Feature   uint32   `cbor:"3,keyasint"`           // highest level it understands
	Build     string   `cbor:"4,keyasint,omitempty"` // build version
	Leader    string   `cbor:"5,keyasint,omitempty"` // server id it follows
	Fault     string   `cbor:"6,keyasint,omitempty"` // what is wrong with it
	Addresses []string `cbor:"7,keyasint,omitempty"`
	UnixMilli int64    `cbor:"8,keyasint,omitempty"` // its wall clock
	// SyncMicros is its own slow fsync, the 99th percentile of the newest.
	SyncMicros int64 `cbor:"9,keyasint,omitempty"`
}

// ServerKeysRequest asks, once, for what every server of a cluster has. It is
// answered only over a connection with a server's certificate.
type ServerKeysRequest struct{}

// ServerKeysReply is the trust of the cluster. It is never logged and never
// passes through Raft.
type ServerKeysReply struct {
	CA       []byte `cbor:"1,keyasint"` // PEM
	CAKey    []byte `cbor:"2,keyasint"` // PEM
	SealKey  []byte `cbor:"3,keyasint"`
	TokenKey []byte `cbor:"4,keyasint"` // PEM; signs ServiceAccount tokens
	Epoch    uint64 `cbor:"5,keyasint"`
}

// AnnounceRequest tells the leader that a server is there, and where. The
// leader adds it to the cluster if it is new.
type AnnounceRequest struct {
	Name      string   `cbor:"1,keyasint"`
	Addresses []string `cbor:"2,keyasint"`
	Build     string   `cbor:"3,keyasint,omitempty"`
	Zone      string   `cbor:"4,keyasint,omitempty"`
	// ID is whom it is about, when a server passes on what another one told
	// it; "" is the sender.
	ID string `cbor:"5,keyasint,omitempty"`
}

// AnnounceReply says whether it is known now.
type AnnounceReply struct {
	Refused string `cbor:"1,keyasint,omitempty"`
	// Removed: it was taken out of the cluster and must not come back with
	// this state.
	Removed bool `cbor:"2,keyasint,omitempty"`
}

// NetCheckRequest asks a server whom it reaches.
type NetCheckRequest struct{}

// NetCheckReply is its report (gossip.NetReport as JSON).
type NetCheckReply struct {
	Report []byte `cbor:"1,keyasint"`
}

// WireType implements Message.
func (NetCheckRequest) WireType() Type { return TypeNetCheckRequest }

// WireType implements Message.
func (NetCheckReply) WireType() Type { return TypeNetCheckReply }

// WireType implements Message.
func (ProposeRequest) WireType() Type { return TypeProposeRequest }

// WireType implements Message.
func (ProposeReply) WireType() Type { return TypeProposeReply }

// WireType implements Message.
func (ReadRequest) WireType() Type { return TypeReadRequest }

// WireType implements Message.
func (ReadReply) WireType() Type { return TypeReadReply }

// WireType implements Message.
func (ServerStatusRequest) WireType() Type { return TypeServerStatusRequest }

// WireType implements Message.
func (ServerStatusReply) WireType() Type { return TypeServerStatusReply }

// WireType implements Message.
func (ServerKeysRequest) WireType() Type { return TypeServerKeysRequest }

// WireType implements Message.
func (ServerKeysReply) WireType() Type { return TypeServerKeysReply }

// WireType implements Message.
func (AnnounceRequest) WireType() Type { return TypeAnnounceRequest }

// WireType implements Message.
func (AnnounceReply) WireType() Type { return TypeAnnounceReply }
