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
	"strings"
	"syscall"
	"time"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/internal/scratch"
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
	s.sweep()
	atomicfile.Sweep(s.NamesDir())
	return s, nil
}

// importing is the name of a module that is still being read.
const importing = ".import-*"

// sweep removes what killed imports left.
func (s *Store) sweep() { scratch.Sweep(s.blobs(), importing) }

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
			Hint: fmt.Sprintf("%s must exist on this node and be readable here: %v", path, rootCause(err))}
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

func (s *Store) namePath(name string) string {
	return filepath.Join(s.dir, "names", url.PathEscape(name)+".json")
}

func (s *Store) writeName(r nameRecord) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("import: %w", err)
	}
	if err := atomicfile.Write(s.recordPath(r.Name), b, 0o644); err != nil {
		return fmt.Errorf("import: %w", err)
	}
	return nil
}

// readName returns what a name means; ok is false when it is unknown or its
// record is damaged (which is then set aside).
func (s *Store) readName(name string) (r nameRecord, ok bool) {
	path := s.recordPath(name)
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

// Resolve makes the module that a pod asks for available and returns its
// digest; ready is asked about what is new here, as in Import. A file, then
// what was imported under that name or digest, then the registry that the name
// begins with.
func (s *Store) Resolve(ctx context.Context, req workload.ImageRequest, ready Ready, progress workload.Progress) (workload.ImageState, error) {
	s.sweep() // an agent may run for years after an import was killed
	image := req.Image
	if path, ok := strings.CutPrefix(image, "file://"); ok {
		return s.resolveFile(ctx, image, path, req.Policy, ready)
	}
	if len(req.SignedBy) > 0 {
		return s.fetch(ctx, req, ready, progress) // what is signed is its artifact
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
		return s.fetch(ctx, req, ready, progress)
	}
	if err := checkName(image); err != nil {
		return workload.ImageState{}, err
	}
	if r, ok := s.readName(image); ok {
		return s.usable(ctx, r.Digest, image)
	}
	return s.fetch(ctx, req, ready, progress)
}

func (s *Store) resolveFile(ctx context.Context, image, path, policy string, ready Ready) (workload.ImageState, error) {
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
	got, err := s.take(ctx, f, ready)
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
	if missing {
		_, aside := os.Lstat(path + atomicfile.DamagedSuffix) // found damaged before
		missing = aside != nil
	} else {
		if to, qerr := atomicfile.Quarantine(path); qerr == nil {
			s.log.Warn("damaged module set aside", "digest", digest, "to", to)
		}
	}
	if r, ok := s.readName(name); name != "" && ok && r.Source != "" && r.Digest == digest {
		if src, oerr := openRegular(r.Source); oerr == nil {
			st, aerr := s.take(ctx, src, nil)
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
