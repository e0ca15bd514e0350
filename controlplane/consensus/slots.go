package consensus

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/hashicorp/raft-wal/types"
)

// Small records are framed: magic, format, payload length, sequence number,
// CRC-32C over all of it, payload.
const (
	frameMagic  = 0x44554e31 // "DUN1"
	frameHeader = 4 + 4 + 4 + 8 + 4
	frameFormat = 1
	frameMax    = 16 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func frame(format uint32, seq uint64, payload []byte) []byte {
	b := make([]byte, frameHeader, frameHeader+len(payload))
	binary.BigEndian.PutUint32(b[0:], frameMagic)
	binary.BigEndian.PutUint32(b[4:], format)
	binary.BigEndian.PutUint32(b[8:], uint32(len(payload)))
	binary.BigEndian.PutUint64(b[12:], seq)
	sum := crc32.Update(crc32.Checksum(b[:20], castagnoli), castagnoli, payload)
	binary.BigEndian.PutUint32(b[20:], sum)
	return append(b, payload...)
}

var errFrame = errors.New("damaged")

// unframe returns what frame packed. What follows the frame is ignored: a
// slot keeps the tail of a longer, older record.
func unframe(b []byte) (seq uint64, payload []byte, err error) {
	if len(b) < frameHeader || binary.BigEndian.Uint32(b) != frameMagic {
		return 0, nil, errFrame
	}
	n := int(binary.BigEndian.Uint32(b[8:]))
	if n > frameMax || frameHeader+n > len(b) {
		return 0, nil, errFrame
	}
	payload = b[frameHeader : frameHeader+n]
	if crc32.Update(crc32.Checksum(b[:20], castagnoli), castagnoli, payload) != binary.BigEndian.Uint32(b[20:]) {
		return 0, nil, errFrame
	}
	if f := binary.BigEndian.Uint32(b[4:]); f > frameFormat {
		return 0, nil, fmt.Errorf("%w (format %d, known %d)", ErrNewerVersion, f, frameFormat)
	}
	return binary.BigEndian.Uint64(b[12:]), payload, nil
}

// slots is one small record in two files that are overwritten in turn, in
// place: an update is one write and one fsync, needs no new space (so it
// works on a full disk), and a torn write costs only the older record.
type slots struct {
	disk  *Disk
	path  string // ".0" and ".1" are appended
	files [2]types.WritableFile
	seq   uint64
}

// slotReserve is the space that a slot takes at once.
const slotReserve = 4096

func (s *slots) name(i int) string { return fmt.Sprintf("%s.%d", s.path, i) }

// load opens the slots and returns the newest valid record: nil if there was
// never one. ErrDamaged if files are there but none is valid.
func (s *slots) load() ([]byte, error) {
	var newest []byte
	found := false
	for i := range s.files {
		b, err := os.ReadFile(s.name(i))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read: %w", err)
		}
		found = true
		seq, payload, err := unframe(b)
		if errors.Is(err, ErrNewerVersion) {
			return nil, fmt.Errorf("%s: %w", s.name(i), err)
		}
		if err == nil && (newest == nil || seq > s.seq) {
			newest, s.seq = payload, seq
		}
	}
	if found && newest == nil {
		return nil, fmt.Errorf("%s.*: %w", s.path, ErrDamaged)
	}
	return newest, nil
}

// store replaces the older record durably.
func (s *slots) store(payload []byte) error {
	i := int((s.seq + 1) % 2)
	if s.files[i] == nil {
		f, err := s.open(i)
		if err != nil {
			return fmt.Errorf("open %s: %w", s.name(i), err)
		}
		s.files[i] = f
	}
	if _, err := s.files[i].WriteAt(frame(frameFormat, s.seq+1, payload), 0); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	if err := s.files[i].Sync(); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	s.seq++
	return nil
}

func (s *slots) open(i int) (types.WritableFile, error) {
	dir, name := filepath.Split(s.name(i))
	f, err := s.disk.OpenWriter(dir, name)
	if errors.Is(err, fs.ErrNotExist) {
		f, err = s.disk.Create(dir, name, slotReserve)
	}
	return f, err
}

// prepare makes both files exist, so that later updates need no new space.
func (s *slots) prepare() error {
	for i := range s.files {
		if s.files[i] != nil {
			continue
		}
		f, err := s.open(i)
		if err != nil {
			return fmt.Errorf("open %s: %w", s.name(i), err)
		}
		s.files[i] = f
	}
	return nil
}

// quarantine moves both files aside.
func (s *slots) quarantine() error {
	for i := range s.files {
		if err := moveAside(s.disk, s.name(i)); err != nil {
			return err
		}
	}
	s.seq = 0
	return nil
}

func (s *slots) close() error {
	var errs []error
	for i, f := range s.files {
		if f != nil {
			errs = append(errs, f.Close())
		}
		s.files[i] = nil
	}
	return errors.Join(errs...)
}

// moveAside renames a damaged file or folder to .damaged, over an older one.
func moveAside(d *Disk, path string) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	to := path + ".damaged"
	if err := os.RemoveAll(to); err != nil {
		return fmt.Errorf("quarantine: %w", err)
	}
	if err := d.rename(path, to); err != nil {
		return fmt.Errorf("quarantine: %w", err)
	}
	return nil
}
