package pki

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// NodeIdentity is a node's key pair, made at its first boot, and what the
// cluster granted it, in a folder of the state directory. Safe for
// concurrent use.
type NodeIdentity struct {
	dir string
	key *ecdsa.PrivateKey

	mu    sync.Mutex
	grant Grant
	cert  *tls.Certificate
}

// Grant is what joining gave the node.
type Grant struct {
	ClusterID string   `json:"clusterID"`
	Epoch     uint64   `json:"epoch"` // the highest ever seen: lower is refused
	NodeName  string   `json:"nodeName"`
	NodeUID   string   `json:"nodeUID"`
	Servers   []string `json:"servers,omitempty"`  // last known
	JoinedBy  []string `json:"joinedBy,omitempty"` // addresses of the join line: the fallback for ever
	CA        [][]byte `json:"ca"`                 // DER
	Cert      []byte   `json:"cert"`               // DER, leaf
}

const (
	nodeKeyFile   = "node.key"
	nodeGrantFile = "grant.json"
)

// OpenNodeIdentity reads the identity in dir, making the key at first boot.
// A grant that is missing or damaged leaves the node not joined, and so does one
// whose key is gone, which is set aside; the key is kept twice.
func OpenNodeIdentity(dir string) (*NodeIdentity, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("pki: make folder: %w", err)
	}
	n := &NodeIdentity{dir: dir}
	path := filepath.Join(dir, nodeKeyFile)
	b, err := readTwice(path, func(b []byte) error { _, err := decodeKey(b); return err })
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if n.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			return nil, fmt.Errorf("pki: make node key: %w", err)
		}
		if b, err = encodeKey(n.key); err != nil {
			return nil, err
		}
		if err := n.setGrantAside(); err != nil {
			return nil, err
		}
		if err := writeTwice(path, b); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, fmt.Errorf("pki: node key: %w (no copy is good: remove %s and %[2]s.copy, or run 'dunlin agent reset', and join again)", err, path)
	default:
		if n.key, err = decodeKey(b); err != nil {
			return nil, err
		}
	}
	g, err := n.readGrant()
	if err != nil {
		return nil, err
	}
	if g != nil {
		if err := n.adopt(*g); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// setGrantAside moves away what was granted to a key that is gone.
func (n *NodeIdentity) setGrantAside() error {
	path := filepath.Join(n.dir, nodeGrantFile)
	for _, p := range []string{path, path + ".copy"} {
		if _, err := atomicfile.Quarantine(p); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("pki: node certificate of a lost key: %w", err)
		}
	}
	return nil
}

func (n *NodeIdentity) readGrant() (*Grant, error) {
	path := filepath.Join(n.dir, nodeGrantFile)
	for _, p := range []string{path, path + ".copy"} {
		b, err := atomicfile.Read(p)
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, atomicfile.ErrCorrupt) {
				continue
			}
			return nil, err
		}
		g := new(Grant)
		if err := json.Unmarshal(b, g); err != nil {
			continue
		}
		return g, nil
	}
	return nil, nil
}

func (n *NodeIdentity) adopt(g Grant) error {
	leaf, err := x509.ParseCertificate(g.Cert)
	if err != nil {
		return fmt.Errorf("pki: node certificate: %w", err)
	}
	pub, ok := leaf.PublicKey.(*ecdsa.PublicKey)
	if !ok || !pub.Equal(&n.key.PublicKey) {
		return errors.New("pki: the node's certificate is for another key; join again")
	}
	for _, ca := range g.CA {
		if _, err := x509.ParseCertificate(ca); err != nil {
			return fmt.Errorf("pki: cluster CA: %w", err)
		}
	}
	n.grant = g
	n.cert = &tls.Certificate{Certificate: [][]byte{g.Cert}, PrivateKey: n.key, Leaf: leaf}
	return nil
}

// Joined says whether the node has a grant.
func (n *NodeIdentity) Joined() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cert != nil
}

// Grant returns a copy of what the cluster granted; zero if not joined.
func (n *NodeIdentity) Grant() Grant {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.grant
}

// Update changes the grant and persists it, if it changed.
func (n *NodeIdentity) Update(f func(*Grant)) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	g := n.grant
	f(&g)
	before, err := json.Marshal(n.grant)
	if err != nil {
		return fmt.Errorf("pki: encode grant: %w", err)
	}
	after, err := json.Marshal(g)
	if err != nil {
		return fmt.Errorf("pki: encode grant: %w", err)
	}
	if string(before) == string(after) {
		return nil
	}
	old, oldCert := n.grant, n.cert
	if err := n.adopt(g); err != nil {
		return err
	}
	path := filepath.Join(n.dir, nodeGrantFile)
	for _, p := range []string{path, path + ".copy"} {
		if err := atomicfile.Write(p, after, 0o600); err != nil {
			n.grant, n.cert = old, oldCert
			return err
		}
	}
	return nil
}

// CSR is a fresh request for the node's key, in DER.
func (n *NodeIdentity) CSR() ([]byte, error) {
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "dunlin-node", Organization: []string{NodesGroup}},
	}, n.key)
	if err != nil {
		return nil, fmt.Errorf("pki: make request: %w", err)
	}
	return der, nil
}

// Certificate is the node's client certificate; nil if not joined.
func (n *NodeIdentity) Certificate() *tls.Certificate {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cert
}

// Roots are the authorities the node trusts.
func (n *NodeIdentity) Roots() []*x509.Certificate {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []*x509.Certificate
	for _, der := range n.grant.CA {
		if c, err := x509.ParseCertificate(der); err == nil {
			out = append(out, c)
		}
	}
	return out
}

// Key is the node's private key, which also signs its gossip metadata.
func (n *NodeIdentity) Key() *ecdsa.PrivateKey { return n.key }
