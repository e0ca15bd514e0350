package store

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/fxamacker/cbor/v2"
	"go.etcd.io/bbolt"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/wire"
)

// Secrets, tokens (which travel as Secrets) and the site's gossip keys are not
// in the objects' bucket but in one of their own, encrypted. A program that
// does not know the bucket finds generation 0 in the header, and so asks for
// all that it misses.
const (
	bucketSealed = "sealed"
	keyKeyring   = "keyring"
	keyObject    = "o/" // and the uid
	secretKind   = "Secret"
)

// Seal encrypts what must not be readable on a stolen disk. nil keeps all in
// clear.
type Seal struct{ aead cipher.AEAD }

const sealKeySize = 32

// LoadSeal reads the node's sealing key from dir, where it is kept twice, or
// makes it, and mixes it with what only this machine says of itself: on
// another board nothing opens. Without such facts ("") whoever has the disk
// has the key.
func LoadSeal(dir, facts string) (*Seal, error) {
	var key []byte
	copies, good := []string{filepath.Join(dir, "seal-key"), filepath.Join(dir, "seal-key.copy")}, 0
	for _, p := range copies {
		switch b, err := atomicfile.Read(p); {
		case err == nil && len(b) == sealKeySize:
			if key == nil {
				key = b
			}
			good++
		case err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, atomicfile.ErrCorrupt):
			return nil, fmt.Errorf("read the node's sealing key: %w", err)
		}
	}
	if key == nil {
		key = make([]byte, sealKeySize)
		if _, err := rand.Read(key); err != nil {
			return nil, fmt.Errorf("random: %w", err)
		}
	}
	for i := 0; good < len(copies) && i < len(copies); i++ {
		// The key that is used is durable before anything is sealed with it; a
		// second copy can wait for room on the disk.
		if err := atomicfile.Write(copies[i], key, 0o600); err != nil && (good == 0 || !full(err)) {
			return nil, fmt.Errorf("keep the node's sealing key: %w", err)
		}
	}
	return NewSeal(key, facts)
}

