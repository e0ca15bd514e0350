package network

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
)

// ConnectionCounter is the optional ability to count the TCP connections that
// are open to ports of a pod, whoever opened them: a proxy of this node or of
// another, or a client that knows the pod's address.
type ConnectionCounter interface {
	Connections(a Allocation, containerPorts []int32) (int, error)
}

// Connections implements ConnectionCounter.
func (n *Namespaced) Connections(a Allocation, containerPorts []int32) (count int, err error) {
	look := func() (err error) { count, err = countHere(a, containerPorts); return err }
	switch {
	case a.HostNetwork:
		err = look()
	case a.Namespace != "":
		err = within(a.Namespace, look)
	default:
		err = n.inNamespace(look)
	}
	return count, err
}

// Connections implements ConnectionCounter.
func (n *NodeAddress) Connections(a Allocation, containerPorts []int32) (int, error) {
	return countHere(a, containerPorts)
}

// countHere counts in the network namespace of the calling thread.
func countHere(a Allocation, containerPorts []int32) (int, error) {
	ports := make([]uint16, len(containerPorts))
	for i, p := range containerPorts {
		ports[i] = uint16(a.Reached(p))
	}
	mine := func(local netip.AddrPort) bool {
		return slices.Contains(ports, local.Port()) && (a.HostNetwork || slices.Contains(a.IPs, local.Addr()) || local.Addr() == a.IP)
	}
	sum := 0
	for _, name := range []string{"tcp", "tcp6"} {
		f, err := os.Open("/proc/thread-self/net/" + name)
		if err != nil {
			if name == "tcp6" {
				break // the kernel has no IPv6
			}
			return 0, fmt.Errorf("count connections: %w", err)
		}
		n, err := established(f, mine)
		_ = f.Close()
		if err != nil {
			return 0, fmt.Errorf("count connections: %w", err)
		}
		sum += n
	}
	return sum, nil
}

// established counts the lines of a table of /proc/net whose connection is
// established and whose own end is mine.
func established(table io.Reader, mine func(netip.AddrPort) bool) (n int, err error) {
	s := bufio.NewScanner(table)
	for s.Scan() {
		f := strings.Fields(s.Text())
		if len(f) < 4 || f[3] != "01" {
			continue
		}
		if local, ok := parseEnd(f[1]); ok && mine(local) {
			n++
		}
	}
	return n, s.Err()
}

// parseEnd reads an address and port: words of 32 bits in the machine's order
// (all that we build for are little-endian), written in hexadecimal.
func parseEnd(text string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(text, ":")
	p, err := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || (len(host) != 8 && len(host) != 32) {
		return netip.AddrPort{}, false
	}
	raw := make([]byte, len(host)/2)
	for i := range raw {
		b, err := strconv.ParseUint(host[2*i:2*i+2], 16, 8)
		if err != nil {
			return netip.AddrPort{}, false
		}
		raw[i/4*4+3-i%4] = byte(b)
	}
	a, _ := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(a.Unmap(), uint16(p)), true
}
