package wasm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

const digestPrefix = "sha256:"

// Reasons of a StartError for an image.
const (
	ReasonNeverPull     = "ErrImageNeverPull"
	ReasonPull          = "ErrImagePull"
	ReasonInvalidName   = "InvalidImageName"
	ReasonInvalidModule = "InvalidModule"
	ReasonDamaged       = "ImageDamaged"
)

// Store keeps modules by content. It is safe for concurrent use, by several
// processes too: files appear whole or not at all.
type Store struct {
	dir      string
	maxBytes int64
	fetcher  Fetcher
	log      *slog.Logger
	clock    clock.Clock
}

// nameRecord is what a name or a file:// reference meant when last seen.
type nameRecord struct {
	Name       string    `json:"name"`
	Digest     string    `json:"digest"`
	Source     string    `json:"source,omitempty"` // absolute path
	Size       int64     `json:"size"`
	Inode      uint64    `json:"inode,omitempty"`
	ModTime    time.Time `json:"modTime"`
	ImportedAt time.Time `json:"importedAt"`
}

// NewStore opens, or makes, the store in dir.
func NewStore(dir string, maxBytes int64, fetcher Fetcher, log *slog.Logger) (*Store, error) {
	if maxBytes <= 0 {
		maxBytes = 256 << 20
	}
	s := &Store{dir: dir, maxBytes: maxBytes, fetcher: fetcher, log: log, clock: clock.System}
	for _, d := range []string{s.blobs(), filepath.Join(dir, "names")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, fmt.Errorf("module store: %w", err)
		}
	}
	// What a power cut left of imports.
	if left, err := filepath.Glob(filepath.Join(s.blobs(), ".import-*")); err == nil {
		for _, f := range left {
			if st, err := os.Stat(f); err == nil && time.Since(st.ModTime()) > time.Hour {
				_ = os.Remove(f)
			}
		}
	}
	return s, nil
}

func (s *Store) blobs() string { return filepath.Join(s.dir, "blobs", "sha256") }

// BlobPath is where the module with that digest is, or would be.
func (s *Store) BlobPath(digest string) string {
	return filepath.Join(s.blobs(), strings.TrimPrefix(digest, digestPrefix))
}

func validDigest(d string) bool {
	h, ok := strings.CutPrefix(d, digestPrefix)
	if !ok || len(h) != 2*sha256.Size || strings.ToLower(h) != h {
		return false
	}
	_, err := hex.DecodeString(h)
	return err == nil
}

// Import reads a module, checks it, and keeps it under its digest and, when
// name is not empty, under name. source is the file it came from, if any.
func (s *Store) Import(ctx context.Context, name, source string, r io.Reader) (workload.ImageState, error) {
	if name != "" {
		if err := checkName(name); err != nil {
			return workload.ImageState{}, err
		}
	}
	st, err := s.add(ctx, r)
	if err != nil || name == "" {
		return st, err
	}
	rec := nameRecord{Name: name, Digest: st.Digest, Source: source, Size: st.Size, ImportedAt: s.clock.Now().UTC()}
	return st, s.writeName(rec)
}

// ImportFile is Import of a file.
func (s *Store) ImportFile(ctx context.Context, name, path string) (workload.ImageState, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return workload.ImageState{}, fmt.Errorf("import: %w", err)
	}
	f, err := openRegular(abs)
	if err != nil {
		return workload.ImageState{}, err
	}
	defer func() { _ = f.Close() }()
	return s.Import(ctx, name, abs, f)
}

func checkName(name string) error {
	if len(name) > 200 || strings.HasPrefix(name, "file://") || strings.ContainsAny(name, "@ \t\r\n\x00") {
		return &workload.StartError{Reason: ReasonInvalidName, Message: fmt.Sprintf("%q is not a name for a module", name),
			Hint: "use a name like hello.wasm or team/hello:1.2", Fatal: true}
	}
	return nil
}

func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, &workload.StartError{Reason: ReasonPull, Message: "cannot open the module", Err: err,
			Hint: fmt.Sprintf("%s must exist on this node and be readable by the agent: %v", path, rootCause(err))}
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		_ = f.Close()
		return nil, &workload.StartError{Reason: ReasonPull, Message: err.Error(), Err: err}
	}
	return f, nil
}

