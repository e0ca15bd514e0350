package proxy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/dunlin-project/dunlin/node/balance"
)

const (
	// udpIdle is how long a client's port stays with an endpoint after its last
	// datagram, as in Linux' conntrack for a flow of one direction.
	udpIdle = 30 * time.Second
	// udpMost bounds the flows of all Services.
	udpMost = 4096
	// datagram is the largest there is.
	datagram = 64 << 10
)

var datagrams = sync.Pool{New: func() any { b := make([]byte, datagram); return &b }}

// udpFlow is one client's port at one Service.
type udpFlow struct {
	balance.Flow
	b  *balance.Backend
	up *net.UDPConn
}

// udpServer passes the datagrams of one listener.
type udpServer struct {
	e        *engine
	t        *balance.Target
	external bool
	conn     *net.UDPConn

	mu    sync.Mutex
	flows map[netip.AddrPort]*udpFlow
}

// run reads until the listener is closed. It holds a buffer only while there
// is something to read.
func (s *udpServer) run() {
	for {
		if err := waitReadable(s.conn); err != nil {
			break
		}
		buf := datagrams.Get().(*[]byte)
		n, from, err := s.conn.ReadFromUDPAddrPort(*buf)
		if err == nil {
			if up := s.upstream(from); up != nil {
				s.send(up, from, (*buf)[:n])
			}
		}
		datagrams.Put(buf)
		if err != nil {
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.flows {
		_ = f.up.Close()
	}
}

func (s *udpServer) send(f *udpFlow, from netip.AddrPort, b []byte) {
	f.Moved.Store(time.Now().UnixNano())
	if _, err := f.up.Write(b); err == nil {
		return
	}
	// Refused: what was sent before did not arrive. UDP promises nothing, but
	// the next endpoint may be better.
	f.b.Fail(time.Now())
	_ = f.up.Close()
	s.drop(from, f)
	if f := s.upstream(from); f != nil {
		f.Moved.Store(time.Now().UnixNano())
		_, _ = f.up.Write(b)
	}
}

// upstream is the flow of a client, made if it has none.
func (s *udpServer) upstream(from netip.AddrPort) *udpFlow {
	s.mu.Lock()
	f := s.flows[from]
	s.mu.Unlock()
	if f != nil {
		if !f.b.Draining() {
			return f
		}
		_ = f.up.Close()
		s.drop(from, f)
	}
	if s.e.counters.udp.Load() >= udpMost {
		return nil
	}
	b := s.t.Pick(from.Addr().Unmap(), s.external, nil)
	if b == nil {
		return nil
	}
	d := net.Dialer{}
	c, err := d.DialContext(context.Background(), "udp", b.Addr.String())
	if err != nil {
		b.Fail(time.Now())
		return nil
	}
	f = &udpFlow{b: b, up: c.(*net.UDPConn)}
	f.Moved.Store(time.Now().UnixNano())
	f.End = func() { _ = f.up.Close() }
	s.mu.Lock()
	s.flows[from] = f
	s.mu.Unlock()
	b.Add(&f.Flow)
	s.e.counters.udp.Add(1)
	go s.back(from, f)
	return f
}

// back passes answers to the client until nothing moved for a while.
func (s *udpServer) back(to netip.AddrPort, f *udpFlow) {
	defer func() {
		_ = f.up.Close()
		s.drop(to, f)
		f.b.Remove(&f.Flow)
		s.e.counters.udp.Add(-1)
	}()
	for {
		left := udpIdle - time.Duration(time.Now().UnixNano()-f.Moved.Load())
		if left <= 0 {
			return
		}
		_ = f.up.SetReadDeadline(time.Now().Add(left))
		if err := waitReadable(f.up); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				continue
			}
			return
		}
		buf := datagrams.Get().(*[]byte)
		n, err := f.up.Read(*buf)
		if err == nil {
			f.Moved.Store(time.Now().UnixNano())
			_, err = s.conn.WriteToUDPAddrPort((*buf)[:n], to)
		}
		datagrams.Put(buf)
		if err != nil {
			return // refused, or closed
		}
	}
}

func (s *udpServer) drop(from netip.AddrPort, f *udpFlow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.flows[from] == f {
		delete(s.flows, from)
	}
}

// waitReadable returns once a read would not wait.
func waitReadable(c *net.UDPConn) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var b [1]byte
	return rc.Read(func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		return err != syscall.EAGAIN && err != syscall.EINTR
	})
}
