// Package pki is the cluster's certificate authority and everything that is
// derived from it: identities of servers, nodes and administrators, join
// tokens, renewal, and the verification of both ends of a connection.
//
// Clocks of edge machines are wrong. Certificates are back-dated, expired
// ones can still be renewed, and what a wrong clock limits is decided here,
// not in crypto/tls.
package pki

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"time"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/clock"
)

// Lifetimes of leaves. All are renewed after two thirds.
const (
	ServerLife = 90 * 24 * time.Hour
	NodeLife   = 30 * 24 * time.Hour
	AdminLife  = 365 * 24 * time.Hour
	caLife     = 30 * 365 * 24 * time.Hour
	// backDate is how far in the past a leaf begins: what a client whose
	// clock is behind by so much still accepts.
	backDate = 60 * 24 * time.Hour
)

// oldestNow is a floor for "now" when the authority is made on a machine
// that booted in 1970, so that it does not expire before it is used.
var oldestNow = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// ErrNoCA says that the folder holds no certificate authority.
var ErrNoCA = errors.New("pki: no certificate authority in this folder")

// CA is the cluster's authority: an ECDSA P-256 key and its self-signed
// certificate. Safe for concurrent use.
type CA struct {
	Cert  *x509.Certificate
	Key   *ecdsa.PrivateKey
	Clock clock.Clock
}

// NewCA makes an authority for a cluster id.
func NewCA(clusterID string, c clock.Clock) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("pki: make CA key: %w", err)
	}
	now := c.Now()
	if now.Before(oldestNow) {
		now = oldestNow
	}
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	spki, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("pki: encode CA key: %w", err)
	}
	id := sha256.Sum256(spki)
	t := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               pkix.Name{CommonName: "dunlin-ca", Organization: []string{"dunlin " + clusterID}},
		NotBefore:             time.Unix(0, 0).UTC(), // no clock is before its own epoch
		NotAfter:              now.Add(caLife).UTC(),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
		SubjectKeyId:          id[:20],
		URIs:                  []*url.URL{identityURI(clusterID, "", "")},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("pki: sign CA: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("pki: read back CA: %w", err)
	}
	return &CA{Cert: cert, Key: key, Clock: c}, nil
}

const (
	caCertFile = "ca.crt"
	caKeyFile  = "ca.key"
)

// LoadOrCreateCA reads the authority from dir, or makes one for clusterID if
// there is none. Key and certificate are kept twice (ca.key and ca.key.copy),
// since nothing else can replace them; a damaged copy is repaired from the
// other.
func LoadOrCreateCA(dir, clusterID string, c clock.Clock) (*CA, error) {
	ca, err := LoadCA(dir, c)
	if !errors.Is(err, ErrNoCA) {
		return ca, err
	}
	if ca, err = NewCA(clusterID, c); err != nil {
		return nil, err
	}
	return ca, ca.Save(dir)
}

// Save writes key and certificate to dir, each twice, mode 0600.
func (ca *CA) Save(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("pki: make folder: %w", err)
	}
	key, err := encodeKey(ca.Key)
	if err != nil {
		return err
	}
	// The key first: a certificate without its key is the worse half.
	if err := writeTwice(filepath.Join(dir, caKeyFile), key); err != nil {
		return err
	}
	return writeTwice(filepath.Join(dir, caCertFile), EncodeCerts(ca.Cert.Raw))
}

// LoadCA reads the authority from dir; ErrNoCA if its certificate was never
// written. A certificate without its key is an error: the key is written first,
// so somebody lost it.
func LoadCA(dir string, c clock.Clock) (*CA, error) {
	keyPEM, kerr := readTwice(filepath.Join(dir, caKeyFile), func(b []byte) error { _, err := decodeKey(b); return err })
	if errors.Is(kerr, fs.ErrNotExist) {
		for _, p := range []string{caCertFile, caCertFile + ".copy"} {
			if _, err := os.Stat(filepath.Join(dir, p)); err == nil {
				return nil, fmt.Errorf("pki: CA key: %w, though %s is there (restore it from a backup; nothing was changed)", kerr, filepath.Join(dir, p))
			}
		}
		return nil, ErrNoCA
	}
	if kerr != nil {
		return nil, fmt.Errorf("pki: CA key: %w (restore %s from a backup)", kerr, filepath.Join(dir, caKeyFile))
	}
	key, err := decodeKey(keyPEM)
	if err != nil {
		return nil, err
	}
	crtPEM, err := readTwice(filepath.Join(dir, caCertFile), func(b []byte) error { _, err := DecodeCerts(b); return err })
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNoCA // a power cut in the very first start: nothing was issued yet
	}
	if err != nil {
		return nil, fmt.Errorf("pki: CA certificate: %w (restore %s from a backup)", err, filepath.Join(dir, caCertFile))
	}
	certs, err := DecodeCerts(crtPEM)
	if err != nil {
		return nil, err
	}
	if pub, ok := certs[0].PublicKey.(*ecdsa.PublicKey); !ok || !pub.Equal(&key.PublicKey) {
		return nil, fmt.Errorf("pki: %s and %s do not belong together", caCertFile, caKeyFile)
	}
	return &CA{Cert: certs[0], Key: key, Clock: c}, nil
}

// ClusterID is the cluster the authority was made for.
func (ca *CA) ClusterID() string { return clusterOf(ca.Cert) }

