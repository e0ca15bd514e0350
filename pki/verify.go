package pki

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dunlin-project/dunlin/internal/clock"
)

// PeerKind is what a client certificate makes of its holder.
type PeerKind uint8

// Kinds of peers.
const (
	Anonymous  PeerKind = iota // no certificate
	UserPeer                   // an API client
	NodePeer                   // dunlin://CLUSTER/node/UID
	ServerPeer                 // dunlin://CLUSTER/server/ID
)

// Peer is who is at the other end of a connection.
type Peer struct {
	Kind   PeerKind
	Name   string   // CommonName; for a node the node's name, without the prefix
	UID    string   // node uid or server id
	Groups []string // Organization
	// Limited: a node or server whose certificate is outside its dates: only
	// Renew and Time are served to it. LimitedReason says which, for people.
	Limited       bool
	LimitedReason string
	Cert          *x509.Certificate
}

// Errors of verification, all permanent for the certificate at hand.
var (
	ErrUntrusted = errors.New("pki: certificate is not from this cluster's authority")
	ErrExpired   = errors.New("pki: certificate is outside its dates")
	ErrRevoked   = errors.New("pki: certificate is revoked")
)

// Verifier judges the certificates of clients. It holds no state; the same
// answer comes on a full handshake and on a resumed one.
type Verifier struct {
	// Roots are trusted; more than one while the authority is being rotated.
	Roots []*x509.Certificate
	Clock clock.Clock
	// Revoked says whether an identity (node uid, server id) or the
	// certificate's serial (decimal) is banned; nil is nobody.
	Revoked func(uid, serial string) bool
}

// UIDOf is the uid of the node or server that a certificate of ours is for;
// "" for users. The chain must have been checked.
func UIDOf(c *x509.Certificate) string {
	_, _, uid := parseIdentity(c)
	return uid
}

// Peer judges a connection. Without a client certificate it is Anonymous.
func (v *Verifier) Peer(cs tls.ConnectionState) (Peer, error) {
	if len(cs.PeerCertificates) == 0 {
		return Peer{}, nil
	}
	c := cs.PeerCertificates[0]
	if c.IsCA {
		return Peer{}, fmt.Errorf("%w: an authority is nobody's identity", ErrUntrusted)
	}
	if err := verifyChain(v.Roots, c, x509.ExtKeyUsageClientAuth); err != nil {
		return Peer{}, err
	}
	p := Peer{Kind: UserPeer, Name: c.Subject.CommonName, Groups: c.Subject.Organization, Cert: c}
	cluster, kind, uid := parseIdentity(c)
	if kind != "" {
		if !v.ours(cluster) {
			return Peer{}, fmt.Errorf("%w: it names cluster %q", ErrUntrusted, cluster)
		}
		switch kind {
		case kindNode:
			p.Kind, p.UID = NodePeer, uid
			p.Name = strings.TrimPrefix(p.Name, NodePrefix)
		case kindServer:
			p.Kind, p.UID = ServerPeer, uid
		default:
			return Peer{}, fmt.Errorf("%w: unknown identity %q", ErrUntrusted, kind)
		}
	}
	if v.Revoked != nil && v.Revoked(p.UID, c.SerialNumber.String()) {
		return Peer{}, fmt.Errorf("%w: %s", ErrRevoked, p.Name)
	}
	if reason := outsideDates(c, v.Clock.Now()); reason != "" {
		if p.Kind == UserPeer {
			return Peer{}, fmt.Errorf("%w: %s", ErrExpired, reason)
		}
		p.Limited, p.LimitedReason = true, reason
	}
	return p, nil
}

func (v *Verifier) ours(cluster string) bool {
	for _, r := range v.Roots {
		if clusterOf(r) == cluster {
			return true
		}
	}
	return false
}

