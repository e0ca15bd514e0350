package images

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/scratch"
)

// layerRecord says where a layer is unpacked, and what was unpacked. It is
// written last: without it there is no layer.
type layerRecord struct {
	DiffID  string `json:"diffID"`
	Dir     string `json:"dir"`
	Entries int    `json:"entries"`
	Bytes   int64  `json:"bytes"`
	Devices int    `json:"devices,omitempty"` // left out
	Tree    string `json:"tree"`              // hash of names, types, modes, owners, sizes and times
}

func (s *Store) layerPath(diffID string) string { return s.path("layers", hexOf(diffID)) }

// layerError is what is wrong with one layer.
type layerError struct {
	blob string
	err  error
}

func (e *layerError) Error() string { return fmt.Sprintf("layer %.19s: %v", e.blob, e.err) }
func (e *layerError) Unwrap() error { return e.err }

// unpackedLayer is one that has no name yet.
type unpackedLayer struct {
	rec     layerRecord
	tmp     string
	release func()
}

// layers gives the folders of an image's layers, in its order, and unpacks
// from blobs what is not unpacked: one image at a time, and all its layers are
// made durable by one call. errMissing says that a blob is not here, or is
// damaged.
func (s *Store) layers(ctx context.Context, diffIDs, blobs []string) ([]string, error) {
	if dirs, missing := s.placed(diffIDs); len(missing) == 0 {
		return dirs, nil
	}
	release, err := s.single(ctx, "unpack")
	if err != nil {
		return nil, err
	}
	defer release()
	// Between unpacking and the records nothing may be removed.
	unlock, err := s.lock(unix.LOCK_SH)
	if err != nil {
		return nil, err
	}
	defer unlock()
	_, missing := s.placed(diffIDs)
	var made []unpackedLayer
	defer func() {
		for _, l := range made {
			_ = os.RemoveAll(l.tmp) // what was placed has another name
			l.release()
		}
	}()
	for _, i := range missing {
		l, err := s.unpackBlob(ctx, diffIDs[i], blobs[i])
		if err != nil {
			return nil, &layerError{blobs[i], err}
		}
		made = append(made, l)
	}
	s.step("sync layer")
	if err := syncFS(s.path("tmp")); err != nil {
		return nil, err
	}
	for _, l := range made {
		if err := s.settle(l); err != nil {
			return nil, err
		}
	}
	dirs, missing := s.placed(diffIDs)
	if len(missing) > 0 {
		return nil, fmt.Errorf("layer %s was just unpacked and is not there", diffIDs[missing[0]])
	}
	return dirs, nil
}

// placed lists the folders of layers that are here and whole, and which are
// not (of a layer that an image has twice, one).
func (s *Store) placed(diffIDs []string) (dirs []string, missing []int) {
	seen := map[string]string{}
	for i, d := range diffIDs {
		dir, known := seen[d]
		if !known {
			var ok bool
			if dir, ok = s.unpacked(d); !ok {
				missing = append(missing, i)
			}
			seen[d] = dir
		}
		dirs = append(dirs, dir)
	}
	return dirs, missing
}

// settle gives an unpacked layer its folder and its record.
func (s *Store) settle(l unpackedLayer) error {
	var err error
	if l.rec.Dir, err = s.place(l.tmp); err != nil {
		return err
	}
	s.step("write layer record")
	b, err := json.Marshal(l.rec)
	if err != nil {
		return fmt.Errorf("layer record: %w", err)
	}
	if err := atomicfile.Write(s.layerPath(l.rec.DiffID), b, 0o600); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.whole[l.rec.DiffID] = true
	return nil
}

