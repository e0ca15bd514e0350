package wire

// NodeUsage is what a node and its pods use: the one message of a stream of
// kind "usage".
type NodeUsage struct {
	UnixMilli    int64      `cbor:"1,keyasint"`           // node's wall clock
	WindowMillis int64      `cbor:"2,keyasint"`           // over which CPU was measured
	CPUNanos     uint64     `cbor:"3,keyasint,omitempty"` // of CPU a second
	MemoryBytes  uint64     `cbor:"4,keyasint,omitempty"` // working set
	Pods         []PodUsage `cbor:"5,keyasint,omitempty"`
}

// PodUsage is one running pod's.
type PodUsage struct {
	Namespace  string           `cbor:"1,keyasint"`
	Name       string           `cbor:"2,keyasint"`
	UID        string           `cbor:"3,keyasint"`
	Containers []ContainerUsage `cbor:"4,keyasint,omitempty"`
}

// ContainerUsage is one running container's.
type ContainerUsage struct {
	Name        string `cbor:"1,keyasint"`
	Attempt     int32  `cbor:"2,keyasint,omitempty"`
	CPUNanos    uint64 `cbor:"3,keyasint,omitempty"` // of CPU a second
	MemoryBytes uint64 `cbor:"4,keyasint,omitempty"` // working set
}

// WireType implements Message.
func (NodeUsage) WireType() Type { return TypeNodeUsage }
