// Package simnet is a gossip transport in memory, for simulations in virtual
// time: packets and streams are buffered, may be lost or cut off, and never
// block their sender.
package simnet

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/dunlin-project/dunlin/wire/memnet"
)

// Network joins transports by address. Loss and Cut may change while it
// runs.
type Network struct {
	mu    sync.Mutex
	rnd   *rand.Rand
	loss  float64
	cut   map[string]bool
	hosts map[string]*Transport
}

// New makes an empty network; seed fixes which packets are lost.
func New(seed uint64) *Network {
	return &Network{rnd: rand.New(rand.NewPCG(seed, 1)), cut: map[string]bool{}, hosts: map[string]*Transport{}}
}

// Lose drops this share of packets from now on.
func (n *Network) Lose(share float64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.loss = share
}

// Cut takes an address off the network, or brings it back.
func (n *Network) Cut(a netip.AddrPort, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[a.String()] = on
}

// Transport is one member's.
type Transport struct {
	n       *Network
	addr    netip.AddrPort
	packets chan *memberlist.Packet
	streams chan net.Conn
}

var _ memberlist.Transport = (*Transport)(nil)

// Transport takes an address.
func (n *Network) Transport(a netip.AddrPort) *Transport {
	t := &Transport{n: n, addr: a, packets: make(chan *memberlist.Packet, 4096), streams: make(chan net.Conn, 256)}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hosts[a.String()] = t
	return t
}

// FinalAdvertiseAddr implements memberlist.Transport.
func (t *Transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return t.addr.Addr().AsSlice(), int(t.addr.Port()), nil
}

func (n *Network) reach(from netip.AddrPort, to string) *Transport {
	if n.cut[from.String()] || n.cut[to] {
		return nil
	}
	return n.hosts[to]
}

// WriteTo implements memberlist.Transport.
func (t *Transport) WriteTo(b []byte, addr string) (time.Time, error) {
	now := time.Now()
	t.n.mu.Lock()
	to := t.n.reach(t.addr, addr)
	lost := t.n.loss > 0 && t.n.rnd.Float64() < t.n.loss
	t.n.mu.Unlock()
	if to == nil || lost {
		return now, nil // as UDP does
	}
	p := &memberlist.Packet{Buf: append([]byte(nil), b...), From: net.UDPAddrFromAddrPort(t.addr), Timestamp: now}
	select {
	case to.packets <- p:
	default: // its queue is full
	}
	return now, nil
}

// PacketCh implements memberlist.Transport.
func (t *Transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// DialTimeout implements memberlist.Transport.
func (t *Transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	t.n.mu.Lock()
	to := t.n.reach(t.addr, addr)
	t.n.mu.Unlock()
	if to == nil {
		time.Sleep(timeout) // virtual time: nothing answers
		return nil, fmt.Errorf("simnet: dial %s: timeout", addr)
	}
	a, b := memnet.Pipe(memnet.Addr(t.addr.String()), memnet.Addr(addr))
	select {
	case to.streams <- b:
		return a, nil
	default:
		return nil, fmt.Errorf("simnet: dial %s: refused", addr)
	}
}

// StreamCh implements memberlist.Transport.
func (t *Transport) StreamCh() <-chan net.Conn { return t.streams }

// Shutdown implements memberlist.Transport.
func (t *Transport) Shutdown() error {
	t.n.mu.Lock()
	defer t.n.mu.Unlock()
	if t.n.hosts[t.addr.String()] == t {
		delete(t.n.hosts, t.addr.String())
	}
	return nil
}
