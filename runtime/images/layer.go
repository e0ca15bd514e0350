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
	// Key names the record: the diff id where the layer stands for itself, else
	// chainKey's: it was unpacked as the layers below it wanted. Records of
	// earlier versions have none.
	Key string `json:"key,omitempty"`
	// Implicit are folders that it has only because something is in them: what
	// they are in the layers below decides whether it stands for itself there.
	Implicit []string `json:"implicit,omitempty"`
}

func (s *Store) layerPath(key string) string { return s.path("layers", hexOf(key)) }

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
	if dirs, ok := s.placed(diffIDs); ok {
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
	made, err := s.unpackMissing(ctx, diffIDs, blobs)
	defer func() {
		for _, l := range made {
			_ = os.RemoveAll(l.tmp) // what was placed has another name
			l.release()
		}
	}()
	if err != nil {
		return nil, err
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
	dirs, ok := s.placed(diffIDs)
	if !ok {
		return nil, errors.New("a layer was just unpacked and is not there")
	}
	return dirs, nil
}

// unpackMissing unpacks what is not here, each layer on those below it.
func (s *Store) unpackMissing(ctx context.Context, diffIDs, blobs []string) (made []unpackedLayer, err error) {
	var below view // the top one first
	byKey := map[string]unpackedLayer{}
	for i, diffID := range diffIDs {
		dir, ok := s.find(diffIDs[:i+1], below)
		if ok {
			dir = s.path("l", dir)
		} else if l, twice := byKey[diffID]; twice && below.fits(l.rec.Implicit) {
			dir = l.tmp // an image may have a layer twice
		} else {
			l, err := s.unpackBlob(ctx, diffIDs[:i+1], blobs[i], below)
			if err != nil {
				return made, &layerError{blobs[i], err}
			}
			made = append(made, l)
			byKey[l.rec.Key] = l
			dir = l.tmp
		}
		below = append(view{dir}, below...)
	}
	return made, nil
}

// placed lists the folders of an image's layers, if all are here and whole.
func (s *Store) placed(diffIDs []string) (dirs []string, ok bool) {
	var below view
	for i := range diffIDs {
		dir, ok := s.find(diffIDs[:i+1], below)
		if !ok {
			return nil, false
		}
		dirs = append(dirs, dir)
		below = append(view{s.path("l", dir)}, below...)
	}
	return dirs, true
}

// find says where the layer with the last diff id is, as it must be on top of
// the others, if it is here and whole.
func (s *Store) find(diffIDs []string, below view) (dir string, ok bool) {
	chain, diffID := chainKey(diffIDs), diffIDs[len(diffIDs)-1]
	s.mu.Lock()
	stands := s.stands[chain]
	s.mu.Unlock()
	if !stands {
		if rec, ok := s.unpacked(chain, diffID); ok {
			return rec.Dir, true
		}
	}
	rec, ok := s.unpacked(diffID, diffID)
	if !ok {
		return "", false
	}
	if !stands {
		if !below.fits(rec.Implicit) {
			return "", false
		}
		s.mu.Lock()
		s.stands[chain] = true // what layers hold never changes
		s.mu.Unlock()
	}
	return rec.Dir, true
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
	if err := atomicfile.Write(s.layerPath(l.rec.Key), b, 0o600); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.whole[l.rec.Key] = true
	return nil
}

// unpacked is the record of a layer, if it is here and whole.
func (s *Store) unpacked(key, diffID string) (layerRecord, bool) {
	path := s.layerPath(key)
	rec, err := readRecord[layerRecord](path)
	if err == nil && (rec.DiffID != diffID || rec.Key != key && rec.Key != "" || rec.Dir == "" || rec.Dir != filepath.Base(rec.Dir)) {
		err = atomicfile.ErrCorrupt
	}
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			s.setAside(path, err)
		}
		return rec, false
	}
	s.mu.Lock()
	known := s.whole[key]
	s.mu.Unlock()
	if known {
		return rec, true
	}
	tree, err := treeHash(s.path("l", rec.Dir))
	if err == nil && tree != rec.Tree {
		err = errors.New("it is not what was unpacked")
	}
	if err != nil {
		s.log.Warn("a damaged layer is unpacked again", "layer", diffID, "folder", rec.Dir, "err", err)
		s.setAside(path, err)
		return rec, false
	}
	s.mu.Lock()
	s.whole[key] = true
	s.mu.Unlock()
	return rec, true
}

// unpackBlob unpacks the layer with the last diff id into a temporary folder.
func (s *Store) unpackBlob(ctx context.Context, diffIDs []string, blob string, below view) (l unpackedLayer, err error) {
	diffID := diffIDs[len(diffIDs)-1]
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
	res, err := s.unpackTo(ctx, tmp, below, io.TeeReader(f, sum))
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
	l = unpackedLayer{tmp: tmp, release: release, rec: layerRecord{DiffID: diffID, Key: diffID, Implicit: res.implicit, Entries: res.entries, Bytes: res.bytes, Devices: res.devices}}
	if res.depends || len(res.implicit) > mostImplicit {
		l.rec.Key, l.rec.Implicit = chainKey(diffIDs), nil
	}
	l.rec.Tree, err = treeHash(tmp)
	return l, err
}

// mostImplicit bounds a record.
const mostImplicit = 1000

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
