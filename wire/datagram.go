package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// Kinds of gossip messages that carry parts of the node protocol.
const (
	GossipLease    byte = 1 // node to server: LeaseDatagram
	GossipLeaseAck byte = 2 // server to node: LeaseDatagram
	GossipNudge    byte = 3 // server to node: Nudge, as CBOR
)

// AnnotationGossip is where a Node says at which address ("host:port") its
// gossip listens, when the port is not the usual one.
const AnnotationGossip = "dunlin.dev/gossip-address"

// LeaseDatagram is a lease renewal, or its acknowledgement, over UDP. It is
// used only inside the servers' own site, and proves itself by a MAC with a
// key from the node's TLS session: whoever holds the site's gossip keys can
// neither renew for another node nor acknowledge for a leader.
//
//	"DL" 1 direction(1) uid(16) boot(8) counter(8) term(8) generation(8) MAC(16)
type LeaseDatagram struct {
	Ack        bool
	UID        string // 32 hex digits
	Boot       string // only its hash travels
	Counter    uint64
	Term       uint64 // acknowledgements
	Generation uint64 // of the assignment: the one held; in acknowledgements the newest
}

// LeaseDatagramSize is the length of every LeaseDatagram.
const LeaseDatagramSize = 4 + 16 + 8 + 8 + 8 + 8 + macSize

const macSize = 16

// Seal encodes and authenticates with the session's key.
func (d LeaseDatagram) Seal(key []byte) ([]byte, error) {
	uid, err := hex.DecodeString(d.UID)
	if err != nil || len(uid) != 16 {
		return nil, fmt.Errorf("wire: lease datagram: uid %q is not 32 hex digits", d.UID)
	}
	b := make([]byte, 0, LeaseDatagramSize)
	b = append(b, 'D', 'L', 1, direction(d.Ack))
	b = append(b, uid...)
	boot := bootHash(d.Boot)
	b = append(b, boot[:]...)
	b = binary.BigEndian.AppendUint64(b, d.Counter)
	b = binary.BigEndian.AppendUint64(b, d.Term)
	b = binary.BigEndian.AppendUint64(b, d.Generation)
	return append(b, mac(key, b)...), nil
}

func direction(ack bool) byte {
	if ack {
		return 1
	}
	return 0
}

func bootHash(boot string) (out [8]byte) {
	sum := sha256.Sum256([]byte(boot))
	copy(out[:], sum[:])
	return out
}

func mac(key, b []byte) []byte {
	m := hmac.New(sha256.New, key)
	m.Write(b)
	return m.Sum(nil)[:macSize]
}

// LeaseDatagramUID reads whose datagram it says it is, before its key is
// known.
func LeaseDatagramUID(b []byte) (uid string, ack, ok bool) {
	if len(b) != LeaseDatagramSize || b[0] != 'D' || b[1] != 'L' || b[2] != 1 || b[3] > 1 {
		return "", false, false
	}
	return hex.EncodeToString(b[4:20]), b[3] == 1, true
}

// OpenLeaseDatagram checks the MAC and the boot id and decodes.
func OpenLeaseDatagram(key, b []byte, boot string) (LeaseDatagram, error) {
	uid, ack, ok := LeaseDatagramUID(b)
	if !ok {
		return LeaseDatagram{}, fmt.Errorf("%w: lease datagram", ErrMalformed)
	}
	body := b[:LeaseDatagramSize-macSize]
	if !hmac.Equal(mac(key, body), b[LeaseDatagramSize-macSize:]) {
		return LeaseDatagram{}, fmt.Errorf("%w: lease datagram: wrong MAC", ErrMalformed)
	}
	if want := bootHash(boot); string(b[20:28]) != string(want[:]) {
		return LeaseDatagram{}, fmt.Errorf("%w: lease datagram: of another boot", ErrMalformed)
	}
	return LeaseDatagram{
		Ack: ack, UID: uid, Boot: boot,
		Counter:    binary.BigEndian.Uint64(b[28:36]),
		Term:       binary.BigEndian.Uint64(b[36:44]),
		Generation: binary.BigEndian.Uint64(b[44:52]),
	}, nil
}
