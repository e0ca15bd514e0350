package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dunlin-project/dunlin/internal/clock"
)

// Organizations that make an identity.
const (
	NodesGroup   = "system:nodes"
	ServersGroup = "dunlin:servers"
	MastersGroup = "system:masters"
	NodePrefix   = "system:node:"
)

const (
	kindNode   = "node"
	kindServer = "server"
)

// identityURI is dunlin://CLUSTER/kind/uid, the identity that our own
// processes look at; names may change, it does not.
func identityURI(cluster, kind, uid string) *url.URL {
	u := &url.URL{Scheme: "dunlin", Host: cluster}
	if kind != "" {
		u.Path = "/" + kind + "/" + uid
	}
	return u
}

func parseIdentity(c *x509.Certificate) (cluster, kind, uid string) {
	for _, u := range c.URIs {
		if u.Scheme != "dunlin" {
			continue
		}
		kind, uid, _ = strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
		return u.Host, kind, uid
	}
	return "", "", ""
}

func clusterOf(c *x509.Certificate) string {
	cluster, _, _ := parseIdentity(c)
	return cluster
}

// ErrBadCSR says why a certificate request is refused.
var ErrBadCSR = errors.New("pki: certificate request refused")

// nameOK says whether s may name a node, a server or a host, or be a uid:
// 1 to 253 lower-case letters, digits, dashes and dots, of which the first
// and the last are letters or digits (about a DNS-1123 subdomain). As a
// regular expression this counts to 251, which is 160 KiB of memory in every
// process.
func nameOK(s string) bool {
	if s == "" || len(s) > 253 {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
		case (c == '-' || c == '.') && i > 0 && i < len(s)-1:
		default:
			return false
		}
	}
	return true
}

// parseCSR checks the signature and the kind of key; what the request wants
// to be called is ignored, the caller decides that.
func parseCSR(der []byte) (*ecdsa.PublicKey, error) {
	if len(der) > 16<<10 {
		return nil, fmt.Errorf("%w: %d bytes", ErrBadCSR, len(der))
	}
	r, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadCSR, err)
	}
	if err := r.CheckSignature(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBadCSR, err)
	}
	pub, ok := r.PublicKey.(*ecdsa.PublicKey)
	if !ok || pub.Curve != elliptic.P256() {
		return nil, fmt.Errorf("%w: the key must be ECDSA P-256", ErrBadCSR)
	}
	return pub, nil
}

// KeyID names a public key: the unpadded base64url SHA-256 of its SPKI.
func KeyID(csr []byte) (string, error) {
	r, err := x509.ParseCertificateRequest(csr)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrBadCSR, err)
	}
	return PinOf(&x509.Certificate{RawSubjectPublicKeyInfo: r.RawSubjectPublicKeyInfo}), nil
}

// IssueNode signs a node's certificate for the key of a CSR (DER). uid is the
// node's identity for ever; name is the Node object's name.
func (ca *CA) IssueNode(csr []byte, name, uid string) (*x509.Certificate, error) {
	pub, err := parseCSR(csr)
	if err != nil {
		return nil, err
	}
	if !nameOK(name) || !nameOK(uid) {
		return nil, fmt.Errorf("%w: node name %q, uid %q", ErrBadCSR, name, uid)
	}
	return ca.sign(leaf{
		subject: pkix.Name{CommonName: NodePrefix + name, Organization: []string{NodesGroup}},
		uri:     identityURI(ca.ClusterID(), kindNode, uid),
		usage:   []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		life:    NodeLife,
	}, pub)
}

// IssueServer signs a server's certificate, which serves the API to clients
// that check host names, and is its client identity towards other servers.
func (ca *CA) IssueServer(pub *ecdsa.PublicKey, id string, dns []string, ips []net.IP) (*x509.Certificate, error) {
	return ca.issueServer(pub, id, dns, ips, ca.Clock.Now())
}

func (ca *CA) issueServer(pub *ecdsa.PublicKey, id string, dns []string, ips []net.IP, from time.Time) (*x509.Certificate, error) {
	if !nameOK(id) {
		return nil, fmt.Errorf("%w: server id %q", ErrBadCSR, id)
	}
	return ca.sign(leaf{
		subject: pkix.Name{CommonName: "dunlin-server:" + id, Organization: []string{ServersGroup}},
		uri:     identityURI(ca.ClusterID(), kindServer, id),
		dns:     dns, ips: ips,
		usage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		life:  ServerLife, from: from,
	}, pub)
}

