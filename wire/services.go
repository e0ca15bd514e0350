package wire

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// The service table is what every node needs to route to Services and to
// answer DNS: one small item for each Service, EndpointSlice and Node, and one
// with facts of the cluster. It travels apart from the assignment, as deltas,
// and a node that lost it only asks again.

// ServicesRequest asks for what changed in the service table.
type ServicesRequest struct {
	// Generation of what the node holds; 0 is nothing.
	Generation uint64 `cbor:"1,keyasint,omitempty"`
	// Digest of what the node holds: a server that does not know how far a
	// Generation of before its start lags can still say that nothing is missing.
	Digest uint64 `cbor:"2,keyasint,omitempty"`
	// Filling: Generation is that of a page of a full table.
	Filling bool `cbor:"3,keyasint,omitempty"`
}

// ServicesReply is one page of changes.
type ServicesReply struct {
	Generation uint64 `cbor:"1,keyasint"` // of the node, once it took the page
	Unchanged  bool   `cbor:"2,keyasint,omitempty"`
	// Full: this is the first page of the whole table; what the node holds is
	// forgotten once the last one is here.
	Full  bool          `cbor:"3,keyasint,omitempty"`
	Items []ServiceItem `cbor:"4,keyasint,omitempty"`
	Gone  []string      `cbor:"5,keyasint,omitempty"` // keys
	More  bool          `cbor:"6,keyasint,omitempty"` // ask again at once
	// Digest of the whole table at Generation; 0 while More.
	Digest uint64 `cbor:"7,keyasint,omitempty"`
}

// ServiceItem is one item; Data is the CBOR of what the key's first letter
// says, passed on as it is, so that an older node's digest holds for a newer
// server's items.
type ServiceItem struct {
	Key  string `cbor:"1,keyasint"`
	Data []byte `cbor:"2,keyasint"`
}

// WireType implements Message.
func (ServicesRequest) WireType() Type { return TypeServicesRequest }

// WireType implements Message.
func (ServicesReply) WireType() Type { return TypeServicesReply }

// Prefixes of the keys of items.
const (
	ItemNetwork  = "c"  // the one ClusterNetwork
	ItemService  = "s/" // s/NAMESPACE/NAME
	ItemSlice    = "e/" // e/NAMESPACE/NAME of the EndpointSlice
	ItemNodeInfo = "n/" // n/NAME
	ItemIngress  = "i/" // i/NAMESPACE/NAME
	// ItemIngressNodes is the one IngressNodes.
	ItemIngressNodes = "j"
)

// ClusterNetwork are facts of the cluster's network.
type ClusterNetwork struct {
	ServiceCIDRs []string `cbor:"1,keyasint,omitempty"`
	DNS          []string `cbor:"2,keyasint,omitempty"` // the cluster address of DNS
	Domain       string   `cbor:"3,keyasint,omitempty"` // such as cluster.local
}

// NodeInfo is what others need to reach a node's pods.
type NodeInfo struct {
	Addresses []string `cbor:"1,keyasint,omitempty"` // InternalIPs
	PodCIDRs  []string `cbor:"2,keyasint,omitempty"`
	Zone      string   `cbor:"3,keyasint,omitempty"`
	// Silent: it does not renew its lease. Whatever its pods' endpoints say is
	// of before, so other nodes use them when there is nothing else. It stands
	// here and not with each endpoint, so that a site that goes or comes back is
	// one small item for each node. A node that does not know the field loses
	// the preference alone.
	Silent bool `cbor:"4,keyasint,omitempty"`
}

// Traffic says which endpoints a Service uses.
type Traffic uint8

// Values of Traffic.
const (
	TrafficDefault  Traffic = 0 // near ones unless they have more to do
	TrafficSameZone Traffic = 1 // spec.trafficDistribution PreferSameZone, PreferClose
	TrafficSameNode Traffic = 2 // spec.trafficDistribution PreferSameNode
)

// Service is a Service as nodes need it.
type Service struct {
	ClusterIPs   []string      `cbor:"1,keyasint,omitempty"` // none: headless or ExternalName
	Ports        []ServicePort `cbor:"2,keyasint,omitempty"`
	ExternalName string        `cbor:"3,keyasint,omitempty"`
	// AffinitySeconds: a client's address stays with an endpoint for so long
	// after its last connection; 0 is no affinity.
	AffinitySeconds int32    `cbor:"4,keyasint,omitempty"`
	InternalLocal   bool     `cbor:"5,keyasint,omitempty"` // internalTrafficPolicy Local
	ExternalLocal   bool     `cbor:"6,keyasint,omitempty"` // externalTrafficPolicy Local
	Traffic         Traffic  `cbor:"7,keyasint,omitempty"`
	ExternalIPs     []string `cbor:"8,keyasint,omitempty"`  // spec.externalIPs and the load balancer's
	HealthPort      uint16   `cbor:"9,keyasint,omitempty"`  // spec.healthCheckNodePort
	NotReady        bool     `cbor:"10,keyasint,omitempty"` // spec.publishNotReadyAddresses
	// Sources are who may connect to ExternalIPs; none is everybody.
	Sources []string `cbor:"11,keyasint,omitempty"` // spec.loadBalancerSourceRanges
	// Selector is whose endpoints are the Service's: a node needs it for pods
	// that it holds after a restore and of which the cluster knows nothing.
	Selector map[string]string `cbor:"12,keyasint,omitempty"`
}

