package proxy

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/node/balance"
)

const (
	// dialTimeout of one endpoint; the next one is tried after it.
	dialTimeout = 2 * time.Second
	// dialsMost bounds the endpoints that one connection tries.
	dialsMost = 5
)

// serveTCP leads a client's connection to an endpoint.
func (e *engine) serveTCP(t *balance.Target, external bool, c *net.TCPConn) {
	client := addrOf(c.RemoteAddr())
	b, up := e.dial(t, client, external)
	if up == nil {
		reset(c)
		e.counters.refused.Add(1)
		return
	}
	f := &balance.Flow{}
	f.Moved.Store(time.Now().UnixNano())
	f.End = sync.OnceFunc(func() {
		_ = c.Close()
		_ = up.Close()
	})
	f.Silent = func(d time.Duration) bool { return silent(up, d) || silent(c, d) }
	f.Pending = func() bool { return unsent(c) || unsent(up) }
	b.Add(f)
	e.counters.conns.Add(1)
	var over atomic.Int32 // directions
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.oneWay(f, up, c, &over, true)
	}()
	e.oneWay(f, c, up, &over, false)
	<-done
	b.Remove(f)
	e.counters.conns.Add(-1)
}

// oneWay moves bytes in one direction; asks: from the client. A connection
// that was reset is reset at the other side as well. Who has sent its last byte
// may wait for the other's, however long; once it is gone, nobody does.
func (e *engine) oneWay(f *balance.Flow, dst, src *net.TCPConn, over *atomic.Int32, asks bool) {
	err := e.pipes.forward(dst, src, func() { f.Hold(asks) }, f.Release)
	if err != nil {
		if errors.Is(err, syscall.ECONNRESET) {
			_ = dst.SetLinger(0)
		}
	} else if over.Add(1) == 1 {
		waitReset(src)
		_ = dst.SetLinger(0) // of no effect where both sides were closed
	}
	f.End()
}

// dial connects to the endpoint that is chosen, or to another one: nothing of
// the client's was read yet, so nothing can be done twice.
func (e *engine) dial(t *balance.Target, client netip.Addr, external bool) (*balance.Backend, *net.TCPConn) {
	var tried map[*balance.Backend]bool
	for range dialsMost {
		b := t.Pick(client, external, tried)
		if b == nil {
			break
		}
		d := net.Dialer{Timeout: dialTimeout}
		b.Active.Add(1) // chosen is loaded, or a burst would go to one
		c, err := d.DialContext(context.Background(), "tcp", b.Addr.String())
		b.Active.Add(-1)
		if err == nil {
			b.Reached()
			return b, c.(*net.TCPConn)
		}
		b.Fail(time.Now())
		e.counters.failed.Add(1)
		if tried == nil {
			tried = map[*balance.Backend]bool{}
		}
		tried[b] = true
	}
	return nil, nil
}

func addrOf(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap()
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// unsent says whether bytes wait in a connection's queue for the other side to
// acknowledge them.
func unsent(c *net.TCPConn) bool {
	rc, err := c.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	_ = rc.Control(func(fd uintptr) {
		if n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ); err != nil {
			n = 0
		}
	})
	return n > 0
}

// drain closes connections to backends that get no new ones, once nothing
// passed through them for a while.
func (e *engine) drain(now time.Time) {
	e.mu.Lock()
	list := e.pool.Backends()
	e.mu.Unlock()
	for _, b := range list {
		for _, f := range b.Idle(now) {
			f.End()
			e.counters.drained.Add(1)
		}
	}
}

// cutSilent ends connections with a side that is not there any more, of which
// no packet tells: a machine that lost its power.
func (e *engine) cutSilent(gone, counted time.Duration) {
	e.mu.Lock()
	list := e.pool.Backends()
	e.mu.Unlock()
	for _, b := range list {
		for _, f := range b.Silent(gone, counted) {
			f.End()
			e.counters.silent.Add(1)
		}
	}
}
