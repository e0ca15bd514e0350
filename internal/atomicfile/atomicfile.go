// Package atomicfile is the one helper that writes small files (design
// invariant 13): temporary file, checksum, fsync, rename, fsync of the
// folder. Readers get a typed error for everything a power cut can leave.
package atomicfile

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/dunlin-project/dunlin/internal/scratch"
)

// ErrCorrupt says that a file exists but is empty, truncated, NUL-filled or
// otherwise not what was written.
var ErrCorrupt = errors.New("file is damaged")

const trailerLen = len("\n#sha256:") + 2*sha256.Size + 1

// Write replaces path durably with data and a checksum line.
func Write(path string, data []byte, perm fs.FileMode) error {
	sum := sha256.Sum256(data)
	b := make([]byte, 0, len(data)+trailerLen)
	b = append(b, data...)
	b = fmt.Appendf(b, "\n#sha256:%s\n", hex.EncodeToString(sum[:]))
	return WriteRaw(path, b, perm)
}

// WriteRaw replaces path durably with exactly data, for files whose format
// is not ours (PEM, kubeconfig).
func WriteRaw(path string, data []byte, perm fs.FileMode) (err error) {
	dir := filepath.Dir(path)
	f, err := temporary(dir, "."+filepath.Base(path)+".tmp*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
			err = fmt.Errorf("write %s: %w", path, err)
		}
	}()
	if err = f.Chmod(perm); err != nil {
		return err
	}
	if _, err = f.Write(data); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	// Closed after it has its name: until then a Sweep must find it locked.
	if err = os.Rename(f.Name(), path); err != nil {
		return err
	}
	_ = f.Close()
	return SyncDir(dir)
}

// temporary is a file that its maker holds a lock on, where the filesystem has
// locks (a home folder on a network may not).
func temporary(dir, pattern string) (*os.File, error) {
	f, err := scratch.File(dir, pattern)
	if err == nil {
		return f, nil
	}
	if f != nil {
		_ = os.Remove(f.Name())
	}
	return os.CreateTemp(dir, pattern)
}

// Sweep removes what killed writers left in a folder.
func Sweep(dir string) { scratch.Sweep(dir, ".*.tmp*") }

// Read returns what Write wrote. fs.ErrNotExist if there is none, ErrCorrupt
// if it is damaged.
func Read(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read: %w", err)
	}
	if len(b) < trailerLen {
		return nil, fmt.Errorf("%s: %w: %d bytes", path, ErrCorrupt, len(b))
	}
	data, trailer := b[:len(b)-trailerLen], b[len(b)-trailerLen:]
	sum := sha256.Sum256(data)
	want := fmt.Appendf(nil, "\n#sha256:%s\n", hex.EncodeToString(sum[:]))
	if !bytes.Equal(trailer, want) {
		return nil, fmt.Errorf("%s: %w: checksum differs", path, ErrCorrupt)
	}
	return data, nil
}

// DamagedSuffix ends the name of what Quarantine moved aside.
const DamagedSuffix = ".damaged"

// Quarantine moves a damaged file aside, keeping one older copy at most, and
// returns its new name.
func Quarantine(path string) (string, error) {
	to := path + DamagedSuffix
	if err := os.Rename(path, to); err != nil {
		return "", fmt.Errorf("quarantine: %w", err)
	}
	return to, SyncDir(filepath.Dir(path))
}

// SyncDir makes renames and removals in the folder durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync folder: %w", err)
	}
	defer func() { _ = d.Close() }()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync folder %s: %w", dir, err)
	}
	return nil
}
