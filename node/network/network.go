// Package network gives every pod of the node its address and opens its
// listeners.
//
// As root all Wasm pod addresses live in one network namespace per node
// (never on the host's own interfaces, where they would collide with the
// host's wildcard listeners in both directions), joined to the host by a
// veth pair: see Namespaced. Without root a pod shares the node's address
// and gets a port of its own per containerPort: see NodeAddress.
//
// Owner: the agent's pod workers call it concurrently; each implementation
// guards its allocator with one mutex. Nothing here runs in the background:
// what was set up stays while the agent is away.
package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
)

// Allocation is what one pod got. The agent persists it and hands it back
// as "previous" after a restart, so that addresses and ports stay.
type Allocation struct {
	IP          netip.Addr   `cbor:"1,keyasint"`
	IPs         []netip.Addr `cbor:"2,keyasint,omitempty"` // first is IP
	HostNetwork bool         `cbor:"3,keyasint,omitempty"`
	// Ports maps containerPort to the port on IP where it is reached, where
	// that differs (without root, or by hostPort there).
	Ports map[int32]int32 `cbor:"4,keyasint,omitempty"`
	// Namespace is the path of the pod's own network namespace; empty where
	// it has none (Wasm pods, and those on the host's network).
	Namespace string `cbor:"5,keyasint,omitempty"`
}

// Reached is the port on IP under which the containerPort is reached.
func (a Allocation) Reached(containerPort int32) int32 {
	if p, ok := a.Ports[containerPort]; ok {
		return p
	}
	return containerPort
}

// Errors a caller decides on.
var (
	// ErrNoRange: the node has no pod range yet; try again after SetCIDRs.
	ErrNoRange = errors.New("the node has no pod address range yet")
	// ErrExhausted: every address of the node's range is taken.
	ErrExhausted = errors.New("no free pod address in the node's range")
	// ErrUDP: a Wasm guest can be given TCP listeners only.
	ErrUDP = errors.New("UDP ports cannot be handed to a Wasm guest (WASI preview 1 has no datagram sockets)")
)

// PortInUseError says which port is taken where.
type PortInUseError struct {
	Address string
	Err     error
}

// Error implements error.
func (e *PortInUseError) Error() string {
	return fmt.Sprintf("port %s is in use by another process on this node: %v", e.Address, e.Err)
}

// Unwrap gives the cause.
func (e *PortInUseError) Unwrap() error { return e.Err }

// Network is what the agent needs. All methods are idempotent.
type Network interface {
	// Setup gives the pod its address; previous, when not nil, is taken again.
	Setup(ctx context.Context, podUID string, hostNetwork bool, previous *Allocation) (Allocation, error)
	// Listen opens the TCP listeners of one containerPort: the pod's own
	// first, then, if hostPort is not 0, the host's. It may record a chosen
	// port in a.Ports.
	Listen(ctx context.Context, a *Allocation, containerPort, hostPort int32, protocol string) ([]*os.File, error)
	// Dial connects to a port of the pod as the node does for probes.
	Dial(ctx context.Context, a Allocation, network string, port int32) (net.Conn, error)
	// Forward connects to a port of the pod as a program inside it would, over
	// its own loopback where it has one.
	Forward(ctx context.Context, a Allocation, port int32) (net.Conn, error)
	// Teardown returns the pod's addresses.
	Teardown(ctx context.Context, podUID string) error
	// SetCIDRs sets the ranges that the cluster gave this node.
	SetCIDRs(cidrs []string) error
	// NodeIPs are the node's own addresses, the advertised one first.
	NodeIPs() []netip.Addr
}

// Namespacer is the optional ability to give a pod a network namespace of
// its own, which its containers share. Without it they have only the host's.
type Namespacer interface {
	// SetupNamespace is Setup for a pod of containers: its addresses, from the
	// same allocator unless the operator's CNI configuration says otherwise, are
	// in Allocation.Namespace, and the host's ports lead to them. Teardown undoes
	// it.
	SetupNamespace(ctx context.Context, pod Pod, previous *Allocation) (Allocation, error)
	// Retake takes what SetupNamespace gave to an earlier agent; host ports
	// stay as they are.
	Retake(ctx context.Context, podUID string, previous Allocation) error
}

// Pod is one of containers.
type Pod struct {
	UID, Namespace, Name string
	Ports                []HostPort
}

// HostPort is a port of the node that leads to one of a pod.
type HostPort struct {
	Host, Container int32
	Protocol        string // TCP or UDP
	// IP is the only address of the node that leads there; not valid: every one.
	IP netip.Addr
}

// ErrNoNamespaces says that pods of containers need a network namespace each.
var ErrNoNamespaces = errors.New("this node cannot make network namespaces, so containers can only use the host's network (hostNetwork: true)")

// listenTCP opens a TCP listener and returns its descriptor alone.
func listenTCP(ctx context.Context, addr netip.AddrPort) (*os.File, int32, error) {
	network := "tcp4"
	if addr.Addr().Is6() {
		network = "tcp6"
	}
	return listenOn(ctx, network, addr.String())
}

func listenOn(ctx context.Context, network, address string) (*os.File, int32, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, network, address)
	if err != nil {
		if isInUse(err) {
			return nil, 0, &PortInUseError{Address: address, Err: err}
		}
		return nil, 0, fmt.Errorf("listen on %s: %w", address, err)
	}
	defer func() { _ = l.Close() }() // the duplicate in File stays open
	tl, ok := l.(*net.TCPListener)
	if !ok {
		return nil, 0, fmt.Errorf("listen on %s: unexpected listener %T", address, l)
	}
	f, err := tl.File()
	if err != nil {
		return nil, 0, fmt.Errorf("listen on %s: %w", address, err)
	}
	return f, int32(tl.Addr().(*net.TCPAddr).Port), nil
}

func dial(ctx context.Context, network string, ip netip.Addr, port int32) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, network, net.JoinHostPort(ip.String(), strconv.Itoa(int(port))))
}

// dialLoopback connects to the caller's own machine or namespace.
func dialLoopback(ctx context.Context, port int32) (net.Conn, error) {
	c, err := dial(ctx, "tcp4", netip.AddrFrom4([4]byte{127, 0, 0, 1}), port)
	if err == nil || ctx.Err() != nil {
		return c, err
	}
	if c, err6 := dial(ctx, "tcp6", netip.IPv6Loopback(), port); err6 == nil {
		return c, nil
	}
	return nil, err
}

func checkProtocol(protocol string) error {
	switch protocol {
	case "", "TCP":
		return nil
	case "UDP":
		return ErrUDP
	}
	return fmt.Errorf("protocol %s is not supported", protocol)
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// vethPrefix begins the names of the links of pods with a network namespace of
// their own.
const vethPrefix = "dnl-"

// OwnLink says whether a link of the host was made by the agent whose network
// namespace has the given name, or by any agent for a pod.
func OwnLink(namespace, link string) bool {
	return link == namespace+"0" || strings.HasPrefix(link, vethPrefix)
}
