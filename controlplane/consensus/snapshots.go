package consensus

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/fxamacker/cbor/v2"
	"github.com/hashicorp/raft"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/feature"
)

// keepSnapshots is how many snapshots stay: the newest, and one to fall back
// to, which the log still reaches.
const keepSnapshots = 2

// snapshotMeta is the side file of a snapshot. It is written last: a snapshot
// without one does not exist. Its checksum is verified before the snapshot
// file is opened, since bbolt may crash the process on a damaged file.
type snapshotMeta struct {
	Format      uint32            `cbor:"1,keyasint"`
	Index       uint64            `cbor:"2,keyasint"`
	Term        uint64            `cbor:"3,keyasint"`
	Config      []byte            `cbor:"4,keyasint"`
	ConfigIndex uint64            `cbor:"5,keyasint"`
	Size        int64             `cbor:"6,keyasint"`
	Sum         [sha256.Size]byte `cbor:"7,keyasint"`
	// Feature is the cluster's feature level; 0 where an older build wrote it.
	Feature uint32 `cbor:"8,keyasint,omitempty"`
}

func (m *snapshotMeta) id() string { return fmt.Sprintf("%020d-%d", m.Index, m.Term) }

// snapshotStore keeps snapshots as bbolt files in one folder.
type snapshotStore struct {
	disk *Disk
	dir  string
	log  *slog.Logger

	mu   sync.Mutex
	list []*snapshotMeta // newest first
}

var _ raft.SnapshotStore = (*snapshotStore)(nil)

func (s *snapshotStore) file(id, ext string) string { return filepath.Join(s.dir, id+ext) }

// open lists the snapshots, moves damaged ones aside until the newest is a
// good one, and removes what a crash left half-written.
func (s *snapshotStore) open() error {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return fmt.Errorf("make snapshot folder: %w", err)
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return fmt.Errorf("list snapshots: %w", err)
	}
	for _, e := range entries {
		name := e.Name()
		id, isMeta := strings.CutSuffix(name, ".meta")
		switch {
		case isMeta:
			m, err := s.readMeta(id)
			if errors.Is(err, ErrNewerVersion) {
				return err
			}
			if err != nil {
				if err := s.quarantine(id, err); err != nil {
					return err
				}
				continue
			}
			s.list = append(s.list, m)
		case strings.HasSuffix(name, ".db"):
			if _, err := os.Stat(s.file(strings.TrimSuffix(name, ".db"), ".meta")); errors.Is(err, fs.ErrNotExist) {
				_ = os.Remove(filepath.Join(s.dir, name))
			}
		case strings.HasSuffix(name, ".tmp"), strings.HasSuffix(name, ".lock"):
			_ = os.Remove(filepath.Join(s.dir, name))
		}
	}
	slices.SortFunc(s.list, func(a, b *snapshotMeta) int {
		return -strings.Compare(a.id(), b.id())
	})
	for len(s.list) > 0 {
		m := s.list[0]
		err := s.check(m)
		if err == nil {
			return nil
		}
		if errors.Is(err, ErrNewerVersion) || errors.Is(err, fs.ErrPermission) {
			return err
		}
		if err := s.quarantine(m.id(), err); err != nil {
			return err
		}
		s.list = s.list[1:]
	}
	return nil
}

func (s *snapshotStore) readMeta(id string) (*snapshotMeta, error) {
	b, err := os.ReadFile(s.file(id, ".meta"))
	if err != nil {
		return nil, fmt.Errorf("read snapshot: %w", err)
	}
	_, payload, err := unframe(b)
	if err != nil {
		return nil, fmt.Errorf("snapshot %s: %w", id, err)
	}
	m := new(snapshotMeta)
	if err := cbor.Unmarshal(payload, m); err != nil {
		return nil, fmt.Errorf("snapshot %s: %w: %w", id, ErrDamaged, err)
	}
	if m.Format > state.ImageFormat {
		return nil, fmt.Errorf("snapshot %s: %w (format %d, known %d); or restore a backup", id, ErrNewerVersion, m.Format, state.ImageFormat)
	}
	if m.Feature > feature.Level {
		return nil, fmt.Errorf("snapshot %s: %w: the cluster's feature level is %d and this build understands %d", id, ErrNewerVersion, m.Feature, feature.Level)
	}
	if m.id() != id {
		return nil, fmt.Errorf("snapshot %s: %w: is %s", id, ErrDamaged, m.id())
	}
	return m, nil
}