// VerifyConnection is for the server's tls.Config, with ClientAuth
// RequestClientCert. ours says whether an ALPN name is one of our own
// protocols; elsewhere a user's certificate outside its dates passes, since
// it is the API's to answer (401) with the reason. Whatever passes has a
// chain that was checked.
func (v *Verifier) VerifyConnection(ours func(alpn string) bool) func(tls.ConnectionState) error {
	return func(cs tls.ConnectionState) error {
		_, err := v.Peer(cs)
		if errors.Is(err, ErrExpired) && !ours(cs.NegotiatedProtocol) {
			return nil
		}
		return err
	}
}

// verifyChain checks signature, usage and constraints up to one of the
// roots, as of its issue: dates are judged apart. (Its back-dated start may
// lie before the authority's, on a board whose clock begins in 1970.)
func verifyChain(roots []*x509.Certificate, c *x509.Certificate, usage x509.ExtKeyUsage) error {
	pool := x509.NewCertPool()
	for _, r := range roots {
		pool.AddCert(r)
	}
	issued := c.NotBefore.Add(backDate)
	if issued.After(c.NotAfter) {
		issued = c.NotAfter
	}
	_, err := c.Verify(x509.VerifyOptions{
		Roots:         pool,
		Intermediates: x509.NewCertPool(),
		CurrentTime:   issued,
		KeyUsages:     []x509.ExtKeyUsage{usage},
	})
	if err == nil {
		return nil
	}
	if cluster, kind, _ := parseIdentity(c); kind != "" && !slices.ContainsFunc(roots, func(r *x509.Certificate) bool { return clusterOf(r) == cluster }) {
		// It may say what it likes; that names the mistake it most likely is.
		return fmt.Errorf("%w: it is a %s of cluster %s", ErrUntrusted, kind, cluster)
	}
	return fmt.Errorf("%w: %w", ErrUntrusted, err)
}

func outsideDates(c *x509.Certificate, now time.Time) string {
	switch {
	case now.Before(c.NotBefore):
		return fmt.Sprintf("not valid before %s, and it is %s", c.NotBefore.Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	case now.After(c.NotAfter):
		return fmt.Sprintf("expired on %s, and it is %s", c.NotAfter.Format(time.RFC3339), now.UTC().Format(time.RFC3339))
	}
	return ""
}

// VerifyServer is for a client's tls.Config with InsecureSkipVerify (the
// standard verification looks at dates and at host names; we look at the
// identity): the peer is a server of the cluster of one of the roots. Dates
// are not judged: whose clock is wrong cannot be told from here, servers
// renew their own certificates, and the time hint that follows is what puts
// a node's clock right.
func VerifyServer(roots []*x509.Certificate) func(tls.ConnectionState) error {
	return func(cs tls.ConnectionState) error {
		if len(cs.PeerCertificates) == 0 {
			return fmt.Errorf("%w: the server sent none", ErrUntrusted)
		}
		c := cs.PeerCertificates[0]
		if err := verifyChain(roots, c, x509.ExtKeyUsageServerAuth); err != nil {
			return err
		}
		cluster, kind, _ := parseIdentity(c)
		for _, r := range roots {
			if kind == kindServer && cluster == clusterOf(r) {
				return nil
			}
		}
		return fmt.Errorf("%w: %q is no server of it", ErrUntrusted, c.Subject.CommonName)
	}
}

// VerifyPin is VerifyServer for a joining node, which has no roots yet: the
// chain that the server sends must end in a certificate whose key has the
// pin. The authority found is handed to got.
func VerifyPin(pin string, got func(ca *x509.Certificate)) func(tls.ConnectionState) error {
	return func(cs tls.ConnectionState) error {
		for _, c := range cs.PeerCertificates {
			if c.IsCA && PinOf(c) == pin {
				if err := VerifyServer([]*x509.Certificate{c})(cs); err != nil {
					return err
				}
				got(c)
				return nil
			}
		}
		return fmt.Errorf("%w: the authority of this server is not the one that the join line names "+
			"(wrong address, another cluster, or somebody in between)", ErrUntrusted)
	}
}
