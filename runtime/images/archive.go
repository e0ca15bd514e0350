package images

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strconv"

	"github.com/dunlin-project/dunlin/internal/scratch"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// maxArchiveFiles bounds an archive: an image has a few files for each layer.
const maxArchiveFiles = 4096

// archive is an image archive, spread out in a folder.
type archive struct {
	dir     string
	files   map[string]spooled // by path
	links   map[string]string  // docker save writes a layer that it has twice as a link
	digests map[string]spooled
}

// spooled is one file of an archive.
type spooled struct {
	path   string
	digest string
	size   int64
}

// notArchive says that what was given is no image.
func notArchive(format string, args ...any) error {
	return &workload.StartError{Reason: ReasonPull, Message: "this is no image archive: " + fmt.Sprintf(format, args...),
		Hint: "it must be a tar in the OCI layout or as docker save writes it, or a .wasm module with a NAME"}
}

// spool spreads out an archive below tmp; done removes what was not taken.
func (s *Store) spool(ctx context.Context, r io.Reader) (_ *archive, done func(), err error) {
	dir, release, err := scratch.Folder(s.path("tmp"), "import-*")
	if err != nil {
		return nil, nil, fmt.Errorf("import: %w", err)
	}
	remove := func() {
		_ = os.RemoveAll(dir)
		release()
	}
	defer func() {
		if err != nil {
			remove()
		}
	}()
	a := &archive{dir: dir, files: map[string]spooled{}, links: map[string]string{}, digests: map[string]spooled{}}
	plain, closeReader, err := decompress(&contextReader{ctx, r})
	if err != nil {
		return nil, nil, notArchive("%v", err)
	}
	defer closeReader()
	for t := tar.NewReader(plain); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return a, remove, nil
		}
		if ctx.Err() != nil {
			return nil, nil, fmt.Errorf("import: %w", context.Cause(ctx))
		}
		if err != nil {
			return nil, nil, a.unreadable(err)
		}
		if err := s.spoolEntry(a, h, t); err != nil {
			return nil, nil, err
		}
	}
}

func (a *archive) unreadable(err error) error {
	if len(a.files) == 0 && errors.Is(err, tar.ErrHeader) {
		return notArchive("what it holds is no tar; if it is a compressed module, unpack it first")
	}
	if len(a.files) == 0 {
		return notArchive("%v", err)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return &workload.StartError{Reason: ReasonPull, Err: err, Message: "the archive ends in the middle of a file", Hint: "it was not copied whole; nothing was imported"}
	}
	return fmt.Errorf("import: read archive: %w", err)
}

func (s *Store) spoolEntry(a *archive, h *tar.Header, r io.Reader) error {
	name, ok := inside(h.Name)
	if !ok {
		return notArchive("its file %q lies outside of it (path traversal)", h.Name)
	}
	if len(a.files)+len(a.links) >= maxArchiveFiles {
		return notArchive("it has more than %d files", maxArchiveFiles)
	}
	switch h.Typeflag {
	case tar.TypeReg:
	case tar.TypeSymlink, tar.TypeLink:
		target := h.Linkname
		if h.Typeflag == tar.TypeSymlink {
			target = path.Join(path.Dir(name), target) //nolint:gosec // a name inside the archive, never a path on disk
		}
		a.links[name] = path.Clean(target)
		return nil
	default:
		return nil
	}
	if err := s.room(h.Size); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(a.dir, strconv.Itoa(len(a.files))), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("import: %w", err)
	}
	defer func() { _ = f.Close() }()
	sum := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, sum), r)
	if err != nil {
		return a.unreadable(err)
	}
	sp := spooled{path: f.Name(), digest: digestPrefix + hex.EncodeToString(sum.Sum(nil)), size: n}
	a.files[name], a.digests[sp.digest] = sp, sp
	return nil
}

// file finds a file, through links.
func (a *archive) file(name string) (spooled, bool) {
	const maxLinks = 8
	name = path.Clean(name)
	for range maxLinks {
		if f, ok := a.files[name]; ok {
			return f, true
		}
		to, ok := a.links[name]
		if !ok {
			break
		}
		name = to
	}
	return spooled{}, false
}

// small reads a file that describes the archive.
func (f spooled) small(limit int64) ([]byte, error) {
	if f.size > limit {
		return nil, notArchive("a description in it has %s, more than the limit of %s", mib(f.size), mib(limit))
	}
	b, err := os.ReadFile(f.path)
	if err != nil {
		return nil, fmt.Errorf("import: %w", err)
	}
	return b, nil
}

// decode reads a JSON document of the archive.
func (a *archive) decode(name string, into any) error {
	f, ok := a.file(name)
	if !ok {
		return notArchive("it has no %s", name)
	}
	b, err := f.small(maxManifest)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, into); err != nil {
		return notArchive("%s cannot be read: %v", name, err)
	}
	return nil
}