// ServicePort is one port of a Service.
type ServicePort struct {
	Name     string `cbor:"1,keyasint,omitempty"`
	Protocol string `cbor:"2,keyasint"` // TCP, UDP
	Port     uint16 `cbor:"3,keyasint"`
	NodePort uint16 `cbor:"4,keyasint,omitempty"`
	// H2C: endpoints speak HTTP/2 without TLS (appProtocol kubernetes.io/h2c).
	H2C bool `cbor:"5,keyasint,omitempty"`
	// Target is the pod's port, by number or name, where it is not Port; for
	// the same use as Selector.
	Target string `cbor:"6,keyasint,omitempty"`
}

// Slice is an EndpointSlice as nodes need it.
type Slice struct {
	Service   string      `cbor:"1,keyasint"` // name, in the key's namespace
	Ports     []SlicePort `cbor:"2,keyasint,omitempty"`
	Endpoints []Endpoint  `cbor:"3,keyasint,omitempty"`
}

// SlicePort is one port of a slice's endpoints.
type SlicePort struct {
	Name     string `cbor:"1,keyasint,omitempty"`
	Protocol string `cbor:"2,keyasint"`
	Port     uint16 `cbor:"3,keyasint,omitempty"`
}

// Endpoint states; bits.
const (
	EndpointReady       uint8 = 1
	EndpointServing     uint8 = 2
	EndpointTerminating uint8 = 4
)

// DefaultWeight is the weight of an endpoint of which nobody said another one.
const DefaultWeight uint16 = 100

// Endpoint is one backend.
type Endpoint struct {
	Address  []byte `cbor:"1,keyasint"` // 4 or 16 bytes
	State    uint8  `cbor:"2,keyasint,omitempty"`
	Node     string `cbor:"3,keyasint,omitempty"`
	Zone     string `cbor:"4,keyasint,omitempty"`
	Hostname string `cbor:"5,keyasint,omitempty"`
	// Weight is the share of new connections compared with other endpoints';
	// 0 is DefaultWeight.
	Weight uint16 `cbor:"6,keyasint,omitempty"`
	Pod    string `cbor:"7,keyasint,omitempty"` // name of the pod, for PTR records and people
}

// IngressNodes names the nodes that serve Ingresses.
type IngressNodes struct {
	Nodes []string `cbor:"1,keyasint,omitempty"`
}

// Ingress is an Ingress of our class as nodes need it.
type Ingress struct {
	Created int64           `cbor:"1,keyasint,omitempty"` // Unix seconds; the older one keeps a path that two have
	Default *IngressBackend `cbor:"2,keyasint,omitempty"`
	Rules   []IngressRule   `cbor:"3,keyasint,omitempty"`
	TLS     []IngressTLS    `cbor:"4,keyasint,omitempty"`
	// Redirect: hosts of TLS are not served over HTTP.
	Redirect bool `cbor:"5,keyasint,omitempty"`
	// Timeout of a backend until its answer begins, milliseconds; 0 is the
	// node's own.
	Timeout int64 `cbor:"6,keyasint,omitempty"`
}

// IngressRule is what one host leads to; "" is any, "*.x" one label more than x.
type IngressRule struct {
	Host  string        `cbor:"1,keyasint,omitempty"`
	Paths []IngressPath `cbor:"2,keyasint,omitempty"`
}

// IngressPath is one path; not Exact is a prefix of whole elements.
type IngressPath struct {
	Path    string         `cbor:"1,keyasint,omitempty"`
	Exact   bool           `cbor:"2,keyasint,omitempty"`
	Backend IngressBackend `cbor:"3,keyasint"`
}

// IngressBackend is a port of a Service in the Ingress's namespace; without a
// Service it is one that nodes cannot serve.
type IngressBackend struct {
	Service string `cbor:"1,keyasint,omitempty"`
	Port    uint16 `cbor:"2,keyasint,omitempty"` // or else
	Name    string `cbor:"3,keyasint,omitempty"`
}

// IngressTLS names the Secret with the certificate of hosts; no hosts is the
// certificate for names that have no other.
type IngressTLS struct {
	Hosts  []string `cbor:"1,keyasint,omitempty"`
	Secret string   `cbor:"2,keyasint,omitempty"`
}

// EncodeItem encodes what an item holds, deterministically.
func EncodeItem(v any) ([]byte, error) {
	enc, _ := modes()
	b, err := enc.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("wire: encode item: %w", err)
	}
	return b, nil
}

// DecodeItem decodes what an item holds; unknown fields are ignored.
func DecodeItem(b []byte, v any) error {
	_, dec := modes()
	if err := dec.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%w: item: %w", ErrMalformed, err)
	}
	return nil
}

// ItemDigest is one item's part of a table's digest, which is the sum of all.
func ItemDigest(key string, data []byte) uint64 {
	h := sha256.New()
	h.Write([]byte(key))
	h.Write([]byte{0})
	h.Write(data)
	return binary.BigEndian.Uint64(h.Sum(nil))
}
