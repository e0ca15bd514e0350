package nodeapi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/wire"
)

// maxRelays bounds what one node passes through this server at once: its
// session, the one before it, and the streams it was asked for.
const maxRelays = 2 + maxNodeStreams + 8

// ServeRelay serves ALPNRelay: a node that cannot reach the server that leads
// reaches it through this one. What passes is the TLS of the node and the
// leader, so this server can neither read nor answer any of it: a lease is
// acknowledged by the leader, or not at all.
func (s *Server) ServeRelay(ctx context.Context, c *listener.Conn) {
	hello, err := readHello(c)
	if err != nil {
		return
	}
	reply := s.hello()
	reply.Refused = s.refuse(c, hello)
	var leader net.Conn
	if reply.Refused == "" {
		var done func()
		if leader, done, err = s.toLeader(ctx, c.Peer.UID); err != nil {
			reply.Refused = err.Error()
		} else {
			defer done()
		}
	}
	_ = c.SetWriteDeadline(time.Now().Add(helloTimeout))
	if err := wire.WriteMessage(c, reply); err != nil || leader == nil {
		return
	}
	_ = c.SetWriteDeadline(time.Time{})
	s.log.Info("a node reaches the leader by way of this server", "node", c.Peer.Name, "remote", c.RemoteAddr().String())
	splice(ctx, c, leader)
}

// toLeader opens the far half of a relay; done ends it.
func (s *Server) toLeader(ctx context.Context, uid string) (net.Conn, func(), error) {
	if _, leading := s.cfg.Leadership.Leadership(); leading || s.cfg.ToLeader == nil {
		return nil, nil, errors.New("this server leads: nodes talk to it directly")
	}
	s.mu.Lock()
	if s.relays[uid] >= maxRelays {
		s.mu.Unlock()
		return nil, nil, fmt.Errorf("this node has %d connections through this server already", maxRelays)
	}
	s.relays[uid]++
	s.mu.Unlock()
	done := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.relays[uid]--; s.relays[uid] == 0 {
			delete(s.relays, uid)
		}
	}
	c, err := s.cfg.ToLeader(ctx)
	if err != nil {
		done()
		return nil, nil, fmt.Errorf("the leader cannot be reached from here either: %w", err)
	}
	return c, func() { _ = c.Close(); done() }, nil
}

// relayBuffer is small: a relay carries leases nearly all the time, and there
// may be thousands.
const relayBuffer = 4 << 10

// relayWrite bounds one write: an end that takes nothing for so long is over.
const relayWrite = 45 * time.Second

// splice copies between two connections until one of them ends, or ctx does.
// The leader ends a session in which nothing arrives, so neither is left
// behind.
func splice(ctx context.Context, a, b net.Conn) {
	end := sync.OnceFunc(func() { _ = a.Close(); _ = b.Close() })
	stop := context.AfterFunc(ctx, end)
	defer stop()
	pass := func(to, from net.Conn) {
		defer end()
		buf := make([]byte, relayBuffer)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				_ = to.SetWriteDeadline(time.Now().Add(relayWrite))
				if _, werr := to.Write(buf[:n]); werr != nil {
					return
				}
			}
			if err != nil {
				return
			}
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() { pass(b, a) })
	pass(a, b)
	wg.Wait()
}

// comesFrom says for people where a node is: the address that it has itself,
// where that is not the one that is seen (another server or a NAT between).
func comesFrom(seen net.Addr, own []string) string {
	if len(own) == 0 {
		return seen.String()
	}
	ap, err := netip.ParseAddrPort(own[0])
	if err != nil {
		return seen.String()
	}
	if there, err := netip.ParseAddrPort(seen.String()); err == nil && there.Addr().Unmap() == ap.Addr().Unmap() {
		return seen.String()
	}
	return ap.String() + " (by way of " + seen.String() + ")"
}