// check compares a snapshot file with its checksum.
func (s *snapshotStore) check(m *snapshotMeta) error {
	sum, size, err := sumFile(s.file(m.id(), ".db"))
	if err != nil {
		return fmt.Errorf("snapshot %s: %w", m.id(), err)
	}
	if size != m.Size || sum != m.Sum {
		return fmt.Errorf("snapshot %s: %w: checksum differs", m.id(), ErrDamaged)
	}
	return nil
}

func sumFile(path string) (sum [sha256.Size]byte, size int64, err error) {
	f, err := os.Open(path)
	if err != nil {
		return sum, 0, err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	size, err = io.Copy(h, f)
	return [sha256.Size]byte(h.Sum(nil)), size, err
}

func (s *snapshotStore) quarantine(id string, cause error) error {
	s.log.Warn("snapshot damaged, moved aside; using the one before and the log", "snapshot", s.file(id, ".db"), "err", cause)
	return errors.Join(moveAside(s.disk, s.file(id, ".meta")), moveAside(s.disk, s.file(id, ".db")))
}

// kept returns the index that the log must reach back to (0: its start), and
// that of the newest snapshot.
func (s *snapshotStore) kept() (oldest, newest uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.list) > 0 {
		newest = s.list[0].Index
	}
	if len(s.list) >= keepSnapshots {
		oldest = s.list[keepSnapshots-1].Index
	}
	return oldest, newest
}

// List implements raft.SnapshotStore.
func (s *snapshotStore) List() ([]*raft.SnapshotMeta, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*raft.SnapshotMeta, len(s.list))
	for i, m := range s.list {
		out[i] = m.raft()
	}
	return out, nil
}

func (m *snapshotMeta) raft() *raft.SnapshotMeta {
	return &raft.SnapshotMeta{
		Version: raft.SnapshotVersionMax, ID: m.id(), Index: m.Index, Term: m.Term,
		Configuration: raft.DecodeConfiguration(m.Config), ConfigurationIndex: m.ConfigIndex,
		Size: m.Size + streamHeader,
	}
}

// Create implements raft.SnapshotStore. A snapshot older than the newest here is
// refused: Raft installs what a leader sends whatever it has applied itself, and
// would go back to it.
func (s *snapshotStore) Create(_ raft.SnapshotVersion, index, term uint64, c raft.Configuration, ci uint64, _ raft.Transport) (raft.SnapshotSink, error) {
	if _, newest := s.kept(); index < newest {
		return nil, fmt.Errorf("snapshot at index %d: older than what is here (%d)", index, newest)
	}
	m := &snapshotMeta{Format: state.ImageFormat, Index: index, Term: term, Config: raft.EncodeConfiguration(c), ConfigIndex: ci}
	return &snapshotSink{s: s, meta: m, tmp: s.file(m.id(), ".tmp")}, nil
}

// Open implements raft.SnapshotStore. The stream is a header with the
// checksum and the snapshot file; the reader also knows the file's path, so
// that the local state machine reads it in place.
func (s *snapshotStore) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	s.mu.Lock()
	i := slices.IndexFunc(s.list, func(m *snapshotMeta) bool { return m.id() == id })
	if i < 0 {
		s.mu.Unlock()
		return nil, nil, fmt.Errorf("snapshot %s: %w", id, fs.ErrNotExist)
	}
	m := s.list[i]
	s.mu.Unlock()
	if err := s.check(m); err != nil {
		return nil, nil, err
	}
	f, err := os.Open(s.file(id, ".db"))
	if err != nil {
		return nil, nil, fmt.Errorf("open snapshot: %w", err)
	}
	return m.raft(), &snapshotReader{Reader: io.MultiReader(bytes.NewReader(m.header()), f), f: f}, nil
}

// The header of a snapshot stream: magic, format, size, checksum.
const (
	streamMagic  = 0x44534e50 // "DSNP"
	streamHeader = 4 + 4 + 8 + sha256.Size
)

func (m *snapshotMeta) header() []byte {
	b := make([]byte, 0, streamHeader)
	b = binary.BigEndian.AppendUint32(b, streamMagic)
	b = binary.BigEndian.AppendUint32(b, m.Format)
	b = binary.BigEndian.AppendUint64(b, uint64(m.Size))
	return append(b, m.Sum[:]...)
}

type snapshotReader struct {
	io.Reader
	f *os.File
}

func (r *snapshotReader) Close() error { return r.f.Close() }

// snapshotSink takes a snapshot, either from our own state (writeImage) or as
// a stream from another server (Write).
type snapshotSink struct {
	s      *snapshotStore
	meta   *snapshotMeta
	tmp    string
	header []byte   // of a stream
	f      *os.File // of a stream
	closed bool
	before func() error // called when all is well, before it counts; nil is none
}

