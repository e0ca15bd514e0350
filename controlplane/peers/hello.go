package peers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/listener"
	"github.com/dunlin-project/dunlin/internal/attempt"
	"github.com/dunlin-project/dunlin/internal/feature"
	"github.com/dunlin-project/dunlin/pki"
	"github.com/dunlin-project/dunlin/wire"
)

const helloTimeout = 5 * time.Second

// ErrRefused is another server's no; the text says why.
var ErrRefused = errors.New("the other server refused")

var errSelf = errors.New("this server itself")

func (m *Mesh) hello() *wire.Hello {
	return &wire.Hello{
		ClusterID: m.cfg.ClusterID, Epoch: m.cfg.Epoch(), Feature: feature.Level, Version: m.cfg.Version,
		NodeName: m.cfg.Name, Addresses: clean(m.cfg.Addresses()), Peers: m.cfg.Book.All(), ClusterLevel: m.cfg.Level(),
	}
}

// judge says why a server is not spoken to; "" is welcome. fence is the epoch
// by which this server itself is out; level is the cluster's feature level.
func judge(cluster string, epoch uint64, level uint32, h *wire.Hello, removed bool) (refused string, fence uint64) {
	_, tooOld := feature.Common(h.Feature, h.Version)
	switch {
	case h.ClusterID != cluster:
		return fmt.Sprintf("this is cluster %s, not %s", cluster, h.ClusterID), 0
	case h.Epoch < epoch:
		return fmt.Sprintf("it is from before a recovery of the cluster (epoch %d, now %d); remove its state and join it again", h.Epoch, epoch), 0
	case h.Epoch > epoch:
		return fmt.Sprintf("this server is from before a recovery of the cluster (epoch %d, yours is %d)", epoch, h.Epoch), h.Epoch
	case removed:
		return "it was removed from the cluster; remove its state and join it again", 0
	case h.Feature < level:
		return fmt.Sprintf("its %s understands feature level %d, and the cluster is at level %d; upgrade it", feature.Build(h.Version), h.Feature, level), 0
	case tooOld != nil:
		return fmt.Sprintf("its %v; upgrade it", tooOld), 0
	}
	return "", 0
}

// behind ends this server's part when another one of the same cluster proves
// that the feature level was raised above what this build understands. Its own
// log may say so too, and it may never come to read it: nobody older is let in.
func (m *Mesh) behind(h *wire.Hello) {
	if h.ClusterID == m.cfg.ClusterID && h.Epoch >= m.cfg.Epoch() && h.ClusterLevel > feature.Level && m.cfg.Behind != nil {
		m.fence.Do(func() { m.cfg.Behind(h.ClusterLevel) })
	}
}

// accept does the handshake of an incoming connection and returns who it is.
// A certificate outside its dates is no reason to refuse: servers issue their
// own, so dates would only say whose clock is wrong.
func (m *Mesh) accept(c *listener.Conn) (string, error) {
	_ = c.SetDeadline(time.Now().Add(helloTimeout))
	defer func() { _ = c.SetDeadline(time.Time{}) }()
	theirs := new(wire.Hello)
	if err := wire.ReadMessage(c, theirs); err != nil {
		return "", err
	}
	mine := m.hello()
	id := c.Peer.UID
	removed, fence := false, uint64(0)
	switch {
	case c.Peer.Kind != pki.ServerPeer:
		mine = &wire.Hello{Refused: "this is for servers: the connection has no server's certificate"}
	case c.TLS.Version < tls.VersionTLS13:
		mine.Refused = "TLS 1.3 is needed"
	case id == m.cfg.ID:
		// Another machine with a copied state folder proves to be this server.
		if theirs.BootID != bootID {
			mine.Refused = "it has the identity of this server (a copied state folder?)"
		}
	default:
		removed = m.removed(id)
		mine.Refused, fence = judge(m.cfg.ClusterID, m.cfg.Epoch(), m.cfg.Level(), theirs, removed)
	}
	mine.Limited = removed && theirs.Epoch == mine.Epoch
	mine.BootID = bootID
	if err := wire.WriteMessage(c, mine); err != nil {
		return "", err
	}
	if fence != 0 {
		m.fenced(theirs.NodeName, fence)
	}
	if c.Peer.Kind == pki.ServerPeer && id != m.cfg.ID {
		m.behind(theirs)
	}
	if mine.Refused != "" {
		m.trouble("from "+id, "a server was refused", fmt.Errorf("%s (%s): %s", theirs.NodeName, c.RemoteAddr(), mine.Refused))
		return "", fmt.Errorf("%w: %s", ErrRefused, mine.Refused)
	}
	if id != m.cfg.ID {
		m.learn(id, theirs)
	}
	return id, nil
}