// IssueServerCSR signs a certificate for the key of a new server's request
// (DER), by which it proves itself to the other servers until it issues its
// own.
func (ca *CA) IssueServerCSR(csr []byte, id string) (*x509.Certificate, error) {
	pub, err := parseCSR(csr)
	if err != nil {
		return nil, err
	}
	return ca.IssueServer(pub, id, nil, nil)
}

// IssueUser makes a key and a client certificate for the API.
func (ca *CA) IssueUser(name string, groups []string, life time.Duration) (*x509.Certificate, *ecdsa.PrivateKey, error) {
	if strings.HasPrefix(name, NodePrefix) || slices.Contains(groups, NodesGroup) || slices.Contains(groups, ServersGroup) {
		return nil, nil, fmt.Errorf("pki: user %q: reserved name or group", name)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("pki: make key: %w", err)
	}
	c, err := ca.sign(leaf{
		subject: pkix.Name{CommonName: name, Organization: groups},
		usage:   []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		life:    life,
	}, &key.PublicKey)
	return c, key, err
}

// RenewAt is when a certificate shall be replaced: after two thirds of its
// life, counted from its issue, not from its back-dated start.
func RenewAt(c *x509.Certificate) time.Time {
	issued := c.NotBefore.Add(backDate)
	return issued.Add(c.NotAfter.Sub(issued) * 2 / 3)
}

// NeedsRenewal says whether now is after RenewAt, or outside the dates.
func NeedsRenewal(c *x509.Certificate, now time.Time) bool {
	return now.Before(c.NotBefore) || now.After(RenewAt(c))
}

// Serving is a server's own certificate. It issues itself a new one whenever
// the current one is due, so that a server never needs a restart for it.
// Safe for concurrent use.
type Serving struct {
	ca    *CA
	id    string
	clock clock.Clock

	mu    sync.Mutex
	wall  clock.Clock // nil: clock alone
	renew time.Time
	dns   []string
	ips   []net.IP
	key   *ecdsa.PrivateKey
	cur   *tls.Certificate
}

// NewServing makes the certificate of the server named id. Names are DNS
// names and IP addresses that clients may use; localhost, 127.0.0.1, ::1 and
// the in-cluster names are always there.
func NewServing(ca *CA, id string, names []string) (*Serving, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("pki: make key: %w", err)
	}
	s := &Serving{ca: ca, id: id, clock: ca.Clock, key: key}
	s.SetNames(names)
	_, err = s.get()
	return s, err
}

var alwaysNames = []string{
	"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
	"kubernetes.default.svc.cluster.local", "127.0.0.1", "::1",
}

// SetNames replaces the names; the next handshake has them.
func (s *Serving) SetNames(names []string) {
	var dns []string
	var ips []net.IP
	for _, n := range append(slices.Clone(alwaysNames), names...) {
		n = strings.ToLower(strings.TrimSuffix(strings.Trim(n, "[]"), "."))
		if ip := net.ParseIP(n); ip != nil {
			if !slices.ContainsFunc(ips, ip.Equal) {
				ips = append(ips, ip)
			}
		} else if nameOK(n) && !slices.Contains(dns, n) {
			dns = append(dns, n)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dns, s.ips, s.cur = dns, ips, nil
}

func (s *Serving) get() (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock.Now()
	from := now
	if s.wall != nil {
		if w := s.wall.Now(); w.Before(from) {
			from = w
		}
	}
	if s.cur != nil && !from.Before(s.cur.Leaf.NotBefore) && !now.After(s.renew) {
		return s.cur, nil
	}
	c, err := s.ca.issueServer(&s.key.PublicKey, s.id, s.dns, s.ips, from)
	if err != nil {
		return nil, err
	}
	// The CA is sent along, so that a joining node can compare its pin.
	s.renew = now.Add(ServerLife * 2 / 3)
	s.cur = &tls.Certificate{Certificate: [][]byte{c.Raw, s.ca.Cert.Raw}, PrivateKey: s.key, Leaf: c}
	return s.cur, nil
}

// Follow makes the certificate valid from what the machine's clock shows, too,
// where that is behind the clock that the authority believes: clients of this
// machine and others judge the dates by theirs, and a clock that was ahead and
// is put right would lock them out until it is believed.
func (s *Serving) Follow(wall clock.Clock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wall = wall
}

// GetCertificate is for tls.Config.
func (s *Serving) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) { return s.get() }

// GetClientCertificate is for tls.Config of connections to other servers.
func (s *Serving) GetClientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return s.get()
}
