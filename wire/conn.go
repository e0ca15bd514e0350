package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// ErrClosed is returned by calls on a connection that is or gets closed; the
// cause is in the chain.
var ErrClosed = errors.New("wire: connection closed")

// Handler answers requests. It is called on the reading goroutine for the
// small types (leases, nudges, time) and must not block then; every other
// type gets a goroutine. For a one-way message the reply is ignored. An
// error that is a *Fault is sent as it is, any other as FaultInternal.
type Handler interface {
	Handle(ctx context.Context, t Type, body []byte) (Message, error)
}

// HandlerFunc adapts a function.
type HandlerFunc func(ctx context.Context, t Type, body []byte) (Message, error)

// Handle implements Handler.
func (f HandlerFunc) Handle(ctx context.Context, t Type, body []byte) (Message, error) {
	return f(ctx, t, body)
}

// Options of a Conn; zero values are defaults.
type Options struct {
	// Initiator: this side dialled. The two sides use odd and even ids.
	Initiator bool
	// Accept lists the request types that the peer may send. Anything else is
	// answered with a Fault without being read into memory.
	Accept []Type
	// IdleTimeout closes the connection when nothing arrives for so long.
	// Default 30 s, negative is never.
	IdleTimeout time.Duration
	// WriteTimeout bounds the write of one chunk. Default 15 s.
	WriteTimeout time.Duration
	// MaxConcurrent bounds the requests of the peer that are being served at
	// once; more are answered with FaultBusy. Default 8.
	MaxConcurrent int
}

// Conn multiplexes requests in both directions over one connection. It owns
// no goroutine of its own: Run reads, writers write under a lock chunk by
// chunk.
type Conn struct {
	nc      net.Conn
	o       Options
	accept  map[Type]bool
	handler Handler

	// writing is held for one chunk at a time. A channel, since a holder may
	// block on the network: virtual time does not pass while somebody waits for
	// a mutex.
	writing chan struct{}

	mu      sync.Mutex
	nextID  uint32
	pending map[uint32]*call
	err     error // why it is closed

	closed chan struct{}
	serve  sync.WaitGroup
	slots  chan struct{}

	in, out atomic.Uint64
}

type call struct {
	reply Message
	done  chan error // buffered 1
}

// NewConn wraps nc. Nothing is read before Run.
func NewConn(nc net.Conn, h Handler, o Options) *Conn {
	if o.IdleTimeout == 0 {
		o.IdleTimeout = 30 * time.Second
	}
	if o.WriteTimeout <= 0 {
		o.WriteTimeout = 15 * time.Second
	}
	if o.MaxConcurrent <= 0 {
		o.MaxConcurrent = 8
	}
	c := &Conn{
		nc: nc, o: o, handler: h,
		accept:  make(map[Type]bool, len(o.Accept)),
		pending: map[uint32]*call{},
		closed:  make(chan struct{}),
		writing: make(chan struct{}, 1),
		slots:   make(chan struct{}, o.MaxConcurrent),
		nextID:  2,
	}
	if o.Initiator {
		c.nextID = 1
	}
	for _, t := range o.Accept {
		c.accept[t] = true
	}
	return c
}

// Bytes counts what was read and written so far, frames without TLS and IP.
func (c *Conn) Bytes() (in, out uint64) { return c.in.Load(), c.out.Load() }

// Done is closed when the connection is.
func (c *Conn) Done() <-chan struct{} { return c.closed }

// Close ends the connection with a reason. It does not wait: Run does.
func (c *Conn) Close(cause error) {
	if cause == nil {
		cause = ErrClosed
	}
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return
	}
	c.err = cause
	pending := c.pending
	c.pending = map[uint32]*call{}
	c.mu.Unlock()
	close(c.closed)
	_ = c.nc.Close()
	for _, p := range pending {
		p.done <- closedError(cause)
	}
}

func closedError(cause error) error {
	if errors.Is(cause, ErrClosed) {
		return cause
	}
	return fmt.Errorf("%w: %w", ErrClosed, cause)
}