func rootCause(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// add copies r into the store.
func (s *Store) add(ctx context.Context, r io.Reader) (st workload.ImageState, err error) {
	f, err := os.CreateTemp(s.blobs(), ".import-*")
	if err != nil {
		return st, fmt.Errorf("import: %w", err)
	}
	defer func() {
		_ = f.Close()
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, h), &limitedReader{ctx: ctx, r: r, left: s.maxBytes})
	if err != nil {
		if errors.Is(err, errTooLarge) {
			return st, &workload.StartError{Reason: ReasonInvalidModule,
				Message: fmt.Sprintf("the module is larger than the limit of %d MiB", s.maxBytes>>20), Err: err}
		}
		return st, fmt.Errorf("import: %w", err)
	}
	if _, err := Inspect(f, n); err != nil {
		if errors.Is(err, ErrInvalidModule) {
			return st, &workload.StartError{Reason: ReasonInvalidModule, Message: err.Error(), Err: err}
		}
		return st, fmt.Errorf("import: %w", err)
	}
	st = workload.ImageState{Digest: digestPrefix + hex.EncodeToString(h.Sum(nil)), Size: n}
	if s.check(st.Digest) == nil {
		return st, os.Remove(f.Name()) // known: nothing is written again
	}
	if err := errors.Join(f.Chmod(0o644), f.Sync()); err != nil {
		return st, fmt.Errorf("import: %w", err)
	}
	if err := os.Rename(f.Name(), s.BlobPath(st.Digest)); err != nil {
		return st, fmt.Errorf("import: %w", err)
	}
	return st, atomicfile.SyncDir(s.blobs())
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

func (s *Store) namePath(name string) string {
	return filepath.Join(s.dir, "names", url.PathEscape(name)+".json")
}

func (s *Store) writeName(r nameRecord) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("import: %w", err)
	}
	path := s.namePath(r.Name)
	if len(filepath.Base(path)) > 255 {
		sum := sha256.Sum256([]byte(r.Name))
		path = filepath.Join(s.dir, "names", "long-"+hex.EncodeToString(sum[:])+".json")
	}
	if err := atomicfile.Write(path, b, 0o644); err != nil {
		return fmt.Errorf("import: %w", err)
	}
	return nil
}

// readName returns what a name means; ok is false when it is unknown or its
// record is damaged (which is then set aside).
func (s *Store) readName(name string) (r nameRecord, ok bool) {
	path := s.namePath(name)
	if len(filepath.Base(path)) > 255 {
		sum := sha256.Sum256([]byte(name))
		path = filepath.Join(s.dir, "names", "long-"+hex.EncodeToString(sum[:])+".json")
	}
	b, err := atomicfile.Read(path)
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil || !validDigest(r.Digest) {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.log.Warn("module name record set aside", "name", name, "err", err)
			_, _ = atomicfile.Quarantine(path)
		}
		return r, false
	}
	return r, true
}

// Named is one entry of List.
type Named struct {
	Name, Digest, Source string
	Size                 int64
	ImportedAt           time.Time
}

// List returns the imported names, sorted.
func (s *Store) List() ([]Named, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "names"))
	if err != nil {
		return nil, fmt.Errorf("module store: %w", err)
	}
	var out []Named
	for _, e := range entries {
		if filepath.Ext(e.Name()) != ".json" {
			continue
		}
		b, err := atomicfile.Read(filepath.Join(s.dir, "names", e.Name()))
		var r nameRecord
		if err != nil || json.Unmarshal(b, &r) != nil {
			continue
		}
		out = append(out, Named{Name: r.Name, Digest: r.Digest, Source: r.Source, Size: r.Size, ImportedAt: r.ImportedAt})
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Name < out[j].Name })
	return out, nil
}

