// Package scratch makes temporary files and folders that a dead maker cannot
// leave for ever. What is being made has a temporary name, and its maker holds
// a lock on it: the lock ends with the process, however that ends. So what has
// no holder is left over and can go at once, and what has one is in use, in
// this process or another, however old it is.
package scratch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// File makes a locked temporary file; closing it ends the claim.
func File(dir, pattern string) (*os.File, error) {
	for {
		f, err := os.CreateTemp(dir, pattern)
		if err != nil {
			return nil, err
		}
		if ok, err := claim(f, f.Name()); ok || err != nil {
			return f, err
		}
	}
}

// Folder makes a locked temporary folder; release ends the claim.
func Folder(dir, pattern string) (path string, release func(), err error) {
	for {
		if path, err = os.MkdirTemp(dir, pattern); err != nil {
			return "", nil, err
		}
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", nil, err
		}
		if ok, err := claim(f, path); err != nil {
			return "", nil, err
		} else if ok {
			return path, func() { _ = f.Close() }, nil
		}
	}
}

// claim locks what was just made at path. ok is false, and f closed, when a
// sweep came in between and removed it.
func claim(f *os.File, path string) (ok bool, err error) {
	defer func() {
		if !ok {
			_ = f.Close()
		}
	}()
	if err := Lock(f, unix.LOCK_EX); err != nil {
		return false, fmt.Errorf("lock %s: %w", path, err)
	}
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(mine, there), err
}

// Lock is flock(2) that signals do not interrupt.
func Lock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// Sweep removes what matches and has no maker any more.
func Sweep(dir, pattern string) {
	left, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil {
		return
	}
	for _, path := range left {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			_ = os.RemoveAll(path)
		}
		_ = f.Close()
	}
}
