package store

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/fxamacker/cbor/v2"
)

// header is what is stored of an Assignment beside its objects.
type header struct {
	Epoch      uint64   `cbor:"1,keyasint"`
	Generation uint64   `cbor:"2,keyasint"`
	PodCIDRs   []string `cbor:"3,keyasint,omitempty"`
	Servers    []string `cbor:"4,keyasint,omitempty"`
	Keyring    [][]byte `cbor:"5,keyasint,omitempty"`
	Site       string   `cbor:"6,keyasint,omitempty"`
	Seeds      []string `cbor:"7,keyasint,omitempty"`
	// SealedGeneration is the generation of an assignment of which part is
	// sealed; Generation is 0 then.
	SealedGeneration uint64 `cbor:"8,keyasint,omitempty"`
	// Held is of Assignment.
	Held map[string]Hold `cbor:"9,keyasint,omitempty"`
}

func headerOf(a Assignment) header {
	return header{Epoch: a.Epoch, Generation: a.Generation, PodCIDRs: a.PodCIDRs, Servers: a.Servers, Keyring: a.Keyring, Site: a.Site, Seeds: a.Seeds, Held: a.Held}
}

func (h header) into(a *Assignment) {
	a.Epoch, a.Generation, a.PodCIDRs, a.Servers = h.Epoch, max(h.Generation, h.SealedGeneration), h.PodCIDRs, h.Servers
	a.Keyring, a.Site, a.Seeds, a.Known = h.Keyring, h.Site, h.Seeds, true
	a.Held = h.Held
}

const sumLen = 4

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encode is CBOR followed by a checksum over bucket, key and value, so that
// a record in the wrong place is noticed too.
func encode(bucket, key string, v any) ([]byte, error) {
	b, err := cbor.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode %s %q: %w", bucket, key, err)
	}
	return binary.BigEndian.AppendUint32(b, sum(bucket, key, b)), nil
}

func decode(bucket, key string, b []byte, v any) error {
	if len(b) < sumLen {
		return fmt.Errorf("%w: %s %q has %d bytes", ErrDamaged, bucket, key, len(b))
	}
	data := b[:len(b)-sumLen]
	if binary.BigEndian.Uint32(b[len(data):]) != sum(bucket, key, data) {
		return fmt.Errorf("%w: checksum of %s %q differs", ErrDamaged, bucket, key)
	}
	if err := cbor.Unmarshal(data, v); err != nil {
		return fmt.Errorf("%w: %s %q: %w", ErrDamaged, bucket, key, err)
	}
	return nil
}

func sum(bucket, key string, data []byte) uint32 {
	c := crc32.Update(0, castagnoli, []byte(bucket+"\x00"+key+"\x00"))
	return crc32.Update(c, castagnoli, data)
}