// Resolve makes the module that image names available and returns its
// digest. policy is the pod's imagePullPolicy.
func (s *Store) Resolve(ctx context.Context, image, policy string) (workload.ImageState, error) {
	if path, ok := strings.CutPrefix(image, "file://"); ok {
		return s.resolveFile(ctx, image, path, policy)
	}
	name, digest, pinned := strings.Cut(image, "@")
	if pinned {
		if !validDigest(digest) {
			return workload.ImageState{}, &workload.StartError{Reason: ReasonInvalidName, Fatal: true,
				Message: fmt.Sprintf("%q does not end in @sha256: and 64 hexadecimal digits", image)}
		}
		st, err := s.usable(ctx, digest, name)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return st, err
		}
		return s.fetch(ctx, image, policy, digest)
	}
	if err := checkName(image); err != nil {
		return workload.ImageState{}, err
	}
	if r, ok := s.readName(image); ok {
		return s.usable(ctx, r.Digest, image)
	}
	return s.fetch(ctx, image, policy, "")
}

func (s *Store) resolveFile(ctx context.Context, image, path, policy string) (workload.ImageState, error) {
	if !filepath.IsAbs(path) {
		return workload.ImageState{}, &workload.StartError{Reason: ReasonInvalidName, Fatal: true,
			Message: fmt.Sprintf("%q is not file:// and an absolute path", image), Hint: "write file:///path/to/app.wasm"}
	}
	rec, known := s.readName(image)
	if policy == "Never" {
		if !known {
			return workload.ImageState{}, &workload.StartError{Reason: ReasonNeverPull,
				Message: fmt.Sprintf("%s was never imported here and imagePullPolicy is Never", image), Hint: "import it with `dunlin import`, or use IfNotPresent"}
		}
		return s.usable(ctx, rec.Digest, image)
	}
	st, err := os.Stat(path)
	if err == nil && known && policy != "Always" && rec.unchanged(st) {
		return s.usable(ctx, rec.Digest, image)
	}
	f, err := openRegular(path)
	if err != nil {
		if known && policy != "Always" {
			// The file is gone, what it held is here: known work starts.
			if st, err := s.usable(ctx, rec.Digest, ""); err == nil {
				return st, nil
			}
		}
		return workload.ImageState{}, err
	}
	defer func() { _ = f.Close() }()
	got, err := s.add(ctx, f)
	if err != nil {
		return got, err
	}
	rec = nameRecord{Name: image, Digest: got.Digest, Source: path, Size: got.Size, ImportedAt: s.clock.Now().UTC()}
	if st, err := f.Stat(); err == nil {
		rec.ModTime, rec.Inode = st.ModTime(), inode(st)
	}
	return got, s.writeName(rec)
}

func (r nameRecord) unchanged(st fs.FileInfo) bool {
	return r.Size == st.Size() && r.Inode == inode(st) && r.ModTime.Equal(st.ModTime())
}

func inode(st fs.FileInfo) uint64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return s.Ino
	}
	return 0
}

func (s *Store) fetch(ctx context.Context, image, policy, digest string) (workload.ImageState, error) {
	if policy == "Never" {
		return workload.ImageState{}, &workload.StartError{Reason: ReasonNeverPull,
			Message: fmt.Sprintf("module %s is not on this node and imagePullPolicy is Never", image), Hint: "import it with `dunlin import " + image + " FILE`"}
	}
	if s.fetcher == nil {
		return workload.ImageState{}, &workload.StartError{Reason: ReasonPull,
			Message: fmt.Sprintf("module %s is not on this node, and this build does not pull from registries", image),
			Hint:    fmt.Sprintf("run `dunlin import %s FILE` on the node, or use image: file:///path/to/app.wasm", strings.SplitN(image, "@", 2)[0])}
	}
	r, err := s.fetcher.Fetch(ctx, image)
	if err != nil {
		return workload.ImageState{}, err
	}
	defer func() { _ = r.Close() }()
	st, err := s.add(ctx, r)
	if err != nil {
		return st, err
	}
	if digest != "" && st.Digest != digest {
		return st, &workload.StartError{Reason: ReasonPull, Message: fmt.Sprintf("module %s was asked for and %s was delivered", digest, st.Digest)}
	}
	return st, s.writeName(nameRecord{Name: image, Digest: st.Digest, Size: st.Size, ImportedAt: s.clock.Now().UTC()})
}

// errDamaged says that a module is not what its digest says.
var errDamaged = errors.New("the stored module is damaged")

