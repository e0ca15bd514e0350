package images

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// Limits of one layer.
const (
	maxEntries   = 1_000_000
	maxTrailing  = 256 << 20 // bytes behind the end of the archive
	zstdWindow   = 64 << 20
	roomEvery    = 32 << 20
	whiteout     = ".wh."
	opaqueMarker = ".wh..wh..opq"
)

// unpackResult is what was in a layer.
type unpackResult struct {
	diffID  string // hash of the uncompressed archive
	entries int
	bytes   int64
	devices int
	// implicit are the folders that the layer has only because something is in
	// them; depends says that it was unpacked as the layers below it wanted.
	implicit []string
	depends  bool
}

// unpacker writes one layer below root, whose every access stays in it.
type unpacker struct {
	s       *Store
	ctx     context.Context //nolint:containedctx // one call of unpackTo
	root    *os.Root
	owner   bool
	res     unpackResult
	checked int64 // bytes at the last look at the free space
	dirs    []dirTime
	skipped map[string]bool // device files
	below   view            // the unpacked layers below it

	implicit []string
	depends  bool
}

type dirTime struct {
	name string
	time time.Time
}

// unpackTo unpacks a layer, compressed or not, into the empty folder dir.
func (s *Store) unpackTo(ctx context.Context, dir string, below view, r io.Reader) (res unpackResult, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return res, fmt.Errorf("unpack: %w", err)
	}
	defer func() { _ = root.Close() }()
	plain, done, err := decompress(&contextReader{ctx, r})
	if err != nil {
		return res, err
	}
	defer done()
	u := &unpacker{s: s, ctx: ctx, root: root, owner: os.Geteuid() == 0, skipped: map[string]bool{}, below: below}
	sum := &countingHash{Hash: sha256.New()}
	in := io.TeeReader(plain, sum)
	if err := os.Chmod(dir, 0o755); err != nil {
		return res, fmt.Errorf("unpack: %w", err)
	}
	if err := u.all(tar.NewReader(in)); err != nil {
		return res, err
	}
	// Behind the archive stands padding, which the digest covers.
	n, err := io.Copy(io.Discard, io.LimitReader(in, maxTrailing))
	if err != nil {
		return res, fmt.Errorf("unpack: %w", err)
	}
	if n == maxTrailing {
		return res, fmt.Errorf("more than %d MiB behind the end of the archive", maxTrailing>>20)
	}
	// An archive with nothing in it is a layer; nothing at all, or something
	// that is no archive, is a file that a power cut emptied.
	if u.res.entries == 0 && sum.n < 512 {
		return res, fmt.Errorf("no archive: %d bytes", sum.n)
	}
	u.res.implicit, u.res.depends = u.implicit, u.depends
	u.res.diffID = digestPrefix + hex.EncodeToString(sum.Sum(nil))
	return u.res, nil
}

type countingHash struct {
	hash.Hash
	n int64
}

func (c *countingHash) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return c.Hash.Write(p)
}

type contextReader struct {
	ctx context.Context //nolint:containedctx // a reader has no other way
	r   io.Reader
}

func (c *contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.r.Read(p)
}

// decompress looks at the first bytes: media types are often wrong.
func decompress(r io.Reader) (_ io.Reader, done func(), err error) {
	b := bufio.NewReaderSize(r, 64<<10)
	magic, _ := b.Peek(4)
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, nil, fmt.Errorf("gzip: %w", err)
		}
		return named{"gzip", z}, func() { _ = z.Close() }, nil
	case bytes.Equal(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}), len(magic) == 4 && magic[0]&0xf0 == 0x50 && bytes.Equal(magic[1:], []byte{0x2a, 0x4d, 0x18}):
		z, err := zstd.NewReader(b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(zstdWindow))
		if err != nil {
			return nil, nil, fmt.Errorf("zstd: %w", err)
		}
		return named{"zstd", z}, z.Close, nil
	}
	return b, func() {}, nil
}

// named says in its errors what was read.
type named struct {
	format string
	r      io.Reader
}

func (n named) Read(p []byte) (int, error) {
	k, err := n.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("%s: %w", n.format, err)
	}
	return k, err
}

