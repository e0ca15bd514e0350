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

// flowKey is a client's port, and which of the node's addresses it asked where
// the socket has them all.
type flowKey struct {
	from  netip.AddrPort
	local netip.Addr
}

// udpFlow is one client's port at one Service.
type udpFlow struct {
	balance.Flow
	b    *balance.Backend
	up   *net.UDPConn
	from []byte // what has answers come from the address that was asked
}

// udpServer passes the datagrams of one listener.
type udpServer struct {
	e        *engine
	t        *balance.Target
	external bool
	allowed  []netip.Prefix // as of want
	conn     *net.UDPConn

	mu    sync.Mutex
	flows map[flowKey]*udpFlow
}

// run reads until the listener is closed. It holds a buffer only while there
// is something to read.
func (s *udpServer) run() {
	oob := make([]byte, oobRoom)
	for {
		if err := waitReadable(s.conn); err != nil {
			break
		}
		buf := datagrams.Get().(*[]byte)
		n, oobn, _, from, err := s.conn.ReadMsgUDPAddrPort(*buf, oob)
		if err == nil && admits(s.allowed, from.Addr()) {
			key, answer := flowKey{from: from}, []byte(nil)
			key.local, answer = asked(oob[:oobn])
			if up := s.upstream(key, answer); up != nil {
				s.send(up, key, (*buf)[:n])
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

func (s *udpServer) send(f *udpFlow, key flowKey, b []byte) {
	f.Moved.Store(time.Now().UnixNano())
	if _, err := f.up.Write(b); err == nil {
		return
	}
	// Refused: what was sent before did not arrive. UDP promises nothing, but
	// the next endpoint may be better.
	f.b.Fail(time.Now())
	_ = f.up.Close()
	s.drop(key, f)
	if f := s.upstream(key, f.from); f != nil {
		f.Moved.Store(time.Now().UnixNano())
		_, _ = f.up.Write(b)
	}
}

// upstream is the flow of a client, made if it has none.
func (s *udpServer) upstream(key flowKey, answer []byte) *udpFlow {
	from := key.from
	s.mu.Lock()
	f := s.flows[key]
	s.mu.Unlock()
	if f != nil {
		if !f.b.Passed() {
			return f
		}
		_ = f.up.Close()
		s.drop(key, f)
	}
	b := s.t.Pick(from.Addr().Unmap(), s.external, nil)
	if b == nil || !s.e.flows.take(sourceOf(from.Addr())) {
		return nil
	}
	d := net.Dialer{}
	c, err := d.DialContext(context.Background(), "udp", b.Addr.String())
	if err != nil {
		s.e.flows.give(sourceOf(from.Addr()))
		b.Fail(time.Now())
		return nil
	}
	f = &udpFlow{b: b, up: c.(*net.UDPConn), from: answer}
	f.Moved.Store(time.Now().UnixNano())
	f.End = func() { _ = f.up.Close() }
	s.mu.Lock()
	s.flows[key] = f
	s.mu.Unlock()
	b.Add(&f.Flow)
	s.e.counters.udp.Add(1)
	go s.back(key, f)
	return f
}

// back passes answers to the client until nothing moved for a while.
func (s *udpServer) back(key flowKey, f *udpFlow) {
	to := key.from
	defer func() {
		_ = f.up.Close()
		s.drop(key, f)
		f.b.Remove(&f.Flow)
		s.e.counters.udp.Add(-1)
		s.e.flows.give(sourceOf(to.Addr()))
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
			_, _, err = s.conn.WriteMsgUDPAddrPort((*buf)[:n], f.from, to)
		}
		datagrams.Put(buf)
		if err != nil {
			return // refused, or closed
		}
	}
}

func (s *udpServer) drop(key flowKey, f *udpFlow) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.flows[key] == f {
		delete(s.flows, key)
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
