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
	b     *balance.Backend
	up    *net.UDPConn
	from  []byte // what has answers come from the address that was asked
	began time.Time
	tries int // endpoints before this one that what it sends could not reach

	mu       sync.Mutex
	last     []byte // what was sent last, while nothing says that it arrives
	answered bool
}

const (
	// keptMost is the largest datagram that is sent again: what fits one packet.
	keptMost = 1472
	// triesMost bounds how many endpoints one datagram is sent to.
	triesMost = 3
)

// keep notes what is sent, for another endpoint if this one cannot be reached.
func (f *udpFlow) keep(b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last = f.last[:0]; !f.answered && len(b) <= keptMost {
		f.last = append(f.last, b...)
	}
}

// heard: an answer came.
func (f *udpFlow) heard() {
	f.b.Reached()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last, f.answered = nil, true
}

// lost is what may not have arrived.
func (f *udpFlow) lost() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
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
			if unreachable(err) {
				continue // of an answer: that client has gone
			}
			break
		}
		buf := datagrams.Get().(*[]byte)
		n, oobn, _, from, err := s.conn.ReadMsgUDPAddrPort(*buf, oob)
		if err == nil && admits(s.allowed, from.Addr()) {
			key, answer := flowKey{from: from}, []byte(nil)
			key.local, answer = asked(oob[:oobn])
			if up := s.upstream(key, answer, 0); up != nil {
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
	now := time.Now()
	f.Moved.Store(now.UnixNano())
	f.keep(b)
	if _, err := f.up.Write(b); err == nil {
		if now.Sub(f.began) > balance.FailedFor {
			f.b.Reached() // what does not answer does not refuse either
		}
		return
	}
	// Refused: what was sent before did not arrive. UDP promises nothing, but
	// the next endpoint may be better.
	s.elsewhere(key, f, b)
}

// elsewhere ends a flow whose endpoint cannot be reached, and sends b to
// another one.
func (s *udpServer) elsewhere(key flowKey, f *udpFlow, b []byte) {
	f.b.Fail(time.Now())
	s.e.counters.failed.Add(1)
	_ = f.up.Close()
	if !s.drop(key, f) || len(b) == 0 || f.tries+1 >= triesMost {
		return // the client goes on to another one by what it sends next
	}
	if next := s.upstream(key, f.from, f.tries+1); next != nil && next.b != f.b {
		next.Moved.Store(time.Now().UnixNano())
		next.keep(b)
		_, _ = next.up.Write(b)
	}
}

// upstream is the flow of a client, made if it has none.
func (s *udpServer) upstream(key flowKey, answer []byte, tries int) *udpFlow {
	from := key.from
	s.mu.Lock()
	f := s.flows[key]
	s.mu.Unlock()
	if f != nil {
		if !f.b.Passed() {
			return f
		}
		_ = f.up.Close()
		_ = s.drop(key, f)
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
	f = &udpFlow{b: b, up: c.(*net.UDPConn), from: answer, began: time.Now(), tries: tries}
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
			if unreachable(err) {
				s.elsewhere(key, f, f.lost())
			}
			return
		}
		buf := datagrams.Get().(*[]byte)
		n, err := f.up.Read(*buf)
		if unreachable(err) {
			s.elsewhere(key, f, f.lost())
		}
		if err == nil {
			f.heard()
			f.Moved.Store(time.Now().UnixNano())
			_, _, err = s.conn.WriteMsgUDPAddrPort((*buf)[:n], f.from, to)
		}
		datagrams.Put(buf)
		if err != nil {
			return // refused, or closed
		}
	}
}

// drop forgets a flow; false: it is not the client's any more.
func (s *udpServer) drop(key flowKey, f *udpFlow) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.flows[key] != f {
		return false
	}
	delete(s.flows, key)
	return true
}

// unreachable says whether a socket's error is an answer by ICMP: nobody
// listens there, or no way leads there.
func unreachable(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH)
}

// waitReadable returns once a read would not wait. An error that waited on the
// socket is gone with the look at it, so it is returned.
func waitReadable(c *net.UDPConn) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var b [1]byte
	var found error
	err = rc.Read(func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
		if err == syscall.EAGAIN || err == syscall.EINTR {
			return false
		}
		found = err
		return true
	})
	return errors.Join(err, found)
}