// Call sends a request and waits for its reply, which is decoded into the
// pointer reply. A *Fault is returned as the error.
func (c *Conn) Call(ctx context.Context, req, reply Message) error {
	body, err := c.encode(req)
	if err != nil {
		return err
	}
	c.mu.Lock()
	if c.err != nil {
		err := c.err
		c.mu.Unlock()
		return closedError(err)
	}
	id := c.nextID
	c.nextID += 2
	if c.nextID < 2 { // wrapped: 0 is for one-way messages
		c.nextID += 2
	}
	p := &call{reply: reply, done: make(chan error, 1)}
	c.pending[id] = p
	c.mu.Unlock()
	if err := c.write(req.WireType(), id, body); err != nil {
		c.forget(id)
		return err
	}
	select {
	case err := <-p.done:
		return err
	case <-ctx.Done():
		c.forget(id)
		return ctx.Err()
	}
}

// Send writes a one-way message.
func (c *Conn) Send(m Message) error {
	body, err := c.encode(m)
	if err != nil {
		return err
	}
	return c.write(m.WireType(), 0, body)
}

func (c *Conn) encode(m Message) ([]byte, error) {
	body, err := Marshal(m)
	if err != nil {
		return nil, err
	}
	if limit := m.WireType().MaxSize(); len(body) > limit {
		return nil, fmt.Errorf("wire: %v of %d bytes is over its limit of %d", m.WireType(), len(body), limit)
	}
	return body, nil
}

func (c *Conn) forget(id uint32) {
	c.mu.Lock()
	delete(c.pending, id)
	c.mu.Unlock()
}

func (c *Conn) write(t Type, id uint32, body []byte) error {
	err := eachFrame(t, id, body, func(frame []byte) error {
		select {
		case c.writing <- struct{}{}:
		case <-c.closed:
			return net.ErrClosed
		}
		defer func() { <-c.writing }()
		if err := c.nc.SetWriteDeadline(time.Now().Add(c.o.WriteTimeout)); err != nil {
			return err
		}
		n, err := c.nc.Write(frame)
		c.out.Add(uint64(n))
		return err
	})
	if err != nil {
		c.Close(fmt.Errorf("write %v: %w", t, err))
		return closedError(err)
	}
	return nil
}

// partial is a message of which chunks are still to come. discard: it was
// refused or nobody waits for it, so only its size is checked.
type partial struct {
	typ     Type
	body    []byte
	size    int
	discard bool
}

// maxPartials bounds the messages that a peer can leave half-sent.
const maxPartials = 16

// Run reads and serves until the connection ends or ctx does, waits for the
// requests in hand, and returns the reason.
func (c *Conn) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(ctx, func() { c.Close(context.Cause(ctx)) })
	err := c.read(ctx)
	c.Close(err)
	cancel()
	stop()
	c.serve.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *Conn) read(ctx context.Context) error {
	partials := map[uint32]*partial{}
	var hb [headerSize]byte
	for {
		var deadline time.Time
		if c.o.IdleTimeout > 0 {
			deadline = time.Now().Add(c.o.IdleTimeout)
		}
		if err := c.nc.SetReadDeadline(deadline); err != nil {
			return err
		}
		if _, err := io.ReadFull(c.nc, hb[:]); err != nil {
			return err
		}
		h, err := parseHeader(hb[:])
		if err != nil {
			return err
		}
		p, err := c.admit(partials, h)
		if err != nil {
			return err
		}
		chunk := make([]byte, h.size)
		if _, err := io.ReadFull(c.nc, chunk); err != nil {
			return err
		}
		c.in.Add(uint64(headerSize + h.size))
		p.size += h.size
		if !p.discard {
			if p.body == nil && !h.more {
				p.body = chunk
			} else {
				p.body = append(p.body, chunk...)
			}
		}
		if h.more {
			continue
		}
		delete(partials, h.id)
		if !p.discard {
			c.dispatch(ctx, h.typ, h.id, p.body)
		}
	}
}

