package wire

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"time"
)

// Type names a message on the wire. The numbers are for ever.
type Type uint8

// Message types. Types 1 to 127; the top bit of the type byte of a frame
// says that more chunks of the same message follow.
const (
	TypeHello         Type = 1
	TypeLeaseRequest  Type = 2
	TypeLeaseReply    Type = 3
	TypePullRequest   Type = 4
	TypeAssignment    Type = 5
	TypeReport        Type = 6
	TypeReportReply   Type = 7
	TypeStreamRequest Type = 8
	TypeStreamHeader  Type = 9
	TypeJoinRequest   Type = 10
	TypeJoinReply     Type = 11
	TypeRenewRequest  Type = 12
	TypeRenewReply    Type = 13
	TypeNudge         Type = 14
	TypeTimeRequest   Type = 15
	TypeTimeReply     Type = 16
	TypeFault         Type = 17

	TypeProposeRequest      Type = 18
	TypeProposeReply        Type = 19
	TypeReadRequest         Type = 20
	TypeReadReply           Type = 21
	TypeServerStatusRequest Type = 22
	TypeServerStatusReply   Type = 23
	TypeServerKeysRequest   Type = 24
	TypeServerKeysReply     Type = 25
	TypeAnnounceRequest     Type = 26
	TypeAnnounceReply       Type = 27

	TypeServicesRequest Type = 28
	TypeServicesReply   Type = 29

	TypeNodeUsage       Type = 30
	TypeNetCheckRequest Type = 31
	TypeNetCheckReply   Type = 32

	TypeExecOpen     Type = 33
	TypeTerminalSize Type = 34
	TypeExecEnd      Type = 35
	TypeDialRequest  Type = 36
	TypeDialReply    Type = 37
)

// ReconnectMost bounds how long a node that lost every server takes, from the
// moment one can be reached again, until it has tried: the longest wait
// between two attempts, and an attempt that hangs. Servers that begin to lead
// after a silence give nodes that long.
const ReconnectMost = 28 * time.Second

// Message is anything that can be framed.
type Message interface{ WireType() Type }

// TimeRequest asks for the server's wall clock. It is answered on a limited
// connection too.
type TimeRequest struct {
	UnixMilli int64 `cbor:"1,keyasint,omitempty"` // sender's wall clock
}

// TimeReply is the server's wall clock.
type TimeReply struct {
	UnixMilli int64 `cbor:"1,keyasint"`
	// Trusted: the server believes its own clock (see the leader's clock
	// check); an untrusted time is only for display.
	Trusted bool `cbor:"2,keyasint,omitempty"`
}

// Fault codes.
const (
	FaultInternal    uint32 = 1
	FaultLimited     uint32 = 2 // only Renew and Time are served: certificate outside its dates
	FaultUnsupported uint32 = 3 // message type not known or not served here
	FaultBusy        uint32 = 4 // too many requests at once on this connection: again later
	FaultMalformed   uint32 = 5
	FaultNotLeader   uint32 = 6 // this server does not lead: again later, or at Leader
	FaultNoQuorum    uint32 = 7 // what was asked may or may not have been done
	FaultDisk        uint32 = 8 // the state folder is full or read-only
)

// Fault answers a request that cannot be served. It is an error.
type Fault struct {
	Code    uint32 `cbor:"1,keyasint"`
	Message string `cbor:"2,keyasint,omitempty"`
	// Leader are the addresses of the server that leads, with FaultNotLeader,
	// where they are known.
	Leader []string `cbor:"3,keyasint,omitempty"`
}

// Error implements error.
func (f *Fault) Error() string { return fmt.Sprintf("wire: peer answered: %s", f.Message) }

// WireType implements Message.
func (Hello) WireType() Type { return TypeHello }

// WireType implements Message.
func (LeaseRequest) WireType() Type { return TypeLeaseRequest }

// WireType implements Message.
func (LeaseReply) WireType() Type { return TypeLeaseReply }

// WireType implements Message.
func (PullRequest) WireType() Type { return TypePullRequest }

// WireType implements Message.
func (Assignment) WireType() Type { return TypeAssignment }

// WireType implements Message.
func (Report) WireType() Type { return TypeReport }

// WireType implements Message.
func (ReportReply) WireType() Type { return TypeReportReply }

// WireType implements Message.
func (StreamRequest) WireType() Type { return TypeStreamRequest }

// WireType implements Message.
func (StreamHeader) WireType() Type { return TypeStreamHeader }

// WireType implements Message.
func (JoinRequest) WireType() Type { return TypeJoinRequest }

