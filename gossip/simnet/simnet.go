// Package simnet is a gossip transport in memory, for simulations in virtual
// time: packets and streams are buffered, may be lost or cut off, and never
// block their sender.
package simnet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/dunlin-project/dunlin/wire/memnet"
)

// Ground is what a network is laid over when it shares its hosts and their
// faults with another simulation.
type Ground interface {
	// Packet says how long a packet is on its way, and whether it arrives.
	Packet(from, to netip.AddrPort) (time.Duration, bool)
	// Dial and Listen make streams.
	Dial(ctx context.Context, from, to netip.AddrPort) (net.Conn, error)
	Listen(at netip.AddrPort) (net.Listener, error)
}

// Network joins transports by address. Loss and Cut may change while it
// runs.
type Network struct {
	ground Ground // nil: its own

	mu    sync.Mutex
	rnd   *rand.Rand
	loss  float64
	cut   map[string]bool
	apart map[[2]string]bool // from, to
	deaf  map[[2]string]bool // of packets from, to
	hosts map[string]*Transport
}

// New makes an empty network; seed fixes which packets are lost.
func New(seed uint64) *Network {
	return &Network{rnd: rand.New(rand.NewPCG(seed, 1)), cut: map[string]bool{}, apart: map[[2]string]bool{}, deaf: map[[2]string]bool{}, hosts: map[string]*Transport{}}
}

// Over makes one whose packets and streams go the ways of another simulation.
func Over(g Ground) *Network {
	n := New(0)
	n.ground = g
	return n
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

// Part keeps two addresses from each other, or ends that.
func (n *Network) Part(a, b netip.AddrPort, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.apart[[2]string{a.String(), b.String()}] = on
	n.apart[[2]string{b.String(), a.String()}] = on
}

// Block keeps packets, not streams, on their way from one address to another,
// or ends that.
func (n *Network) Block(from, to netip.AddrPort, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.deaf[[2]string{from.String(), to.String()}] = on
}

// Transport is one member's.
type Transport struct {
	n       *Network
	addr    netip.AddrPort
	packets chan *memberlist.Packet
	streams chan net.Conn
	listen  net.Listener // on a ground
	wg      sync.WaitGroup
}

var _ memberlist.Transport = (*Transport)(nil)

// Transport takes an address. It panics when a ground does not let it listen.
func (n *Network) Transport(a netip.AddrPort) *Transport {
	t := &Transport{n: n, addr: a, packets: make(chan *memberlist.Packet, 4096), streams: make(chan net.Conn, 256)}
	if n.ground != nil {
		l, err := n.ground.Listen(a)
		if err != nil {
			panic(err)
		}
		t.listen = l
		t.wg.Go(t.accept)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hosts[a.String()] = t
	return t
}

// FinalAdvertiseAddr implements memberlist.Transport.
func (t *Transport) FinalAdvertiseAddr(string, int) (net.IP, int, error) {
	return t.addr.Addr().AsSlice(), int(t.addr.Port()), nil
}

func (t *Transport) accept() {
	for {
		c, err := t.listen.Accept()
		if err != nil {
			return
		}
		select {
		case t.streams <- c:
		default:
			_ = c.Close()
		}
	}
}

func (n *Network) reach(from netip.AddrPort, to string) *Transport {
	if n.cut[from.String()] || n.cut[to] || n.apart[[2]string{from.String(), to}] {
		return nil
	}
	return n.hosts[to]
}

// WriteTo implements memberlist.Transport.
func (t *Transport) WriteTo(b []byte, addr string) (time.Time, error) {
	now := time.Now()
	t.n.mu.Lock()
	to := t.n.reach(t.addr, addr)
	lost := t.n.deaf[[2]string{t.addr.String(), addr}] || (t.n.loss > 0 && t.n.rnd.Float64() < t.n.loss)
	t.n.mu.Unlock()
	if to == nil || lost {
		return now, nil // as UDP does
	}
	b = append([]byte(nil), b...)
	if t.n.ground == nil {
		to.receive(b, t.addr)
		return now, nil
	}
	if d, ok := t.n.ground.Packet(t.addr, to.addr); ok {
		time.AfterFunc(d, func() { to.receive(b, t.addr) })
	}
	return now, nil
}

func (t *Transport) receive(b []byte, from netip.AddrPort) {
	select {
	case t.packets <- &memberlist.Packet{Buf: b, From: net.UDPAddrFromAddrPort(from), Timestamp: time.Now()}:
	default: // its queue is full
	}
}

// PacketCh implements memberlist.Transport.
func (t *Transport) PacketCh() <-chan *memberlist.Packet { return t.packets }

// DialTimeout implements memberlist.Transport.
func (t *Transport) DialTimeout(addr string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return t.DialContext(ctx, addr)
}

// DialContext is DialTimeout that its caller may end.
func (t *Transport) DialContext(ctx context.Context, addr string) (net.Conn, error) {
	if t.n.ground != nil {
		to, err := netip.ParseAddrPort(addr)
		if err != nil {
			return nil, fmt.Errorf("simnet: dial: %w", err)
		}
		return t.n.ground.Dial(ctx, t.addr, to)
	}
	t.n.mu.Lock()
	to := t.n.reach(t.addr, addr)
	t.n.mu.Unlock()
	if to == nil {
		<-ctx.Done() // virtual time: nothing answers
		return nil, fmt.Errorf("simnet: dial %s: %w", addr, ctx.Err())
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
	if t.listen != nil {
		_ = t.listen.Close()
		t.wg.Wait()
	}
	t.n.mu.Lock()
	defer t.n.mu.Unlock()
	if t.n.hosts[t.addr.String()] == t {
		delete(t.n.hosts, t.addr.String())
	}
	return nil
}
