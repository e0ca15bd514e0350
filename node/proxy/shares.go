package proxy

import (
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// fdsOfConn are the descriptors of a connection; pipes are taken while there
	// is something to move, out of the eighth that is kept aside.
	fdsOfConn = 2
	// shareTold is how often the log tells of sources that want more.
	shareTold = time.Minute
)

// connsMost is how many connections the process has descriptors for.
func connsMost() int64 {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil || l.Cur > 1<<30 {
		return (1 << 30) / fdsOfConn
	}
	return int64(l.Cur-l.Cur/8) / fdsOfConn
}

// shares see to it that one client cannot take what all need: a source may have
// half of what the others leave. Nobody notices that before half of all is
// taken.
type shares struct {
	what string // for the log
	log  *slog.Logger

	mu      sync.Mutex
	most    int64
	total   int64
	held    map[netip.Addr]int64
	refused int64 // ever
	told    time.Time
	quiet   int64 // refused since
}

func newShares(what string, most int64, log *slog.Logger) *shares {
	return &shares{what: what, log: log, most: most, held: map[netip.Addr]int64{}}
}

// take counts one more of a source, if it may have it.
func (s *shares) take(from netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	own := s.held[from]
	if left := s.most - (s.total - own); 2*own < left {
		s.held[from], s.total = own+1, s.total+1
		return true
	}
	s.refused++
	s.quiet++
	if now := time.Now(); now.Sub(s.told) >= shareTold {
		s.log.Warn("a source holds half of what the others leave and gets no more", "what", s.what, "source", from, "holds", own,
			"all", s.total, "most", s.most, "refused", s.quiet)
		s.told, s.quiet = now, 0
	}
	return false
}

// give takes back what take gave.
func (s *shares) give(from netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total--
	if s.held[from]--; s.held[from] <= 0 {
		delete(s.held, from)
	}
}

func (s *shares) refusals() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.refused
}

// sourceOf is what is counted: an address, or a network of IPv6, of which one
// client has many. Pure.
func sourceOf(a netip.Addr) netip.Addr {
	if a = a.Unmap(); a.Is6() {
		if p, err := a.Prefix(64); err == nil {
			return p.Addr()
		}
	}
	return a
}

// sharing is the listener of DNS, whose connections are the library's.
type sharing struct {
	*net.TCPListener
	s *shares
}

// Accept implements net.Listener.
func (l *sharing) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptTCP()
		if err != nil {
			return nil, err
		}
		from := sourceOf(addrOf(c.RemoteAddr()))
		if !l.s.take(from) {
			reset(c)
			continue
		}
		return &shared{TCPConn: c, give: sync.OnceFunc(func() { l.s.give(from) })}, nil
	}
}

type shared struct {
	*net.TCPConn
	give func()
}

// Close implements net.Conn.
func (c *shared) Close() error {
	c.give()
	return c.TCPConn.Close()
}

// reset refuses a connection, as nobody listening would.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}
