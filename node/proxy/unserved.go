package proxy

import (
	"errors"
	"net/netip"
	"strings"
	"syscall"

	"github.com/dunlin-project/dunlin/node/balance"
)

// What of a Service is not served; spec fields in people's words.
const (
	KindClusterIP  = "cluster address"
	KindNodePort   = "node port"
	KindExternal   = "external or load balancer's address"
	KindHealthPort = "health check's node port"
	KindEndpoint   = "endpoint" // not a port of the Service, but one that it leads to
)

// Why something is not served, where there is something to do about it.
const (
	WhyTaken  = "taken"  // another process has the port
	WhyDenied = "denied" // a low port without root
	// WhyReserved is a port of dunlin's own: it is never served.
	WhyReserved = "reserved"
	// WhyService is that another Service has it.
	WhyService = "service"
	// WhyLoop is an endpoint that leads back to its Service.
	WhyLoop = "loop"
)

// Unserved is a port of a Service that this node should serve and cannot.
type Unserved struct {
	Service  string         `cbor:"1,keyasint"` // namespace/name
	Kind     string         `cbor:"2,keyasint"`
	Protocol string         `cbor:"3,keyasint"` // TCP, UDP
	Addr     netip.AddrPort `cbor:"4,keyasint"` // the unspecified address is all of the node's
	Why      string         `cbor:"5,keyasint,omitempty"`
	Error    string         `cbor:"6,keyasint"`
}

func loopUnserved(l *balance.Loop) Unserved {
	u := Unserved{Service: l.Target.Service, Kind: KindEndpoint, Protocol: l.Target.Protocol, Addr: l.Addr, Why: WhyLoop, Error: "it is an address of the Service itself"}
	if l.Via != "" {
		u.Error = "it is an address of Service " + l.Via + ", which leads back here"
	}
	return u
}

func (f *failure) unserved(p place) Unserved {
	u := Unserved{Service: f.want.service, Kind: f.want.kind, Protocol: strings.ToUpper(p.protocol), Addr: p.addr, Error: f.cause.Error()}
	var no syscall.Errno
	if errors.As(f.cause, &no) {
		u.Error = no.Error()
	}
	switch {
	case errors.Is(f.cause, errReserved):
		u.Why = WhyReserved
	case errors.Is(f.cause, syscall.EADDRINUSE):
		u.Why = WhyTaken
	case errors.Is(f.cause, syscall.EACCES), errors.Is(f.cause, syscall.EPERM):
		u.Why = WhyDenied
	}
	return u
}