// WireType implements Message.
func (JoinReply) WireType() Type { return TypeJoinReply }

// WireType implements Message.
func (RenewRequest) WireType() Type { return TypeRenewRequest }

// WireType implements Message.
func (RenewReply) WireType() Type { return TypeRenewReply }

// WireType implements Message.
func (Nudge) WireType() Type { return TypeNudge }

// WireType implements Message.
func (TimeRequest) WireType() Type { return TypeTimeRequest }

// WireType implements Message.
func (TimeReply) WireType() Type { return TypeTimeReply }

// WireType implements Message.
func (Fault) WireType() Type { return TypeFault }

const (
	kib = 1 << 10
	mib = 1 << 20
)

// MaxSize is the largest body of a type in bytes; 0 for an unknown type. A
// peer that announces more is cut off before anything is allocated for it.
func (t Type) MaxSize() int {
	switch t {
	case TypeStreamHeader, TypeFault, TypeAnnounceRequest, TypeAnnounceReply, TypeServerStatusReply, TypeExecEnd, TypeDialReply:
		return 4 * kib
	case TypeHello, TypeServerKeysReply:
		return 16 * kib
	case TypeLeaseRequest, TypeLeaseReply, TypeNudge, TypeTimeRequest, TypeTimeReply,
		TypeReadRequest, TypeReadReply, TypeServerStatusRequest, TypeServerKeysRequest, TypeServicesRequest, TypeNetCheckRequest,
		TypeTerminalSize, TypeDialRequest:
		return 512
	case TypePullRequest:
		return mib
	case TypeAssignment, TypeProposeRequest, TypeProposeReply:
		return 64 * mib
	case TypeReport, TypeServicesReply, TypeNodeUsage:
		return 4 * mib
	case TypeReportReply, TypeNetCheckReply, TypeExecOpen:
		return 256 * kib
	case TypeStreamRequest:
		return 16 * kib
	case TypeJoinRequest, TypeJoinReply, TypeRenewRequest, TypeRenewReply:
		return 64 * kib
	}
	return 0
}

// String names the type for logs.
func (t Type) String() string {
	names := [...]string{
		TypeHello: "Hello", TypeLeaseRequest: "LeaseRequest", TypeLeaseReply: "LeaseReply",
		TypePullRequest: "PullRequest", TypeAssignment: "Assignment", TypeReport: "Report",
		TypeReportReply: "ReportReply", TypeStreamRequest: "StreamRequest", TypeStreamHeader: "StreamHeader",
		TypeJoinRequest: "JoinRequest", TypeJoinReply: "JoinReply", TypeRenewRequest: "RenewRequest",
		TypeRenewReply: "RenewReply", TypeNudge: "Nudge", TypeTimeRequest: "TimeRequest",
		TypeTimeReply: "TimeReply", TypeFault: "Fault",
		TypeProposeRequest: "ProposeRequest", TypeProposeReply: "ProposeReply", TypeReadRequest: "ReadRequest",
		TypeReadReply: "ReadReply", TypeServerStatusRequest: "ServerStatusRequest", TypeServerStatusReply: "ServerStatusReply",
		TypeServerKeysRequest: "ServerKeysRequest", TypeServerKeysReply: "ServerKeysReply",
		TypeAnnounceRequest: "AnnounceRequest", TypeAnnounceReply: "AnnounceReply",
		TypeServicesRequest: "ServicesRequest", TypeServicesReply: "ServicesReply",
		TypeNodeUsage:       "NodeUsage",
		TypeNetCheckRequest: "NetCheckRequest", TypeNetCheckReply: "NetCheckReply",
		TypeExecOpen: "ExecOpen", TypeTerminalSize: "TerminalSize", TypeExecEnd: "ExecEnd",
		TypeDialRequest: "DialRequest", TypeDialReply: "DialReply",
	}
	if int(t) < len(names) && names[t] != "" {
		return names[t]
	}
	return fmt.Sprintf("Type(%d)", uint8(t))
}

// TokenSecretName names the object of an assignment that holds a
// ServiceAccount token for a projected volume of a pod: an Object with the
// Ref {Kind: "Secret", Namespace: the pod's, Name: this} whose Data is a
// corev1.Secret with the key "token". The name is also its uid. audience and
// expirationSeconds are as in the volume's source (0 for nil).
func TokenSecretName(podUID, audience string, expirationSeconds int64) string {
	sum := sha256.Sum256([]byte(audience + "\x00" + strconv.FormatInt(expirationSeconds, 10)))
	return "token." + podUID + "." + hex.EncodeToString(sum[:6])
}
