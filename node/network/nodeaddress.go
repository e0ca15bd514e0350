package network

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
)

func isInUse(err error) bool { return errors.Is(err, syscall.EADDRINUSE) }

// NodeAddress is the form without root: podIP is the node's address, and
// every containerPort gets a port of its own there (dunlin.dev/ports).
type NodeAddress struct {
	IPs []netip.Addr // the advertised address first; at least one
}

var _ Network = (*NodeAddress)(nil)

// Setup implements Network.
func (n *NodeAddress) Setup(_ context.Context, _ string, hostNetwork bool, previous *Allocation) (Allocation, error) {
	a := Allocation{IP: n.IPs[0], IPs: n.IPs[:1], HostNetwork: hostNetwork}
	if previous != nil {
		a.Ports = previous.Ports
	}
	return a, nil
}

// Listen implements Network. A hostPort is where the pod listens, then.
func (n *NodeAddress) Listen(ctx context.Context, a *Allocation, containerPort, hostPort int32, protocol string) ([]*os.File, error) {
	if err := checkProtocol(protocol); err != nil {
		return nil, err
	}
	want := a.Ports[containerPort]
	fixed := hostPort
	if a.HostNetwork {
		fixed = containerPort
	}
	if fixed != 0 {
		want = fixed
	}
	f, port, err := listenTCP(ctx, netip.AddrPortFrom(a.IP, uint16(want)))
	if err != nil && isInUse(err) && fixed == 0 && want != 0 {
		// The port it had before the restart is taken: any other will do.
		f, port, err = listenTCP(ctx, netip.AddrPortFrom(a.IP, 0))
	}
	if err != nil {
		return nil, err
	}
	if port != containerPort {
		ports := make(map[int32]int32, len(a.Ports)+1)
		for k, v := range a.Ports {
			ports[k] = v
		}
		ports[containerPort] = port
		a.Ports = ports
	}
	return []*os.File{f}, nil
}

// Dial implements Network.
func (n *NodeAddress) Dial(ctx context.Context, a Allocation, network string, port int32) (net.Conn, error) {
	return dial(ctx, network, a.IP, a.Reached(port))
}

// Forward implements Network: a pod has no loopback of its own here.
func (n *NodeAddress) Forward(ctx context.Context, a Allocation, port int32) (net.Conn, error) {
	return n.Dial(ctx, a, "tcp", port)
}

// Teardown implements Network.
func (n *NodeAddress) Teardown(context.Context, string) error { return nil }

// SetCIDRs implements Network: ranges mean nothing here.
func (n *NodeAddress) SetCIDRs([]string) error { return nil }

// NodeIPs implements Network.
func (n *NodeAddress) NodeIPs() []netip.Addr { return n.IPs }
