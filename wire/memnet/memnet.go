// Package memnet is a network in memory: buffered connections, listeners and
// faults, for tests in virtual time, where real sockets cannot be used.
// Unlike net.Pipe a write does not wait for its reader.
package memnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Addr is a name on the network.
type Addr string

// Network implements net.Addr.
func (Addr) Network() string { return "mem" }

// String implements net.Addr.
func (a Addr) String() string { return string(a) }

// half is one direction of a connection: an unbounded-in-time, bounded-in-
// size byte queue.
type half struct {
	mu       sync.Mutex
	buf      []byte    // has arrived
	way      []segment // is on its way, in order
	onWay    int       // bytes of way
	delay    func() time.Duration
	eof      bool  // writer closed
	err      error // broken
	changed  chan struct{}
	stalled  bool // bytes are accepted and not delivered (a cut link)
	rdl, wdl time.Time
}

const maxBuffered = 1 << 20

// segment is what one write put on the way.
type segment struct {
	data []byte
	at   time.Time // arrives
}

// arrive moves what is due from the way to the buffer, and returns when the
// next is.
func (h *half) arrive() (next time.Time) {
	now := time.Now()
	for len(h.way) > 0 {
		s := h.way[0]
		if s.at.After(now) {
			return s.at
		}
		h.buf = append(h.buf, s.data...)
		h.onWay -= len(s.data)
		h.way = h.way[1:]
	}
	return time.Time{}
}

// send puts bytes on the way; none overtakes another.
func (h *half) send(p []byte) {
	var d time.Duration
	if h.delay != nil {
		d = h.delay()
	}
	if d <= 0 && len(h.way) == 0 {
		h.buf = append(h.buf, p...)
		return
	}
	at := time.Now().Add(d)
	if n := len(h.way); n > 0 && h.way[n-1].at.After(at) {
		at = h.way[n-1].at
	}
	h.way = append(h.way, segment{append([]byte(nil), p...), at})
	h.onWay += len(p)
}

func earlier(a, b time.Time) time.Time {
	if a.IsZero() || (!b.IsZero() && b.Before(a)) {
		return b
	}
	return a
}

func newHalf() *half { return &half{changed: make(chan struct{})} }

func (h *half) wake() {
	close(h.changed)
	h.changed = make(chan struct{})
}

func wait(ch <-chan struct{}, deadline time.Time) error {
	if deadline.IsZero() {
		<-ch
		return nil
	}
	d := time.Until(deadline)
	if d <= 0 {
		return os.ErrDeadlineExceeded
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ch:
		return nil
	case <-t.C:
		return os.ErrDeadlineExceeded
	}
}

func (h *half) read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		h.mu.Lock()
		if h.err != nil {
			defer h.mu.Unlock()
			return 0, h.err
		}
		var next time.Time
		if !h.stalled {
			next = h.arrive()
		}
		if len(h.buf) > 0 && !h.stalled {
			n := copy(p, h.buf)
			h.buf = h.buf[n:]
			h.wake()
			h.mu.Unlock()
			return n, nil
		}
		if h.eof && !h.stalled && len(h.way) == 0 {
			h.mu.Unlock()
			return 0, io.EOF
		}
		ch, dl := h.changed, h.rdl
		h.mu.Unlock()
		err := wait(ch, earlier(next, dl))
		if err != nil && !dl.IsZero() && !time.Now().Before(dl) {
			return 0, err
		}
	}
}

func (h *half) write(p []byte) (int, error) {
	written := 0
	for {
		h.mu.Lock()
		switch {
		case h.err != nil:
			defer h.mu.Unlock()
			return written, h.err
		case h.eof:
			h.mu.Unlock()
			return written, net.ErrClosed
		}
		if room := maxBuffered - len(h.buf) - h.onWay; room > 0 {
			n := min(room, len(p))
			h.send(p[:n])
			p = p[n:]
			written += n
			h.wake()
		}
		if len(p) == 0 {
			h.mu.Unlock()
			return written, nil
		}
		ch, dl := h.changed, h.wdl
		h.mu.Unlock()
		if err := wait(ch, dl); err != nil {
			return written, err
		}
	}
}

func (h *half) update(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
	h.wake()
}

func (h *half) stall(on bool) { h.update(func() { h.stalled = on }) }

// Conn is one end of a connection.
type Conn struct {
	in, out       *half
	local, remote Addr
	once          sync.Once
	onClose       func()
}

// Pipe returns two connected ends.
func Pipe(a, b Addr) (*Conn, *Conn) {
	x, y := newHalf(), newHalf()
	return &Conn{in: x, out: y, local: a, remote: b}, &Conn{in: y, out: x, local: b, remote: a}
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) { return c.in.read(p) }

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (int, error) { return c.out.write(p) }

// Close implements net.Conn: the peer reads what was written, then EOF.
func (c *Conn) Close() error {
	c.once.Do(func() {
		c.out.update(func() { c.out.eof = true })
		c.in.update(func() { c.in.err = net.ErrClosed })
		if c.onClose != nil {
			c.onClose()
		}
	})
	return nil
}

