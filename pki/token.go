package pki

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base32"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"strings"
)

// ErrBadToken says why a join line cannot be used.
var ErrBadToken = errors.New("join line")

const tokenPrefix = "dunlin1"

// JoinLine is what an operator carries to a new node, as one line:
//
//	dunlin1.ID.SECRET.PIN.CHECK@host:port[,host:port...]
//
// ID names the token, SECRET proves its possession (and never travels), PIN
// is the SHA-256 of the authority's key, CHECK finds a line cut short by
// copy and paste.
type JoinLine struct {
	ID      string
	Secret  string
	Pin     string
	Servers []string // host:port
}

var b32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// NewJoinLine makes a line with a fresh id and a secret of 160 bits.
func NewJoinLine(pin string, servers []string) (JoinLine, error) {
	var b [25]byte
	if _, err := rand.Read(b[:]); err != nil {
		return JoinLine{}, fmt.Errorf("pki: random: %w", err)
	}
	return JoinLine{ID: b32.EncodeToString(b[:5]), Secret: b32.EncodeToString(b[5:]), Pin: pin, Servers: servers}, nil
}

func (j JoinLine) head() string {
	return tokenPrefix + "." + j.ID + "." + j.Secret + "." + j.Pin
}

// String formats the line. It holds the secret: print it, do not log it.
func (j JoinLine) String() string {
	head := j.head()
	return head + "." + checksum(head) + "@" + strings.Join(j.Servers, ",")
}

func checksum(head string) string {
	sum := crc32.ChecksumIEEE([]byte(head))
	return b32.EncodeToString([]byte{byte(sum >> 24), byte(sum >> 16), byte(sum >> 8)})
}

// ParseJoinLine reads a line, forgiving white space around it and a missing
// port (6443).
func ParseJoinLine(s string) (JoinLine, error) {
	s = strings.TrimSpace(s)
	head, addrs, found := strings.Cut(s, "@")
	parts := strings.Split(head, ".")
	switch {
	case !strings.HasPrefix(s, "dunlin"):
		return JoinLine{}, fmt.Errorf("%w: it must start with %q; get one with: dunlin token create", ErrBadToken, tokenPrefix+".")
	case parts[0] != tokenPrefix:
		return JoinLine{}, fmt.Errorf("%w: format %q is newer than this dunlin; upgrade it", ErrBadToken, parts[0])
	case len(parts) != 5 || !found || addrs == "":
		return JoinLine{}, fmt.Errorf("%w: it is incomplete; copy the whole line", ErrBadToken)
	}
	j := JoinLine{ID: parts[1], Secret: parts[2], Pin: parts[3]}
	if checksum(j.head()) != parts[4] || j.ID == "" || j.Secret == "" {
		return JoinLine{}, fmt.Errorf("%w: its checksum differs; copy it again", ErrBadToken)
	}
	for _, a := range strings.Split(addrs, ",") {
		hp, err := WithPort(a)
		if err != nil {
			return JoinLine{}, fmt.Errorf("%w: server address %q: %w", ErrBadToken, a, err)
		}
		j.Servers = append(j.Servers, hp)
	}
	return j, nil
}

// WithPort completes "host", "host:port", "[v6]:port", "v6" or an https URL
// to host:port, with 6443 where no port is given. A link-local address has the
// zone of this machine by which it is reached: "fe80::1%eth0".
func WithPort(a string) (string, error) {
	a = strings.TrimSpace(a)
	if url, ok := strings.CutPrefix(a, "https://"); ok {
		a, _, _ = strings.Cut(url, "/")
		a = strings.Replace(a, "%25", "%", 1) // a URL's form of a zone (RFC 6874)
	}
	if a == "" {
		return "", errors.New("empty")
	}
	bare := a
	if strings.HasPrefix(a, "[") && strings.HasSuffix(a, "]") {
		bare = a[1 : len(a)-1]
	}
	if ip, err := netip.ParseAddr(bare); err == nil {
		return net.JoinHostPort(ip.Unmap().String(), "6443"), nil
	}
	host, port, err := net.SplitHostPort(a)
	if err != nil {
		if strings.Contains(a, ":") {
			return "", fmt.Errorf("not host:port: %w", err)
		}
		host, port = a, "6443"
	}
	if strings.Trim(host, "[]") == "" || port == "" {
		return "", errors.New("not host:port")
	}
	return net.JoinHostPort(host, port), nil
}

// TokenKey is what a server keeps of a token: a key derived from the secret,
// from which the secret cannot be found.
func TokenKey(secret string) []byte {
	m := hmac.New(sha256.New, []byte("dunlin join token v1"))
	m.Write([]byte(secret))
	return m.Sum(nil)
}

const (
	joinExporter  = "EXPORTER-dunlin-join-v1"
	leaseExporter = "EXPORTER-dunlin-lease-mac-v1"
)

// JoinProof is the HMAC of the connection's exporter and the CSR: it proves
// the possession of the token's secret, on this TLS connection, for this
// key.
func JoinProof(key []byte, cs tls.ConnectionState, csr []byte) ([]byte, error) {
	ekm, err := cs.ExportKeyingMaterial(joinExporter, nil, 32)
	if err != nil {
		return nil, fmt.Errorf("pki: join proof: %w", err)
	}
	m := hmac.New(sha256.New, key)
	m.Write(ekm)
	m.Write(csr)
	return m.Sum(nil), nil
}

// CheckJoinProof compares in constant time.
func CheckJoinProof(key []byte, cs tls.ConnectionState, csr, proof []byte) error {
	want, err := JoinProof(key, cs, csr)
	if err != nil {
		return err
	}
	if !hmac.Equal(want, proof) {
		return fmt.Errorf("%w: wrong secret", ErrBadToken)
	}
	return nil
}

// LeaseKey is the key that authenticates one session's leases over UDP.
func LeaseKey(cs tls.ConnectionState) ([]byte, error) {
	k, err := cs.ExportKeyingMaterial(leaseExporter, nil, 32)
	if err != nil {
		return nil, fmt.Errorf("pki: lease key: %w", err)
	}
	return k, nil
}
