package nodeapi

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

// welcome exchanges the first messages. The session is nil when the node was
// refused, or is gone already.
func (s *Server) welcome(ctx context.Context, c *listener.Conn) *session {
	hello, err := readHello(c)
	if err != nil {
		return nil // never spoke our protocol: the listener's handshake log is enough
	}
	elsewhere, leader := s.whereTo(ctx)
	sess := &session{node: c.Peer.Name, uid: c.Peer.UID, boot: hello.BootID, remote: comesFrom(c.RemoteAddr(), hello.Addresses),
		limited: c.Peer.Limited, up: make(chan struct{}), reports: make(chan struct{}, 1), saying: make(chan struct{}, 1), mirrors: map[string]wire.PodReport{}}
	if tc, ok := c.Raw.(*net.TCPConn); ok {
		// Little may wait in the kernel, or a lease queues behind an assignment.
		_ = tc.SetWriteBuffer(64 << 10)
		_ = tc.SetReadBuffer(64 << 10)
	}
	term, _ := s.cfg.Leadership.Leadership()
	reply := s.hello()
	reply.Term, reply.Limited = term, c.Peer.Limited
	reply.GossipID = s.tellGossip(sess)
	reply.Refused = s.refuse(c, hello)
	if since, dead := s.Dead(sess.uid); dead && reply.Refused == "" {
		reply.Refused, reply.Stop = deadText(sess.node, since), true
	}
	if reply.Refused == "" {
		reply.Refused, reply.Leader = elsewhere, leader
	}
	if reply.Refused == "" && !sess.limited {
		reply.Refused, reply.Stop = s.admit(ctx, c, sess)
	}
	if reply.Refused == "" {
		if sess.leaseKey, err = pki.LeaseKey(c.TLS); err != nil {
			reply.Refused = err.Error()
		}
	}
	accept := []wire.Type{wire.TypeRenewRequest, wire.TypeTimeRequest}
	if !sess.limited {
		accept = append(accept, wire.TypeLeaseRequest, wire.TypePullRequest, wire.TypeReport, wire.TypeServicesRequest)
	}
	sess.conn = wire.NewConn(c, sessionHandler{s, sess}, wire.Options{Accept: accept, MaxConcurrent: 4})
	installed := false
	if reply.Refused == "" && !sess.limited {
		if installed = s.install(sess); !installed {
			reply.Refused = "another connection of this node came at the same time; try again"
		}
	}
	_ = c.SetWriteDeadline(time.Now().Add(helloTimeout))
	if err := wire.WriteMessage(c, reply); err != nil {
		if installed {
			s.remove(sess)
		}
		return nil
	}
	if reply.Refused == notLeading {
		return nil // the ordinary way to the leader
	}
	if reply.Refused != "" {
		s.log.Info("node refused", "node", sess.node, "remote", sess.remote, "reason", reply.Refused)
		return nil
	}
	s.log.Info("node connected", "node", sess.node, "remote", sess.remote, "limited", sess.limited, "version", hello.Version, "feature_level", hello.Feature)
	return sess
}

func readHello(c *listener.Conn) (*wire.Hello, error) {
	_ = c.SetReadDeadline(time.Now().Add(helloTimeout))
	hello := new(wire.Hello)
	if err := wire.ReadMessage(c, hello); err != nil {
		return nil, err
	}
	_ = c.SetReadDeadline(time.Time{})
	return hello, nil
}

// hungUp says whether the other end of a connection, which waits for an answer
// and says nothing meanwhile, has closed it. What it says all the same is lost.
func hungUp(c net.Conn) bool {
	_ = c.SetReadDeadline(time.Now().Add(hungUpWait))
	defer func() { _ = c.SetReadDeadline(time.Time{}) }()
	_, err := c.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// hungUpWait is how long an end that is here already takes to be read.
const hungUpWait = 20 * time.Millisecond

func (s *Server) hello() *wire.Hello {
	return &wire.Hello{
		ClusterID: s.cfg.ClusterID, Epoch: s.cfg.Epoch(), Feature: feature.Level,
		Version: s.cfg.Version, UnixMilli: s.timeHint(),
	}
}

// timeHint is this server's wall clock for nodes to go by; 0 while it cannot
// be trusted.
func (s *Server) timeHint() int64 {
	if s.clockOK() != nil {
		return 0
	}
	return s.cfg.Clock.Now().UnixMilli()
}

// refuse judges a node's Hello; "" is welcome.
func (s *Server) refuse(c *listener.Conn, h *wire.Hello) string {
	switch {
	case c.Peer.Kind != pki.NodePeer:
		return "this is for nodes: the connection has no node certificate"
	case c.TLS.Version < tls.VersionTLS13:
		return "TLS 1.3 is needed"
	case s.Revoked(c.Peer.UID, ""):
		return "this node's key was banned" // the handshake may have been before this server knew
	case h.NodeUID != "" && h.NodeUID != c.Peer.UID:
		return fmt.Sprintf("the certificate is for node %s, not %s", c.Peer.UID, h.NodeUID)
	case h.BootID == "" || len(h.BootID) > 64:
		return "the node sent no boot id"
	}
	return s.refuseHello(c.Peer.UID, h)
}

// refuseHello is what every handshake of ours checks.
func (s *Server) refuseHello(uid string, h *wire.Hello) string {
	switch {
	case h.ClusterID != s.cfg.ClusterID:
		return fmt.Sprintf("this is cluster %s, not %s", s.cfg.ClusterID, h.ClusterID)
	case h.Epoch > s.cfg.Epoch():
		if s.cfg.HigherEpoch != nil {
			s.cfg.HigherEpoch(uid, h.Epoch)
		}
		return fmt.Sprintf("this server is from before a recovery of the cluster (epoch %d, you have seen %d)", s.cfg.Epoch(), h.Epoch)
	}
	if _, err := feature.Common(h.Feature, h.Version); err != nil {
		return fmt.Sprintf("the node's %v by this server; upgrade the node", err)
	}
	return ""
}

func (s *Server) clockOK() error {
	if s.cfg.ClockOK == nil {
		return nil
	}
	return s.cfg.ClockOK()
}

// tellGossip is this server's gossip id if the session was not told yet.
func (s *Server) tellGossip(sess *session) string {
	if s.cfg.GossipID == nil {
		return ""
	}
	id := s.cfg.GossipID()
	sess.mu.Lock()
	defer sess.mu.Unlock()
	if id == sess.gossip {
		return ""
	}
	sess.gossip = id
	return id
}