// open dials one address and does the handshake. id is who must be there; ""
// takes any other server of the cluster.
func (m *Mesh) open(ctx context.Context, addr, proto, id string) (net.Conn, string, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, found, err := m.tls(ctx, addr, proto, id)
	if err != nil {
		return nil, "", err
	}
	_ = c.SetDeadline(time.Now().Add(helloTimeout))
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	err = m.introduce(c, addr, found)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = c.Close()
		return nil, "", err
	}
	_ = c.SetDeadline(time.Time{})
	return c, found, nil
}

// tls dials, and checks who answers.
func (m *Mesh) tls(ctx context.Context, addr, proto, id string) (*tls.Conn, string, error) {
	raw, err := m.cfg.Dial(ctx, "tcp", addr)
	if err != nil {
		return nil, "", fmt.Errorf("dial %s: %w", addr, err)
	}
	setUserTimeout(raw)
	cert, err := m.cfg.Certificate()
	if err != nil {
		_ = raw.Close()
		return nil, "", err
	}
	found := ""
	verify := pki.VerifyServer(m.cfg.Roots)
	tc := tls.Client(raw, &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it: by identity, not by host name
		VerifyConnection: func(cs tls.ConnectionState) error {
			if err := verify(cs); err != nil {
				return err
			}
			found = pki.UIDOf(cs.PeerCertificates[0])
			switch {
			case id != "" && found != id:
				return fmt.Errorf("another server is there: %s, not %s", found, id)
			case id == "" && found == m.cfg.ID:
				return errSelf
			}
			return nil
		},
		NextProtos:           []string{proto},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return cert, nil },
	})
	if err := tc.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, "", fmt.Errorf("TLS with %s: %w", addr, err)
	}
	return tc, found, nil
}

// introduce is the dialling side of the handshake.
func (m *Mesh) introduce(c net.Conn, addr, id string) error {
	mine := m.hello()
	mine.BootID = bootID
	if err := wire.WriteMessage(c, mine); err != nil {
		return fmt.Errorf("greet %s: %w", addr, err)
	}
	theirs := new(wire.Hello)
	if err := wire.ReadMessage(c, theirs); err != nil {
		return fmt.Errorf("greet %s: %w", addr, err)
	}
	m.behind(theirs)
	if theirs.Refused == "" {
		refused, fence := judge(m.cfg.ClusterID, m.cfg.Epoch(), m.cfg.Level(), theirs, m.removed(id))
		if fence != 0 {
			m.fenced(theirs.NodeName, fence)
		}
		if refused != "" {
			return fmt.Errorf("server %s (%s) not accepted: %s", id, addr, refused)
		}
		m.learn(id, theirs)
		return nil
	}
	if theirs.ClusterID == m.cfg.ClusterID && (theirs.Limited || theirs.Epoch > m.cfg.Epoch()) {
		epoch := theirs.Epoch
		if theirs.Limited {
			epoch = 0
		}
		m.fenced(theirs.NodeName, epoch)
	}
	return fmt.Errorf("%w: %s: %s", ErrRefused, addr, theirs.Refused)
}

// dial finds a server at one of its addresses.
func (m *Mesh) dial(ctx context.Context, id, proto string) (net.Conn, error) {
	c, err := attempt.First(ctx, dialStagger, m.addresses(id), func(ctx context.Context, addr string) (net.Conn, error) {
		c, _, err := m.open(ctx, addr, proto, id)
		return c, err
	}, func(c net.Conn) { _ = c.Close() })
	if err != nil {
		return nil, unreachable(id, err)
	}
	return c, nil
}

// Raw opens a TCP connection to a server, on which nothing was said yet. Who
// uses it finds out who answers.
func (m *Mesh) Raw(ctx context.Context, id string) (net.Conn, error) {
	c, err := attempt.First(ctx, dialStagger, m.cfg.Book.Resolve(id), func(ctx context.Context, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return m.cfg.Dial(ctx, "tcp", addr)
	}, func(c net.Conn) { _ = c.Close() })
	if err != nil {
		return nil, unreachable(id, err)
	}
	setUserTimeout(c)
	return c, nil
}

// Answers says at which address a server of this cluster and this recovery
// epoch answers.
func (m *Mesh) Answers(ctx context.Context, id string) (addr string, err error) {
	c, err := m.dial(ctx, id, wire.ALPNServer)
	if err != nil {
		return "", err
	}
	addr = c.RemoteAddr().String()
	_ = c.Close()
	return addr, nil
}