// NewSeal makes one of a key and the machine's facts.
func NewSeal(key []byte, facts string) (*Seal, error) {
	m := hmac.New(sha256.New, key)
	_, _ = m.Write([]byte("dunlin node seal\x00" + facts))
	block, err := aes.NewCipher(m.Sum(nil))
	if err != nil {
		return nil, fmt.Errorf("node seal: %w", err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, fmt.Errorf("node seal: %w", err)
	}
	return &Seal{aead}, nil
}

// box is a sealed record: what it is stands in clear, what it says does not.
type box struct {
	Ref             wire.Ref `cbor:"1,keyasint"`
	UID             string   `cbor:"2,keyasint,omitempty"`
	ResourceVersion uint64   `cbor:"3,keyasint,omitempty"`
	Data            []byte   `cbor:"4,keyasint"`
}

// bound is what the content belongs to: it opens nowhere else.
func (b *box) bound() []byte {
	return fmt.Appendf(nil, "%s\x00%s\x00%s\x00%s\x00%d", b.Ref.Kind, b.Ref.Namespace, b.Ref.Name, b.UID, b.ResourceVersion)
}

func (s *Seal) close(b *box, plain []byte) error {
	nonce := make([]byte, s.aead.NonceSize())
	if _, err := rand.Read(nonce); err != nil {
		return fmt.Errorf("random: %w", err)
	}
	b.Data = s.aead.Seal(nonce, nonce, plain, b.bound())
	return nil
}

// open is false for what was sealed with another key.
func (s *Seal) open(b *box) ([]byte, bool) {
	n := s.aead.NonceSize()
	if len(b.Data) < n {
		return nil, false
	}
	plain, err := s.aead.Open(nil, b.Data[:n], b.Data[n:], b.bound())
	return plain, err == nil
}

// secret says whether an object is sealed.
func (b *Bolt) secret(o *wire.Object) bool { return b.seal != nil && o.Ref.Kind == secretKind }

// putObject writes an object where it belongs.
func (b *Bolt) putObject(tx *bbolt.Tx, o wire.Object) error {
	if !b.secret(&o) {
		return put(tx, bucketObjects, o.UID, o)
	}
	x := box{Ref: o.Ref, UID: o.UID, ResourceVersion: o.ResourceVersion}
	if err := b.seal.close(&x, o.Data); err != nil {
		return err
	}
	return put(tx, bucketSealed, keyObject+o.UID, x)
}

func deleteObject(tx *bbolt.Tx, uid string) error {
	if sealed := tx.Bucket([]byte(bucketSealed)); sealed != nil {
		if err := sealed.Delete([]byte(keyObject + uid)); err != nil {
			return err
		}
	}
	return tx.Bucket([]byte(bucketObjects)).Delete([]byte(uid))
}

// putHeader writes what there is beside the objects.
func (b *Bolt) putHeader(tx *bbolt.Tx, a Assignment) error {
	h := headerOf(a)
	if b.seal == nil {
		return put(tx, bucketAssignment, keyHeader, h)
	}
	h.Generation, h.SealedGeneration, h.Keyring = 0, a.Generation, nil
	if err := put(tx, bucketAssignment, keyHeader, h); err != nil {
		return err
	}
	plain, err := cbor.Marshal(a.Keyring)
	if err != nil {
		return fmt.Errorf("encode the keyring: %w", err)
	}
	x := box{Ref: wire.Ref{Kind: keyKeyring}}
	if err := b.seal.close(&x, plain); err != nil {
		return err
	}
	return put(tx, bucketSealed, keyKeyring, x)
}

// readSealed adds what is sealed. What does not open is named, and the
// generation becomes 0, so that it is fetched again.
func (b *Bolt) readSealed(tx *bbolt.Tx, a *Assignment) error {
	if b.seal == nil || tx.Bucket([]byte(bucketSealed)) == nil {
		return nil
	}
	return each(tx, bucketSealed, func(x box) {
		plain, ok := b.seal.open(&x)
		switch {
		case x.UID != "" && ok:
			a.Objects[x.UID] = wire.Object{Ref: x.Ref, UID: x.UID, ResourceVersion: x.ResourceVersion, Data: plain}
		case ok && cbor.Unmarshal(plain, &a.Keyring) == nil:
		default:
			a.Lost = append(a.Lost, x.Ref)
			a.Generation = 0
		}
	})
}

// sealedShut are the objects that do not open and that the node shall not hold
// any more.
func (b *Bolt) sealedShut(tx *bbolt.Tx, a Assignment) (uids []string) {
	if b.seal == nil {
		return nil
	}
	_ = each(tx, bucketSealed, func(x box) { // was read a moment ago
		if _, ok := a.Objects[x.UID]; x.UID != "" && !ok {
			uids = append(uids, x.UID)
		}
	})
	return uids
}

// sealOld seals what a program before this one stored in clear, and says
// whether there was any.
func (b *Bolt) sealOld() (found bool, err error) {
	if b.seal == nil {
		return false, nil
	}
	var a Assignment
	var clear []wire.Object
	if err := b.db.View(func(tx *bbolt.Tx) error {
		if err := b.readAssignment(tx, &a); err != nil {
			return err
		}
		return each(tx, bucketAssignment, func(h header) { found = found || len(h.Keyring) > 0 })
	}); err != nil {
		return false, err
	}
	if err := b.db.View(func(tx *bbolt.Tx) error {
		return each(tx, bucketObjects, func(o wire.Object) {
			if b.secret(&o) {
				clear = append(clear, o)
			}
		})
	}); err != nil || (len(clear) == 0 && !found) {
		return false, err
	}
	return true, b.update(func(tx *bbolt.Tx) error {
		for _, o := range clear {
			if err := deleteObject(tx, o.UID); err != nil {
				return err
			}
			if err := b.putObject(tx, o); err != nil {
				return err
			}
		}
		return b.putHeader(tx, a)
	})
}

// rewrite copies the database into a new file: pages that are free hold what
// was in them.
func (b *Bolt) rewrite(path string) error {
	tmp := path + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("rewrite node database: %w", err)
	}
	dst, err := bbolt.Open(tmp, 0o600, nil)
	if err != nil {
		return fmt.Errorf("rewrite node database: %w", err)
	}
	err = errors.Join(bbolt.Compact(dst, b.db, 0), dst.Close())
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err == nil {
		err = atomicfile.SyncDir(filepath.Dir(path))
	}
	if err != nil {
		_ = os.Remove(tmp)
		return fmt.Errorf("rewrite node database: %w", err)
	}
	return nil
}