// Pin is the SHA-256 of the authority's public key (SPKI), in unpadded
// base64url, as a join line carries it.
func (ca *CA) Pin() string { return PinOf(ca.Cert) }

// PinOf is the pin of a certificate's public key.
func PinOf(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return base64.RawURLEncoding.EncodeToString(sum[:])
}

// Pool is a pool with only this authority.
func (ca *CA) Pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(ca.Cert)
	return p
}

// PEM is the certificate for kubeconfigs and kube-root-ca.crt.
func (ca *CA) PEM() []byte { return EncodeCerts(ca.Cert.Raw) }

// KeyPEM is the authority's private key, for another server of the cluster.
func (ca *CA) KeyPEM() ([]byte, error) { return encodeKey(ca.Key) }

// ParseCA is the authority of PEM and KeyPEM.
func ParseCA(certPEM, keyPEM []byte, c clock.Clock) (*CA, error) {
	certs, err := DecodeCerts(certPEM)
	if err != nil {
		return nil, fmt.Errorf("pki: CA certificate: %w", err)
	}
	key, err := decodeKey(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("pki: CA key: %w", err)
	}
	if pub, ok := certs[0].PublicKey.(*ecdsa.PublicKey); !ok || !pub.Equal(&key.PublicKey) {
		return nil, errors.New("pki: the CA's certificate and key do not belong together")
	}
	return &CA{Cert: certs[0], Key: key, Clock: c}, nil
}

// leaf is what is issued.
type leaf struct {
	subject pkix.Name
	uri     *url.URL
	dns     []string
	ips     []net.IP
	usage   []x509.ExtKeyUsage
	life    time.Duration
	from    time.Time // zero: now
}

func (ca *CA) sign(l leaf, pub any) (*x509.Certificate, error) {
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	now := ca.Clock.Now()
	if l.from.IsZero() {
		l.from = now
	}
	t := &x509.Certificate{
		SerialNumber:          serial,
		Subject:               l.subject,
		NotBefore:             l.from.Add(-backDate).UTC(),
		NotAfter:              now.Add(l.life).UTC(),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           l.usage,
		BasicConstraintsValid: true,
		DNSNames:              l.dns,
		IPAddresses:           l.ips,
	}
	if l.uri != nil {
		t.URIs = []*url.URL{l.uri}
	}
	der, err := x509.CreateCertificate(rand.Reader, t, ca.Cert, pub, ca.Key)
	if err != nil {
		return nil, fmt.Errorf("pki: sign %s: %w", l.subject.CommonName, err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("pki: read back %s: %w", l.subject.CommonName, err)
	}
	return c, nil
}

func newSerial() (*big.Int, error) {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 126))
	if err != nil {
		return nil, fmt.Errorf("pki: serial: %w", err)
	}
	return n.Add(n, big.NewInt(1)), nil
}

// EncodeCerts writes DER certificates as PEM.
func EncodeCerts(ders ...[]byte) []byte {
	var b bytes.Buffer
	for _, d := range ders {
		_ = pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: d})
	}
	return b.Bytes()
}

// DecodeCerts reads every certificate of a PEM file; at least one.
func DecodeCerts(b []byte) ([]*x509.Certificate, error) {
	var out []*x509.Certificate
	for {
		var blk *pem.Block
		blk, b = pem.Decode(b)
		if blk == nil {
			break
		}
		if blk.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(blk.Bytes)
		if err != nil {
			return nil, fmt.Errorf("%w: certificate: %w", atomicfile.ErrCorrupt, err)
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: no certificate in it", atomicfile.ErrCorrupt)
	}
	return out, nil
}

func encodeKey(k *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		return nil, fmt.Errorf("pki: encode key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func decodeKey(b []byte) (*ecdsa.PrivateKey, error) {
	blk, _ := pem.Decode(b)
	if blk == nil {
		return nil, fmt.Errorf("%w: no key in it", atomicfile.ErrCorrupt)
	}
	k, err := x509.ParsePKCS8PrivateKey(blk.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%w: key: %w", atomicfile.ErrCorrupt, err)
	}
	ek, ok := k.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%w: key is no ECDSA key", atomicfile.ErrCorrupt)
	}
	return ek, nil
}

// writeTwice writes a file that cannot be made again, and its copy.
func writeTwice(path string, b []byte) error {
	if err := atomicfile.WriteRaw(path, b, 0o600); err != nil {
		return err
	}
	return atomicfile.WriteRaw(path+".copy", b, 0o600)
}

// readTwice reads a file or its copy, whichever passes check, and repairs
// the other. fs.ErrNotExist only if both are missing.
func readTwice(path string, check func([]byte) error) ([]byte, error) {
	a, aerr := readChecked(path, check)
	b, berr := readChecked(path+".copy", check)
	switch {
	case aerr == nil && berr == nil:
		return a, nil
	case aerr == nil:
		_ = atomicfile.WriteRaw(path+".copy", a, 0o600) // a read-only folder is no reason not to start
		return a, nil
	case berr == nil:
		_ = atomicfile.WriteRaw(path, b, 0o600)
		return b, nil
	case errors.Is(aerr, fs.ErrNotExist):
		return nil, berr
	}
	return nil, aerr
}

func readChecked(path string, check func([]byte) error) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	if err := check(b); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return b, nil
}