// mine says whether the id was given by this side, so that the message is a
// reply.
func (c *Conn) mine(id uint32) bool { return id != 0 && (id%2 == 1) == c.o.Initiator }

// admit checks a chunk's header before its body is read.
func (c *Conn) admit(partials map[uint32]*partial, h header) (*partial, error) {
	p := partials[h.id]
	switch {
	case p == nil:
		p = &partial{typ: h.typ}
		if c.mine(h.id) {
			c.mu.Lock()
			w := c.pending[h.id]
			c.mu.Unlock()
			p.discard = w == nil // nobody waits any more
			if w != nil && h.typ != TypeFault && h.typ != w.reply.WireType() {
				return nil, fmt.Errorf("%w: got %v in reply, want %v", ErrMalformed, h.typ, w.reply.WireType())
			}
		} else if !c.accept[h.typ] {
			p.discard = true
			if h.id != 0 {
				c.respond(h.id, nil, &Fault{Code: FaultUnsupported, Message: fmt.Sprintf("%v is not served here", h.typ)})
			}
		}
		if h.more {
			if h.id == 0 {
				return nil, fmt.Errorf("%w: a one-way message in chunks", ErrMalformed)
			}
			if len(partials) >= maxPartials {
				return nil, fmt.Errorf("%w: more than %d messages half-sent", ErrMalformed, maxPartials)
			}
			partials[h.id] = p
		}
	case p.typ != h.typ:
		return nil, fmt.Errorf("%w: %v inside %v", ErrMalformed, h.typ, p.typ)
	}
	limit := h.typ.MaxSize()
	if p.discard && limit == 0 {
		limit = 64 * mib // a newer peer's type: skipped, not stored
	}
	if p.size+h.size > limit {
		return nil, fmt.Errorf("%w: %v over its limit of %d bytes", ErrMalformed, h.typ, limit)
	}
	return p, nil
}

// small types are handled on the reading goroutine.
func (t Type) small() bool {
	switch t {
	case TypeLeaseRequest, TypeNudge, TypeTimeRequest:
		return true
	}
	return false
}

func (c *Conn) dispatch(ctx context.Context, t Type, id uint32, body []byte) {
	if c.mine(id) {
		c.finish(id, t, body)
		return
	}
	if t.small() {
		m, err := c.handler.Handle(ctx, t, body)
		if id != 0 {
			c.respond(id, m, err)
		}
		return
	}
	select {
	case c.slots <- struct{}{}:
	default:
		if id != 0 {
			c.respond(id, nil, &Fault{Code: FaultBusy, Message: "too many requests at once on this connection"})
		}
		return
	}
	c.serve.Go(func() {
		defer func() { <-c.slots }()
		m, err := c.handler.Handle(ctx, t, body)
		if id != 0 {
			c.respond(id, m, err)
		}
	})
}

func (c *Conn) finish(id uint32, t Type, body []byte) {
	c.mu.Lock()
	p := c.pending[id]
	delete(c.pending, id)
	c.mu.Unlock()
	if p == nil {
		return
	}
	if t == TypeFault {
		f := new(Fault)
		if err := Unmarshal(body, f); err != nil {
			p.done <- err
			return
		}
		p.done <- f
		return
	}
	p.done <- Unmarshal(body, p.reply)
}

func (c *Conn) respond(id uint32, m Message, err error) {
	if err == nil && m == nil {
		err = &Fault{Code: FaultInternal, Message: "no answer"}
	}
	if err != nil {
		f := new(Fault)
		if !errors.As(err, &f) {
			f = &Fault{Code: FaultInternal, Message: truncate(err.Error(), 2*kib)}
			if errors.Is(err, ErrMalformed) {
				f.Code = FaultMalformed
			}
		}
		m = f
	}
	body, err := c.encode(m)
	if err != nil {
		body, err = c.encode(&Fault{Code: FaultInternal, Message: truncate(err.Error(), 2*kib)})
		if err != nil {
			return
		}
		m = &Fault{}
	}
	_ = c.write(m.WireType(), id, body) // a failed write closes the connection
}

func truncate(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}