// Break ends both directions as a reset does.
func (c *Conn) Break() {
	err := errors.New("memnet: connection reset")
	c.in.update(func() { c.in.err = err })
	c.out.update(func() { c.out.err = err })
}

// Stall makes both directions swallow bytes without delivering them, as a
// cut link does until TCP gives up; false delivers what was held back.
func (c *Conn) Stall(on bool) {
	c.in.stall(on)
	c.out.stall(on)
}

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	_ = c.SetReadDeadline(t)
	return c.SetWriteDeadline(t)
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.in.update(func() { c.in.rdl = t })
	return nil
}

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.out.update(func() { c.out.wdl = t })
	return nil
}

// Network joins listeners and dialers by name.
type Network struct {
	mu        sync.Mutex
	listeners map[Addr]*Listener
	cut       map[Addr]bool
	blocked   map[[2]Addr]bool // from, to; "" is everybody
	conns     map[*Conn]struct{}
	delay     func(from, to Addr) time.Duration
	hosts     map[Addr]Addr // of further addresses
}

// New returns an empty network.
func New() *Network {
	return &Network{listeners: map[Addr]*Listener{}, cut: map[Addr]bool{}, blocked: map[[2]Addr]bool{}, conns: map[*Conn]struct{}{}, hosts: map[Addr]Addr{}}
}

// Listener accepts connections of a Network.
type Listener struct {
	n      *Network
	addr   Addr
	queue  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// Listen takes a name.
func (n *Network) Listen(addr Addr) (*Listener, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.listeners[addr] != nil {
		return nil, fmt.Errorf("memnet: %s is in use", addr)
	}
	l := &Listener{n: n, addr: addr, queue: make(chan net.Conn, 1024), closed: make(chan struct{})}
	n.listeners[addr] = l
	return l, nil
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.queue:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *Listener) Close() error {
	l.once.Do(func() {
		l.n.mu.Lock()
		delete(l.n.listeners, l.addr)
		l.n.mu.Unlock()
		close(l.closed)
	})
	return nil
}

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr { return l.addr }

// Dialer returns a dial function for the host named from.
func (n *Network) Dialer(from Addr) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, _, addr string) (net.Conn, error) {
		to := Addr(addr)
		n.mu.Lock()
		l, cut, delay := n.listeners[to], n.off(from, to) || n.off(to, from), n.delay
		n.mu.Unlock()
		if cut {
			<-ctx.Done()
			return nil, fmt.Errorf("memnet: dial %s: %w", to, ctx.Err())
		}
		if l == nil {
			return nil, fmt.Errorf("memnet: dial %s: connection refused", to)
		}
		a, b := Pipe(from, to)
		a.onClose = func() { n.drop(a) }
		b.onClose = func() { n.drop(b) }
		if delay != nil {
			a.out.delay = func() time.Duration { return delay(from, to) }
			b.out.delay = func() time.Duration { return delay(to, from) }
		}
		n.mu.Lock()
		n.conns[a], n.conns[b] = struct{}{}, struct{}{}
		n.mu.Unlock()
		select {
		case l.queue <- b:
			return a, nil
		case <-l.closed:
			return nil, fmt.Errorf("memnet: dial %s: connection refused", to)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (n *Network) drop(c *Conn) {
	n.mu.Lock()
	delete(n.conns, c)
	n.mu.Unlock()
}

// Delay sets how long each write is on its way, for connections that are
// made from now on: latency, and the repeats of a lossy link. It is called by
// writers, one at a time for each direction of a connection.
func (n *Network) Delay(f func(from, to Addr) time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.delay = f
}

// Cut takes a host off the network (its connections stall, new ones hang) or
// brings it back.
func (n *Network) Cut(host Addr, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[host] = on
	n.restall()
}

// Block stops what goes from one host to another and not what goes back; ""
// is every host. New connections between the two hang.
func (n *Network) Block(from, to Addr, on bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.blocked[[2]Addr{from, to}] = on
	n.restall()
}

// Deafen keeps a host from hearing anything while what it says on its open
// connections still arrives (new ones hang: they need both ways), or ends
// that.
func (n *Network) Deafen(host Addr, on bool) { n.Block("", host, on) }

// Belongs gives a host a further address: what is done to the host is done to
// the address too.
func (n *Network) Belongs(addr, host Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hosts[addr] = host
}

// Reaches says whether anything gets from one address to the other.
func (n *Network) Reaches(from, to Addr) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.off(from, to)
}

// off says whether nothing gets from one host to the other.
func (n *Network) off(from, to Addr) bool {
	if h, ok := n.hosts[from]; ok {
		from = h
	}
	if h, ok := n.hosts[to]; ok {
		to = h
	}
	return n.cut[from] || n.cut[to] || n.blocked[[2]Addr{from, to}] || n.blocked[[2]Addr{from, ""}] || n.blocked[[2]Addr{"", to}]
}

func (n *Network) restall() {
	for c := range n.conns {
		c.out.stall(n.off(c.local, c.remote))
		c.in.stall(n.off(c.remote, c.local))
	}
}
