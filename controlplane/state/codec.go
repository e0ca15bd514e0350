package state

import (
	"errors"
	"fmt"

	"github.com/fxamacker/cbor/v2"

	"github.com/dunlin-project/dunlin/internal/feature"
)

// EntryVersion is the newest layout of a Raft entry this binary writes.
const EntryVersion = 1

// MaxEntryBytes bounds one encoded entry, and with it one object.
const MaxEntryBytes = 16 << 20

// ErrMalformed says that bytes are not an entry or a record at all.
var ErrMalformed = errors.New("state: malformed encoding")

// ErrTooLarge says that an op is larger than an entry may be.
var ErrTooLarge = errors.New("state: object too large")

// ErrNewerFormat says that bytes were written by a newer version.
var ErrNewerFormat = errors.New("state: written by a newer version; upgrade this server")

// entry is the payload of one Raft log entry.
type entry struct {
	Version uint8 `cbor:"1,keyasint"`
	Ops     []Op  `cbor:"2,keyasint"`
}

type codecModes struct {
	enc     cbor.EncMode
	dec     cbor.DecMode // unknown fields are errors
	version cbor.DecMode // unknown fields are ignored, to read a version
}

// codec is core deterministic encoding (RFC 8949, 4.2.1): equal values are
// equal bytes on every architecture. The modes are immutable.
var codec = func() codecModes {
	enc, err := cbor.CoreDetEncOptions().EncMode()
	if err != nil {
		panic(err) // constant options
	}
	o := cbor.DecOptions{
		DupMapKey:         cbor.DupMapKeyEnforcedAPF,
		IndefLength:       cbor.IndefLengthForbidden,
		TagsMd:            cbor.TagsForbidden,
		UTF8:              cbor.UTF8RejectInvalid,
		MaxNestedLevels:   16,
		MaxArrayElements:  1 << 20,
		MaxMapPairs:       1 << 16,
		ExtraReturnErrors: cbor.ExtraDecErrorUnknownField,
	}
	dec, err := o.DecMode()
	if err != nil {
		panic(err)
	}
	o.ExtraReturnErrors = cbor.ExtraDecErrorNone
	version, err := o.DecMode()
	if err != nil {
		panic(err)
	}
	return codecModes{enc: enc, dec: dec, version: version}
}()

// EncodeEntry encodes ops as the payload of one Raft entry.
func EncodeEntry(ops []Op) ([]byte, error) {
	b, err := codec.enc.Marshal(entry{Version: EntryVersion, Ops: ops})
	if err != nil {
		return nil, fmt.Errorf("encode entry: %w", err)
	}
	return b, nil
}

// EncodeOp encodes one op, for JoinEntry. It refuses an op that no entry
// could carry.
func EncodeOp(o *Op) ([]byte, error) {
	b, err := codec.enc.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("encode op: %w", err)
	}
	if len(b) > MaxEntryBytes-entryOverhead {
		return nil, fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(b), MaxEntryBytes-entryOverhead)
	}
	return b, nil
}

// entryOverhead is more than an entry adds to its ops.
const entryOverhead = 64

// JoinEntry makes one entry of ops that EncodeOp encoded: the same bytes as
// EncodeEntry of the ops.
func JoinEntry(ops [][]byte) ([]byte, error) {
	raw := make([]cbor.RawMessage, len(ops))
	for i := range ops {
		raw[i] = ops[i]
	}
	b, err := codec.enc.Marshal(struct {
		Version uint8             `cbor:"1,keyasint"`
		Ops     []cbor.RawMessage `cbor:"2,keyasint"`
	}{EntryVersion, raw})
	if err != nil {
		return nil, fmt.Errorf("encode entry: %w", err)
	}
	return b, nil
}