// unpacked says where the layer is, if it is here and whole.
func (s *Store) unpacked(diffID string) (string, bool) {
	path := s.layerPath(diffID)
	rec, err := readRecord[layerRecord](path)
	if err == nil && (rec.DiffID != diffID || rec.Dir == "" || rec.Dir != filepath.Base(rec.Dir)) {
		err = atomicfile.ErrCorrupt
	}
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			s.setAside(path, err)
		}
		return "", false
	}
	s.mu.Lock()
	known := s.whole[diffID]
	s.mu.Unlock()
	if known {
		return rec.Dir, true
	}
	tree, err := treeHash(s.path("l", rec.Dir))
	if err == nil && tree != rec.Tree {
		err = errors.New("it is not what was unpacked")
	}
	if err != nil {
		s.log.Warn("a damaged layer is unpacked again", "layer", diffID, "folder", rec.Dir, "err", err)
		s.setAside(path, err)
		return "", false
	}
	s.mu.Lock()
	s.whole[diffID] = true
	s.mu.Unlock()
	return rec.Dir, true
}

// unpackBlob unpacks into a temporary folder.
func (s *Store) unpackBlob(ctx context.Context, diffID, blob string) (l unpackedLayer, err error) {
	f, err := os.Open(s.blobPath(blob))
	if errors.Is(err, fs.ErrNotExist) {
		return l, fmt.Errorf("blob %s: %w", blob, errMissing)
	}
	if err != nil {
		return l, fmt.Errorf("layer: %w", err)
	}
	defer func() { _ = f.Close() }()
	tmp, release, err := scratch.Folder(s.path("tmp"), "layer-*")
	if err != nil {
		return l, fmt.Errorf("layer: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(tmp)
			release()
		}
	}()
	sum := sha256.New()
	res, err := s.unpackTo(ctx, tmp, io.TeeReader(f, sum))
	if err == nil && res.diffID != diffID {
		err = fmt.Errorf("its content has digest %s, and the image's config says %s", res.diffID, diffID)
	}
	// The blob was verified when it came; a disk that lost it since shows here.
	if _, cerr := io.Copy(sum, f); cerr == nil && ctx.Err() == nil && digestPrefix+hex.EncodeToString(sum.Sum(nil)) != blob {
		s.setAside(s.blobPath(blob), atomicfile.ErrCorrupt)
		return l, fmt.Errorf("blob %s is damaged: %w", blob, errMissing)
	}
	if err != nil {
		return l, err
	}
	if res.devices > 0 {
		s.log.Info("device files of a layer were left out", "layer", blob, "devices", res.devices)
	}
	l = unpackedLayer{tmp: tmp, release: release, rec: layerRecord{DiffID: diffID, Entries: res.entries, Bytes: res.bytes, Devices: res.devices}}
	l.rec.Tree, err = treeHash(tmp)
	return l, err
}

// layerBase is that of the numbers that are the names of layers' folders.
const layerBase = 36

// place moves an unpacked layer to the first free short name.
func (s *Store) place(tmp string) (string, error) {
	for n := int64(0); ; n++ {
		name := strconv.FormatInt(n, layerBase)
		s.step("place layer")
		err := unix.Renameat2(unix.AT_FDCWD, tmp, unix.AT_FDCWD, s.path("l", name), unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("layer: rename: %w", err)
		}
		return name, atomicfile.SyncDir(s.path("l"))
	}
}

// syncFS makes all of a folder's file system durable: one call instead of one
// for each of thousands of files.
func syncFS(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	defer func() { _ = d.Close() }()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", dir, err)
	}
	return nil
}

// treeHash is a hash of everything about a tree but the files' content.
func treeHash(dir string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
		rel := strings.TrimPrefix(p, dir)
		link := ""
		if d.Type()&fs.ModeSymlink != 0 {
			if link, err = os.Readlink(p); err != nil {
				return err
			}
		}
		size, mtime := st.Size, st.Mtim.Sec
		if d.IsDir() {
			size = 0 // differs between file systems
		}
		if d.Type()&fs.ModeSymlink != 0 || rel == "" {
			mtime = 0
		}
		_, err = fmt.Fprintf(h, "%q %o %d %d %d %d %d %q\n", rel, st.Mode, st.Uid, st.Gid, st.Rdev, size, mtime, link)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("look at layer: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