func (u *unpacker) all(t *tar.Reader) error {
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("read archive: %w", err)
		}
		if u.res.entries++; u.res.entries > maxEntries {
			return fmt.Errorf("more than %d files", maxEntries)
		}
		if err := u.entry(h, t); err != nil {
			return err
		}
	}
	// Times of folders last: what is written into them changes them.
	for _, d := range slices.Backward(u.dirs) {
		if err := u.root.Chtimes(d.name, d.time, d.time); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("unpack %q: %w", d.name, err)
		}
	}
	return nil
}

// inside makes an entry's name relative to the layer; ok is false when it
// would leave it.
func inside(name string) (rel string, ok bool) {
	if strings.ContainsRune(name, 0) {
		return "", false
	}
	rel = path.Clean(strings.TrimLeft(name, "/"))
	return rel, rel != ".." && !strings.HasPrefix(rel, "../") && !path.IsAbs(rel)
}

func (u *unpacker) entry(h *tar.Header, content io.Reader) error {
	name, ok := inside(h.Name)
	if !ok {
		return fmt.Errorf("refused: the file %q lies outside of the layer (path traversal)", h.Name)
	}
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if name == "." {
		return nil
	}
	base := path.Base(name)
	dir, err := u.folder(path.Dir(name))
	if err != nil {
		return u.failed(h, err)
	}
	name = path.Join(dir, base)
	if base == opaqueMarker {
		return u.failed(h, u.opaque(dir))
	}
	if hidden, ok := strings.CutPrefix(base, whiteout); ok {
		if strings.HasPrefix(hidden, whiteout) || hidden == "" || hidden == "." || hidden == ".." {
			return nil // .wh..wh.plnk and other traces of aufs
		}
		return u.failed(h, u.hide(path.Join(dir, hidden)))
	}
	return u.failed(h, u.create(h, name, content))
}

func (u *unpacker) failed(h *tar.Header, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.ENOSPC) {
		if serr := u.s.room(max(h.Size, 1)); serr != nil {
			err = serr
		}
	}
	return fmt.Errorf("unpack %q: %w", h.Name, err)
}

// hide makes a whiteout, unless the layer itself has the file.
func (u *unpacker) hide(name string) error {
	if st, err := u.root.Lstat(name); err == nil {
		if st.IsDir() {
			return u.opaque(name)
		}
		return nil
	}
	return u.at(name, func(dir int, base string) error {
		return unix.Mknodat(dir, base, unix.S_IFCHR, 0)
	})
}

func (u *unpacker) opaque(name string) error {
	return u.at(name, func(dir int, base string) error {
		return unix.Lsetxattr(fmt.Sprintf("/proc/self/fd/%d/%s", dir, base), "trusted.overlay.opaque", []byte("y"), 0)
	})
}

// at calls f with the open folder that holds name.
func (u *unpacker) at(name string, f func(dir int, base string) error) error {
	d, err := u.root.Open(path.Dir(name))
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return f(int(d.Fd()), path.Base(name))
}

func isWhiteout(st fs.FileInfo) bool { return st.Mode()&fs.ModeCharDevice != 0 }

