package wasm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/scratch"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// Ready says whether a module can run, before the store keeps it and a name
// points at it; the module is read with open.
type Ready func(digest string, open func() (*os.File, error)) error

// Import reads a module, checks it, and keeps it under its digest and, when
// name is not empty, under name. source is the file it came from, if any.
// Unless ready (nil accepts all) says yes, nothing is kept and name means
// what it meant before.
func (s *Store) Import(ctx context.Context, name, source string, r io.Reader, ready Ready) (workload.ImageState, error) {
	if name != "" {
		if err := checkName(name); err != nil {
			return workload.ImageState{}, err
		}
	}
	st, err := s.take(ctx, r, ready)
	if err != nil || name == "" {
		return st, err
	}
	rec := nameRecord{Name: name, Digest: st.Digest, Source: source, Size: st.Size, ImportedAt: s.clock.Now().UTC()}
	return st, s.writeName(rec)
}

// ImportFile is Import of a file.
func (s *Store) ImportFile(ctx context.Context, name, path string, ready Ready) (workload.ImageState, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return workload.ImageState{}, fmt.Errorf("import: %w", err)
	}
	f, err := openRegular(abs)
	if err != nil {
		return workload.ImageState{}, err
	}
	defer func() { _ = f.Close() }()
	return s.Import(ctx, name, abs, f, ready)
}

// take copies r into the store, if ready agrees. Until then the copy has a
// temporary name: whatever stops this leaves nothing.
func (s *Store) take(ctx context.Context, r io.Reader, ready Ready) (st workload.ImageState, err error) {
	f, err := scratch.File(s.blobs(), importing)
	if err != nil {
		return st, fmt.Errorf("import: %w", err)
	}
	path := f.Name() // where the module is at present
	kept := false
	defer func() {
		if !kept {
			_ = os.Remove(f.Name())
		}
		_ = f.Close()
	}()
	if st, err = s.copyModule(ctx, f, r); err != nil {
		return st, err
	}
	if s.check(st.Digest) == nil {
		path = s.BlobPath(st.Digest) // known: nothing is written again
	}
	if ready != nil {
		if err := ready(st.Digest, func() (*os.File, error) { return os.Open(path) }); err != nil {
			return st, err
		}
	}
	if path != f.Name() {
		return st, nil
	}
	if err := errors.Join(ctx.Err(), f.Chmod(0o644), f.Sync()); err != nil {
		return st, fmt.Errorf("import: %w", err)
	}
	if err := os.Rename(f.Name(), s.BlobPath(st.Digest)); err != nil {
		return st, fmt.Errorf("import: %w", err)
	}
	kept = true
	s.forgetDamaged(st.Digest)
	return st, atomicfile.SyncDir(s.blobs())
}

// forgetDamaged removes the damaged copy of a module that is here whole.
func (s *Store) forgetDamaged(digest string) {
	_ = os.Remove(s.BlobPath(digest) + atomicfile.DamagedSuffix) // mostly there is none
}

// copyModule copies r to f and looks at it.
func (s *Store) copyModule(ctx context.Context, f *os.File, r io.Reader) (st workload.ImageState, err error) {
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, h), &limitedReader{ctx: ctx, r: r, left: s.maxBytes})
	if err != nil {
		if errors.Is(err, errTooLarge) {
			return st, tooLarge(s.maxBytes, err)
		}
		return st, fmt.Errorf("import: %w", err)
	}
	if _, err := Inspect(f, n); err != nil {
		return st, unfit(err)
	}
	return workload.ImageState{Digest: digestPrefix + hex.EncodeToString(h.Sum(nil)), Size: n}, nil
}

func tooLarge(limit int64, err error) error {
	return &workload.StartError{Reason: ReasonInvalidModule, Message: fmt.Sprintf("the module is larger than the limit of %d MiB", limit>>20), Err: err}
}

// unfit gives what Inspect said its reason.
func unfit(err error) error {
	if errors.Is(err, ErrInvalidModule) {
		return &workload.StartError{Reason: ReasonInvalidModule, Message: err.Error(), Err: err}
	}
	return fmt.Errorf("import: %w", err)
}

var errTooLarge = errors.New("too large")

// limitedReader fails, instead of ending, where io.LimitReader ends.
type limitedReader struct {
	ctx  context.Context
	r    io.Reader
	left int64
}

func (l *limitedReader) Read(p []byte) (int, error) {
	if err := l.ctx.Err(); err != nil {
		return 0, err
	}
	if int64(len(p)) > l.left+1 {
		p = p[:l.left+1]
	}
	n, err := l.r.Read(p)
	l.left -= int64(n)
	if l.left < 0 {
		return 0, errTooLarge
	}
	return n, err
}

// compiles is a store's Ready: what compiles can run.
func (r *Runtime) compiles(ctx context.Context, progress workload.Progress) Ready {
	return func(digest string, open func() (*os.File, error)) error {
		_, err := r.cache.ensure(ctx, digest, open, progress)
		return err
	}
}

// Import gives the store a module under name once it is compiled; until then,
// and when that fails, name means what it meant before. source is the file
// that it came from, "" if none.
func (r *Runtime) Import(ctx context.Context, name, source string, from io.Reader, progress workload.Progress) (workload.ImageState, error) {
	return r.store.Import(ctx, name, source, from, r.compiles(ctx, progress))
}

// ImportFile is Import of a file.
func (r *Runtime) ImportFile(ctx context.Context, name, path string, progress workload.Progress) (workload.ImageState, error) {
	return r.store.ImportFile(ctx, name, path, r.compiles(ctx, progress))
}
