package gossip

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/fxamacker/cbor/v2"
)

// NodeID is the id of a key: the first half of the SHA-256 of its SPKI, in
// hex. It is the node's uid everywhere, so the metadata proves itself and
// nobody has to look up a key.
func NodeID(pub *ecdsa.PublicKey) (string, error) {
	spki, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return "", fmt.Errorf("gossip: public key: %w", err)
	}
	return idOf(spki), nil
}

func idOf(spki []byte) string {
	sum := sha256.Sum256(spki)
	return hex.EncodeToString(sum[:16])
}

// metadata is what a member says of itself.
type metadata struct {
	SPKI      []byte `cbor:"1,keyasint"`
	Signature []byte `cbor:"2,keyasint"` // ASN.1, over signed()
}

// signed is what the key signs: pool, name and address, so that neither can
// be taken over by another member that holds the keyring.
func signed(label, name, addr string) []byte {
	sum := sha256.Sum256([]byte("dunlin gossip v1\x00" + label + "\x00" + name + "\x00" + addr))
	return sum[:]
}

// identity is this node's own metadata, encoded.
type identity struct{ encoded []byte }

func newIdentity(key *ecdsa.PrivateKey, label, name string, ip net.IP, port uint16) (*identity, error) {
	spki, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return nil, fmt.Errorf("gossip: public key: %w", err)
	}
	sig, err := ecdsa.SignASN1(rand.Reader, key, signed(label, name, nodeAddr(ip, port)))
	if err != nil {
		return nil, fmt.Errorf("gossip: sign: %w", err)
	}
	b, err := cbor.Marshal(metadata{SPKI: spki, Signature: sig})
	if err != nil {
		return nil, fmt.Errorf("gossip: metadata: %w", err)
	}
	return &identity{encoded: b}, nil
}

// errForged says that a member is not who it says.
var errForged = errors.New("gossip: member's metadata is not signed by the key that its name stands for")

// splitName takes "id.boot" apart.
func splitName(name string) (id string, boot uint64, ok bool) {
	id, b, found := strings.Cut(name, ".")
	boot, err := strconv.ParseUint(b, 10, 64)
	return id, boot, found && err == nil && len(id) == 32
}

// checked remembers good signatures: the same metadata comes again with
// every state exchange.
type checked struct {
	mu   sync.Mutex
	good map[[32]byte]struct{}
}

const maxChecked = 8192

func (c *checked) verify(label, name, addr string, meta []byte) error {
	key := sha256.Sum256([]byte(name + "\x00" + addr + "\x00" + string(meta)))
	c.mu.Lock()
	_, ok := c.good[key]
	c.mu.Unlock()
	if ok {
		return nil
	}
	if err := verifyMeta(label, name, addr, meta); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.good == nil || len(c.good) >= maxChecked {
		c.good = map[[32]byte]struct{}{}
	}
	c.good[key] = struct{}{}
	return nil
}

func verifyMeta(label, name, addr string, meta []byte) error {
	id, _, ok := splitName(name)
	if !ok {
		return fmt.Errorf("%w: name %q", errForged, name)
	}
	var m metadata
	if err := cbor.Unmarshal(meta, &m); err != nil {
		return fmt.Errorf("%w: %w", errForged, err)
	}
	if idOf(m.SPKI) != id {
		return errForged
	}
	k, err := x509.ParsePKIXPublicKey(m.SPKI)
	if err != nil {
		return fmt.Errorf("%w: %w", errForged, err)
	}
	pub, ok := k.(*ecdsa.PublicKey)
	if !ok || !ecdsa.VerifyASN1(pub, signed(label, name, addr), m.Signature) {
		return errForged
	}
	return nil
}