// create makes one file of the layer.
func (u *unpacker) create(h *tar.Header, name string, content io.Reader) error {
	old, err := u.root.Lstat(name)
	there := err == nil
	hidden := there && isWhiteout(old)
	if there && (h.Typeflag != tar.TypeDir || !old.IsDir()) {
		if err := u.root.RemoveAll(name); err != nil {
			return err
		}
	}
	switch h.Typeflag {
	case tar.TypeDir:
		if err := u.root.Mkdir(name, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if hidden {
			if err := u.opaque(name); err != nil {
				return err
			}
		}
		u.dirs = append(u.dirs, dirTime{name, modTime(h)})
	case tar.TypeReg, tar.TypeRegA, tar.TypeGNUSparse: // old archives have TypeRegA
		return u.file(h, name, content)
	case tar.TypeSymlink:
		if err := u.root.Symlink(h.Linkname, name); err != nil {
			return err
		}
		return u.chown(h, name)
	case tar.TypeLink:
		return u.link(h, name)
	case tar.TypeFifo:
		if err := u.at(name, func(dir int, base string) error { return unix.Mkfifoat(dir, base, 0o600) }); err != nil {
			return err
		}
	case tar.TypeChar, tar.TypeBlock:
		// Containers get their devices from the runtime; none is made here, and
		// a device 0/0 would be a whiteout.
		u.res.devices++
		u.skipped[name] = true
		return nil
	default:
		return fmt.Errorf("a file of type %q cannot be unpacked", h.Typeflag)
	}
	return u.attributes(h, name)
}

func (u *unpacker) link(h *tar.Header, name string) error {
	target, ok := inside(h.Linkname)
	if !ok {
		return fmt.Errorf("refused: its hard link to %q leaves the layer (path traversal)", h.Linkname)
	}
	dir, err := u.folder(path.Dir(target))
	if err != nil {
		return fmt.Errorf("its hard link's target %q: %w", h.Linkname, err)
	}
	target = path.Join(dir, path.Base(target))
	if u.skipped[target] {
		u.skipped[name] = true
		return nil
	}
	st, err := u.root.Lstat(target)
	if errors.Is(err, fs.ErrNotExist) {
		if err := u.copyUp(target); err != nil {
			return fmt.Errorf("its hard link's target %q: %w", h.Linkname, err)
		}
		return u.root.Link(target, name)
	}
	if err != nil || st.IsDir() || isWhiteout(st) {
		return fmt.Errorf("its hard link's target %q is no file of this layer", h.Linkname)
	}
	return u.root.Link(target, name)
}

// file copies a regular file, as long as there is room.
func (u *unpacker) file(h *tar.Header, name string, content io.Reader) (err error) {
	if u.checked == 0 || u.res.bytes+h.Size-u.checked > roomEvery {
		if err := u.s.room(h.Size); err != nil {
			return err
		}
		u.checked = max(u.res.bytes, 1)
	}
	f, err := u.root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	n, err := io.Copy(f, content)
	if err != nil {
		return err
	}
	u.res.bytes += n
	if u.owner {
		if err := f.Chown(ids(h)); err != nil {
			return err
		}
	}
	if err := f.Chmod(fileMode(h)); err != nil {
		return err
	}
	if err := u.xattrs(h, name); err != nil {
		return err
	}
	t := modTime(h)
	return u.root.Chtimes(name, t, t)
}

// attributes of what is neither a regular file nor a link.
func (u *unpacker) attributes(h *tar.Header, name string) error {
	if err := u.chown(h, name); err != nil {
		return err
	}
	if err := u.root.Chmod(name, fileMode(h)); err != nil {
		return err
	}
	if err := u.xattrs(h, name); err != nil {
		return err
	}
	t := modTime(h)
	return u.root.Chtimes(name, t, t)
}

func (u *unpacker) chown(h *tar.Header, name string) error {
	if !u.owner {
		return nil
	}
	uid, gid := ids(h)
	return u.root.Lchown(name, uid, gid)
}

func ids(h *tar.Header) (uid, gid int) {
	in := func(n int) int {
		if n < 0 || int64(n) >= math.MaxUint32 {
			return 0
		}
		return n
	}
	return in(h.Uid), in(h.Gid)
}

// modTime is the header's, within what every file system can hold.
func modTime(h *tar.Header) time.Time {
	if s := h.ModTime.Unix(); s < 0 || s > math.MaxInt32 {
		return time.Unix(0, 0)
	}
	return h.ModTime.Truncate(time.Second)
}

func fileMode(h *tar.Header) fs.FileMode {
	return h.FileInfo().Mode() & (fs.ModePerm | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)
}

// xattrs sets the attributes that images may have: a user's own, and
// capabilities. Those of overlayfs would let a layer hide what is not its own.
func (u *unpacker) xattrs(h *tar.Header, name string) error {
	const prefix = "SCHILY.xattr."
	for key, value := range h.PAXRecords {
		attr, ok := strings.CutPrefix(key, prefix)
		if !ok || strings.HasPrefix(attr, "user.overlay.") {
			continue
		}
		if attr != "security.capability" && !strings.HasPrefix(attr, "user.") {
			continue
		}
		if attr == "security.capability" && !u.owner {
			continue
		}
		err := u.at(name, func(dir int, base string) error {
			return unix.Lsetxattr(fmt.Sprintf("/proc/self/fd/%d/%s", dir, base), attr, []byte(value), 0)
		})
		if errors.Is(err, unix.ENOTSUP) || errors.Is(err, unix.EPERM) {
			continue // a file system without them, or a FIFO
		}
		if err != nil {
			return fmt.Errorf("attribute %s: %w", attr, err)
		}
	}
	return nil
}
