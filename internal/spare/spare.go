// Package spare keeps disk space aside for what must still be written on a
// full disk: a file of the size, given back when it is needed and taken again
// once there is plenty.
package spare

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// plenty is how many times its size must be free for a reserve to be taken.
const plenty = 4

// File is one reserve. Safe for concurrent use. The zero value and nil hold
// nothing.
type File struct {
	path string
	size int64

	mu   sync.Mutex
	held bool
}

// Open takes size bytes at path, or notes that an earlier process did. That
// there is no room is no error: the reserve is then empty until Renew.
func Open(path string, size int64) *File {
	f := &File{path: path, size: size}
	if st, err := os.Stat(path); err == nil && st.Size() >= size {
		f.held = true
		return f
	}
	f.Renew()
	return f
}

// Release gives the space back. ok is false when there was none.
func (f *File) Release() (ok bool) {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.held {
		return false
	}
	f.held = false
	return os.Remove(f.path) == nil
}

// Renew takes the space again if it was given back and there is plenty.
func (f *File) Renew() {
	if f == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.held || f.path == "" {
		return
	}
	var st unix.Statfs_t
	if unix.Statfs(filepath.Dir(f.path), &st) != nil || int64(st.Bavail)*int64(st.Bsize) < plenty*f.size { //nolint:unconvert // Bsize is smaller on 32-bit machines
		return
	}
	f.held = f.take() == nil
	if !f.held {
		_ = os.Remove(f.path)
	}
}

func (f *File) take() error {
	file, err := os.OpenFile(f.path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(file.Fd()), 0, 0, f.size)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		_, err = io.CopyN(file, zeros{}, f.size)
	}
	return errors.Join(err, file.Close())
}

// zeros reads as zeros without end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