// check reads the module and compares its digest.
func (s *Store) check(digest string) error {
	f, err := os.Open(s.BlobPath(digest))
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return checkOpen(f, digest)
}

func checkOpen(f *os.File, digest string) error {
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return fmt.Errorf("%w: %w", errDamaged, err)
	}
	if got := digestPrefix + hex.EncodeToString(h.Sum(nil)); got != digest {
		return fmt.Errorf("%w: %s reads as %s", errDamaged, digest, got)
	}
	return nil
}

// digestOf reads a file and goes back to its beginning.
func digestOf(ctx context.Context, f *os.File) (string, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", fmt.Errorf("read module: %w", err)
	}
	h := sha256.New()
	if _, err := io.Copy(h, &limitedReader{ctx: ctx, r: f, left: 1 << 40}); err != nil {
		return "", fmt.Errorf("read module: %w", err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", fmt.Errorf("read module: %w", err)
	}
	return digestPrefix + hex.EncodeToString(h.Sum(nil)), nil
}

// usable says that the module with that digest is here and whole. A damaged
// one is set aside and taken again from the file that name came from, if
// that still holds the same.
func (s *Store) usable(ctx context.Context, digest, name string) (workload.ImageState, error) {
	f, err := s.Open(ctx, digest, name)
	if err != nil {
		return workload.ImageState{}, err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return workload.ImageState{}, fmt.Errorf("module store: %w", err)
	}
	return workload.ImageState{Digest: digest, Size: st.Size()}, nil
}

// Open returns the module with that digest, verified.
func (s *Store) Open(ctx context.Context, digest, name string) (*os.File, error) {
	if !validDigest(digest) {
		return nil, &workload.StartError{Reason: ReasonInvalidName, Message: fmt.Sprintf("%q is not a digest", digest)}
	}
	path := s.BlobPath(digest)
	f, err := os.Open(path)
	if err == nil {
		if err = checkOpen(f, digest); err == nil {
			if _, err = f.Seek(0, io.SeekStart); err == nil {
				return f, nil
			}
		}
		_ = f.Close()
	}
	missing := errors.Is(err, fs.ErrNotExist)
	if !missing {
		if to, qerr := atomicfile.Quarantine(path); qerr == nil {
			s.log.Warn("damaged module set aside", "digest", digest, "to", to)
		}
	}
	if r, ok := s.readName(name); name != "" && ok && r.Source != "" && r.Digest == digest {
		if src, oerr := openRegular(r.Source); oerr == nil {
			st, aerr := s.add(ctx, src)
			_ = src.Close()
			if aerr == nil && st.Digest == digest {
				s.log.Info("module taken again from its file", "digest", digest, "file", r.Source)
				return os.Open(path)
			}
		}
	}
	if missing {
		return nil, &workload.StartError{Reason: ReasonPull, Err: err, Message: fmt.Sprintf("module %s is not on this node", orDigest(name, digest)),
			Hint: "import it again with `dunlin import`"}
	}
	return nil, &workload.StartError{Reason: ReasonDamaged, Err: err, Message: fmt.Sprintf("module %s on this node is damaged and its source no longer has it", orDigest(name, digest)),
		Hint: "import it again with `dunlin import`, and check the disk"}
}

func orDigest(name, digest string) string {
	if name == "" {
		return digest
	}
	return name
}

// Prune deletes the modules that no name and no keep needs, and returns how
// many bytes that freed.
func (s *Store) Prune(keep func(digest string) bool) (int64, error) {
	named, err := s.List()
	if err != nil {
		return 0, err
	}
	used := map[string]bool{}
	for _, n := range named {
		used[n.Digest] = true
	}
	entries, err := os.ReadDir(s.blobs())
	if err != nil {
		return 0, fmt.Errorf("module store: %w", err)
	}
	var freed int64
	for _, e := range entries {
		d := digestPrefix + e.Name()
		if used[d] || !validDigest(d) || keep(d) {
			continue
		}
		if st, err := e.Info(); err == nil && os.Remove(s.BlobPath(d)) == nil {
			freed += st.Size()
		}
	}
	return freed, nil
}