// DecodeEntry decodes what EncodeEntry made. ErrUnknownOp when it holds what
// this binary does not know, ErrMalformed when it is no entry at all.
func DecodeEntry(b []byte) ([]Op, error) {
	if len(b) > MaxEntryBytes {
		return nil, fmt.Errorf("%w: entry of %d bytes", ErrMalformed, len(b))
	}
	var v struct {
		Version uint8 `cbor:"1,keyasint"`
	}
	if err := codec.version.Unmarshal(b, &v); err != nil {
		return nil, fmt.Errorf("%w: entry: %w", ErrMalformed, err)
	}
	if v.Version > EntryVersion {
		return nil, fmt.Errorf("%w (entry format %d, known %d)", ErrUnknownOp, v.Version, EntryVersion)
	}
	if v.Version == 0 {
		return nil, fmt.Errorf("%w: entry without a version", ErrMalformed)
	}
	var e entry
	if err := codec.dec.Unmarshal(b, &e); err != nil {
		var unknown *cbor.UnknownFieldError
		if errors.As(err, &unknown) {
			return nil, fmt.Errorf("%w: %w", ErrUnknownOp, err)
		}
		return nil, fmt.Errorf("%w: entry: %w", ErrMalformed, err)
	}
	for i := range e.Ops {
		if err := known(&e.Ops[i]); err != nil {
			return nil, err
		}
	}
	return e.Ops, nil
}

func known(o *Op) error {
	if o.Type == 0 {
		return fmt.Errorf("%w: op without a type", ErrMalformed)
	}
	if o.Type > opLast {
		return fmt.Errorf("%w (type %d)", ErrUnknownOp, o.Type)
	}
	if l := o.Level(); l > feature.Level {
		return fmt.Errorf("%w: %w", ErrUnknownOp, feature.Behind(l))
	}
	if o.Record == nil {
		return nil
	}
	return knownRecord(o.Record)
}

func knownRecord(r *Record) error {
	if r.Header.Version > HeaderVersion {
		return fmt.Errorf("%w (header version %d, known %d)", ErrUnknownOp, r.Header.Version, HeaderVersion)
	}
	return nil
}

// EncodeRecord encodes one record as it stands in a snapshot.
func EncodeRecord(r *Record) ([]byte, error) {
	b, err := codec.enc.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode record %v: %w", r.Header.Key, err)
	}
	return b, nil
}

// DecodeRecord decodes what EncodeRecord made: ErrNewerFormat or ErrMalformed.
func DecodeRecord(b []byte) (*Record, error) {
	r := new(Record)
	if err := codec.dec.Unmarshal(b, r); err != nil {
		var unknown *cbor.UnknownFieldError
		if errors.As(err, &unknown) {
			return nil, fmt.Errorf("%w: %w", ErrNewerFormat, err)
		}
		return nil, fmt.Errorf("%w: record: %w", ErrMalformed, err)
	}
	if r.Header.Version > HeaderVersion {
		return nil, fmt.Errorf("%w (header version %d, known %d)", ErrNewerFormat, r.Header.Version, HeaderVersion)
	}
	if r.Header.Key.Kind == "" || r.Header.Key.Name == "" || r.Header.UID == "" {
		return nil, fmt.Errorf("%w: record without kind, name or uid", ErrMalformed)
	}
	return r, nil
}

// wireResult is a Result as it travels between servers.
type wireResult struct {
	Reason          Reason  `cbor:"1,keyasint,omitempty"`
	Detail          string  `cbor:"2,keyasint,omitempty"`
	ResourceVersion uint64  `cbor:"3,keyasint,omitempty"`
	Record          *Record `cbor:"4,keyasint,omitempty"`
}

// EncodeResults encodes results for another server.
func EncodeResults(list []Result) ([]byte, error) {
	out := make([]wireResult, len(list))
	for i, r := range list {
		out[i] = wireResult(r)
	}
	b, err := codec.enc.Marshal(out)
	if err != nil {
		return nil, fmt.Errorf("encode results: %w", err)
	}
	return b, nil
}

// DecodeResults decodes what EncodeResults made.
func DecodeResults(b []byte) ([]Result, error) {
	var in []wireResult
	if err := codec.dec.Unmarshal(b, &in); err != nil {
		return nil, fmt.Errorf("%w: results: %w", ErrMalformed, err)
	}
	out := make([]Result, len(in))
	for i, r := range in {
		out[i] = Result(r)
		if r.Record == nil {
			continue
		}
		if err := knownRecord(r.Record); err != nil {
			return nil, err
		}
		internHeader(&out[i].Record.Header)
	}
	return out, nil
}