func (k *snapshotSink) ID() string { return k.meta.id() }

func (k *snapshotSink) writeImage(im *state.Image) error {
	_ = os.Remove(k.tmp)
	return k.s.disk.do(DiskSnapshot, k.tmp, 0, func() error { return im.Write(k.tmp) })
}

// Write implements io.Writer for a stream.
func (k *snapshotSink) Write(p []byte) (int, error) {
	n := len(p)
	if missing := streamHeader - len(k.header); missing > 0 {
		take := min(missing, len(p))
		k.header = append(k.header, p[:take]...)
		p = p[take:]
		if len(k.header) < streamHeader {
			return n, nil
		}
		if binary.BigEndian.Uint32(k.header) != streamMagic {
			return 0, fmt.Errorf("snapshot stream: %w", ErrDamaged)
		}
		if f := binary.BigEndian.Uint32(k.header[4:]); f > state.ImageFormat {
			return 0, fmt.Errorf("snapshot stream: %w (format %d)", ErrNewerVersion, f)
		}
	}
	if k.f == nil {
		f, err := os.OpenFile(k.tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
		if err != nil {
			return 0, fmt.Errorf("snapshot: %w", err)
		}
		k.f = f
	}
	if len(p) > 0 {
		if _, err := k.f.Write(p); err != nil {
			return 0, fmt.Errorf("snapshot: %w", err)
		}
	}
	return n, nil
}

// Cancel implements raft.SnapshotSink.
func (k *snapshotSink) Cancel() error {
	k.closed = true
	if k.f != nil {
		_ = k.f.Close()
	}
	_ = os.Remove(k.tmp)
	return nil
}

// Close makes the snapshot durable, reads it back from the disk, and only
// then lets it count: after this Raft cuts the log.
func (k *snapshotSink) Close() (err error) {
	if k.closed {
		return nil
	}
	k.closed = true
	defer func() {
		if err != nil {
			_ = os.Remove(k.tmp)
			err = fmt.Errorf("snapshot %s: %w", k.meta.id(), err)
		}
	}()
	if k.f != nil {
		if err := k.f.Close(); err != nil {
			return err
		}
	}
	if err := k.seal(); err != nil {
		return err
	}
	if k.before != nil {
		if err := k.before(); err != nil {
			return err
		}
	}
	return k.s.add(k.meta, k.tmp)
}

func (k *snapshotSink) seal() error {
	sum, size, err := sumFile(k.tmp)
	if err != nil {
		return err
	}
	if k.f != nil && (uint64(size) != binary.BigEndian.Uint64(k.header[8:]) || !bytes.Equal(sum[:], k.header[16:])) {
		return fmt.Errorf("%w: stream's checksum differs", ErrDamaged)
	}
	if err := k.s.disk.syncFile(k.tmp); err != nil {
		return err
	}
	again, _, err := sumFile(k.tmp)
	if err != nil {
		return err
	}
	if again != sum {
		return fmt.Errorf("%w: the disk does not return what was written", ErrDamaged)
	}
	facts, _, err := state.ReadImage(k.tmp, func(*state.Record) error { return nil })
	if err != nil {
		return err
	}
	k.meta.Size, k.meta.Sum, k.meta.Feature = size, sum, facts.Feature
	return nil
}

// add makes a verified file the newest snapshot and drops what is older than
// the two that are kept.
func (s *snapshotStore) add(m *snapshotMeta, tmp string) error {
	payload, err := cbor.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	if err := s.disk.rename(tmp, s.file(m.id(), ".db")); err != nil {
		return err
	}
	if err := s.disk.replace(s.file(m.id(), ".meta"), frame(frameFormat, 1, payload)); err != nil {
		return err
	}
	s.mu.Lock()
	s.list = slices.DeleteFunc(s.list, func(o *snapshotMeta) bool { return o.id() == m.id() })
	s.list = append([]*snapshotMeta{m}, s.list...)
	var old []*snapshotMeta
	if len(s.list) > keepSnapshots {
		old = slices.Clone(s.list[keepSnapshots:])
		s.list = s.list[:keepSnapshots]
	}
	s.mu.Unlock()
	for _, o := range old {
		// The side file first: without it the snapshot does not exist.
		err := errors.Join(s.disk.Delete(s.dir, o.id()+".meta"), s.disk.Delete(s.dir, o.id()+".db"))
		if err != nil {
			s.log.Warn("old snapshot not removed", "snapshot", o.id(), "err", err)
		}
	}
	return nil
}
