package registry

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// SealKeySize is the size of a sealing key, bytes.
const SealKeySize = 32

const keyIDSize = 4

var errNoSealer = errors.New("the object is sealed and this server has no key: copy the seal key from another server, or restore it from the backup that belongs to this state")

// Sealer encrypts bodies with AES-256-GCM. The nonce is derived from key,
// object and content (as in RFC 8452), so that the same content of the same
// object gives the same bytes: an update that changes nothing is seen as
// such, and all that equal bytes tell is that an object was not changed.
// The key never passes through Raft. Safe for concurrent use.
type Sealer struct {
	keys []sealKey // the first one seals, all open
}

type sealKey struct {
	id    [keyIDSize]byte
	aead  cipher.AEAD
	nonce []byte // key of the nonce derivation
}

// NewSealer takes keys of SealKeySize random bytes, the newest first; older
// ones only open what they once sealed.
func NewSealer(keys ...[]byte) (*Sealer, error) {
	if len(keys) == 0 {
		return nil, errors.New("registry: a sealer needs a key")
	}
	s := &Sealer{}
	for _, k := range keys {
		if len(k) != SealKeySize {
			return nil, fmt.Errorf("registry: a seal key has %d bytes, not %d", SealKeySize, len(k))
		}
		block, err := aes.NewCipher(derive(k, "body"))
		if err != nil {
			return nil, fmt.Errorf("registry: seal key: %w", err)
		}
		aead, err := cipher.NewGCM(block)
		if err != nil {
			return nil, fmt.Errorf("registry: seal key: %w", err)
		}
		s.keys = append(s.keys, sealKey{id: [keyIDSize]byte(derive(k, "id")), aead: aead, nonce: derive(k, "nonce")})
	}
	return s, nil
}

func derive(key []byte, use string) []byte {
	m := hmac.New(sha256.New, key)
	m.Write([]byte("dunlin seal " + use))
	return m.Sum(nil)
}

// bound is what a sealed body belongs to: it opens nowhere else.
func bound(rec *state.Record, part string) []byte {
	return []byte(rec.Header.Key.Kind + "\x00" + rec.Header.UID + "\x00" + part)
}

func (s *Sealer) seal(rec *state.Record, part string, b *state.Body) *state.Body {
	if b == nil {
		return nil
	}
	k, ad := &s.keys[0], bound(rec, part)
	m := hmac.New(sha256.New, k.nonce)
	m.Write(ad)
	m.Write([]byte{0})
	m.Write(b.Data)
	nonce := m.Sum(nil)[:k.aead.NonceSize()]
	out := append(append([]byte{}, k.id[:]...), nonce...)
	return &state.Body{Codec: state.CodecSealed, Data: k.aead.Seal(out, nonce, b.Data, ad)}
}

func (s *Sealer) open(rec *state.Record, part string, b *state.Body) (*state.Body, error) {
	if b == nil || b.Codec != state.CodecSealed {
		return b, nil
	}
	for i := range s.keys {
		k := &s.keys[i]
		if len(b.Data) < keyIDSize+k.aead.NonceSize() || [keyIDSize]byte(b.Data) != k.id {
			continue
		}
		rest := b.Data[keyIDSize:]
		plain, err := k.aead.Open(nil, rest[:k.aead.NonceSize()], rest[k.aead.NonceSize():], bound(rec, part))
		if err != nil {
			return nil, fmt.Errorf("the sealed %s does not open: damaged, or not of this object: %w", part, err)
		}
		return &state.Body{Codec: state.CodecKubeCBOR, Data: plain}, nil
	}
	return nil, errNoSealer
}
