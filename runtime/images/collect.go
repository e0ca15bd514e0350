package images

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/scratch"
)

// partialKept is how long a part of a blob that nobody fetches any more stays.
const partialKept = 24 * time.Hour

// Listed is what the store says of one image.
type Listed struct {
	Name       string
	Digest     string
	Imported   bool
	Module     bool
	Size       int64 // bytes of blobs
	AddedAt    time.Time
	LastUsedAt time.Time
	Whole      bool // all of it is here
}

// List tells what is here, by name.
func (s *Store) List() ([]Listed, error) {
	recs, err := s.names()
	if err != nil {
		return nil, err
	}
	var out []Listed
	for _, r := range recs {
		l := Listed{Name: r.Name, Digest: r.Digest, Imported: r.Imported, AddedAt: r.AddedAt, LastUsedAt: r.LastUsedAt}
		d, err := s.describe(r.Name, r.Digest, false)
		if err != nil { // of a module's index there is no entry for this platform
			d, err = s.describe(r.Name, r.Digest, true)
		}
		if err == nil {
			l.Size, l.Module, l.Whole = d.size(), d.config == nil, true
			for i := range d.m.Layers {
				l.Whole = l.Whole && s.hasBlob(d.m.Layers[i].Digest.String(), d.m.Layers[i].Size)
			}
		}
		out = append(out, l)
	}
	slices.SortFunc(out, func(a, b Listed) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// NamesDir is the folder of the names: its time of change moves whenever List
// tells something else.
func (s *Store) NamesDir() string { return s.path("names") }

func (s *Store) names() ([]nameRecord, error) {
	entries, err := os.ReadDir(s.path("names"))
	if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	var out []nameRecord
	for _, e := range entries {
		if len(e.Name()) != hexLen {
			continue // temporary, or set aside
		}
		path := s.path("names", e.Name())
		r, err := readRecord[nameRecord](path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			s.setAside(path, err)
		case validDigest(r.Digest) && s.namePath(r.Name) == path:
			out = append(out, r)
		}
	}
	return out, nil
}

const hexLen = 64

// Forget takes a name off an image. What it named stays until Collect needs
// its space, so that nothing is taken from under a container that runs.
// fs.ErrNotExist says that there is no such name.
func (s *Store) Forget(name string) error {
	path := s.namePath(name)
	if !validDigest(name) {
		ref, err := ParseRef(name)
		if err != nil {
			return err
		}
		path = s.namePath(ref.Name())
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("image %s: %w", name, err)
	}
	return atomicfile.SyncDir(s.path("names"))
}

// used notes that an image was asked for, once a day at most.
func (s *Store) used(name string) {
	r, ok := s.readName(name)
	now := s.cfg.Clock.Now().UTC()
	if !ok || now.Sub(r.LastUsedAt) < 24*time.Hour {
		return
	}
	r.LastUsedAt = now
	if err := s.writeName(r); err != nil {
		s.log.Warn("the use of an image cannot be noted", "image", name, "err", err)
	}
}

// Collected is what Collect removed.
type Collected struct {
	Names []string
	Freed int64
}

// Collect removes what nobody needs until want bytes are free that were not:
// first what no name and no use reaches, then images by the time of their last
// use. inUse lists images as specs name them, and digests of what runs; of
// those, of what was imported by hand, and of pulls under way nothing is
// taken. While somebody else adds to the store nothing happens.
func (s *Store) Collect(ctx context.Context, inUse []string, want int64) (out Collected, err error) {
	unlock, err := s.lock(unix.LOCK_EX | unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return out, nil
	}
	if err != nil {
		return out, err
	}
	defer unlock()
	recs, err := s.names()
	if err != nil {
		return out, err
	}
	names, digests := map[string]bool{}, map[string]bool{}
	for _, u := range inUse {
		if validDigest(u) {
			digests[u] = true
		} else if ref, err := ParseRef(u); err == nil {
			names[ref.Name()] = true
			digests[ref.Digest] = true
		}
	}
	var free []nameRecord
	for _, r := range recs {
		if r.Imported || names[r.Name] || digests[r.Digest] {
			digests[r.Digest] = true
		} else {
			free = append(free, r)
		}
	}
	slices.SortFunc(free, func(a, b nameRecord) int { return b.LastUsedAt.Compare(a.LastUsedAt) })
	for {
		roots := []string{}
		for d := range digests {
			roots = append(roots, d)
		}
		for _, r := range free {
			roots = append(roots, r.Digest)
		}
		freed, err := s.removeUnreached(s.reached(roots))
		out.Freed += freed
		if err != nil || out.Freed >= want || len(free) == 0 || ctx.Err() != nil {
			return out, err
		}
		oldest := free[len(free)-1]
		free = free[:len(free)-1]
		if err := os.Remove(s.namePath(oldest.Name)); err != nil {
			return out, fmt.Errorf("image %s: %w", oldest.Name, err)
		}
		out.Names = append(out.Names, oldest.Name)
	}
}

// reached lists the blobs and layers (by diff id, and by chainKey) that the roots need.
func (s *Store) reached(roots []string) map[string]bool {
	seen := map[string]bool{}
	s.mu.Lock()
	for d := range s.held {
		seen[d] = true
	}
	s.mu.Unlock()
	var visit func(digest string, depth int)
	visit = func(digest string, depth int) {
		if depth > maxNesting || !validDigest(digest) {
			return
		}
		seen[digest] = true
		raw, err := s.readBlob(digest, maxManifest)
		if err != nil {
			return
		}
		if isIndex(raw) {
			ix, err := v1.ParseIndexManifest(bytes.NewReader(raw))
			for i := 0; err == nil && i < len(ix.Manifests); i++ {
				if d := ix.Manifests[i].Digest.String(); s.hasBlob(d, -1) {
					visit(d, depth+1)
				}
			}
			return
		}
		m, err := v1.ParseManifest(bytes.NewReader(raw))
		if err != nil {
			return
		}
		seen[m.Config.Digest.String()] = true
		for i := range m.Layers {
			seen[m.Layers[i].Digest.String()] = true
		}
		if raw, err := s.readBlob(m.Config.Digest.String(), maxConfig); err == nil {
			if c, err := v1.ParseConfigFile(bytes.NewReader(raw)); err == nil {
				var chain []string
				for _, d := range c.RootFS.DiffIDs {
					chain = append(chain, d.String())
					seen[d.String()], seen[chainKey(chain)] = true, true
				}
			}
		}
	}
	for _, r := range roots {
		visit(r, 0)
	}
	return seen
}

// removeUnreached removes blobs, layers and old parts. A layer's record goes
// first: what is left by a power cut goes at the next boot.
func (s *Store) removeUnreached(keep map[string]bool) (freed int64, err error) {
	records, err := os.ReadDir(s.path("layers"))
	if err != nil {
		return 0, fmt.Errorf("image store: %w", err)
	}
	for _, e := range records {
		key := digestPrefix + e.Name()
		if keep[key] || len(e.Name()) != hexLen {
			continue
		}
		rec, err := readRecord[layerRecord](s.layerPath(key))
		if err != nil || rec.Dir == "" || rec.Dir != filepath.Base(rec.Dir) {
			continue
		}
		if err := errors.Join(os.Remove(s.layerPath(key)), atomicfile.SyncDir(s.path("layers")), os.RemoveAll(s.path("l", rec.Dir))); err != nil {
			return freed, fmt.Errorf("remove layer: %w", err)
		}
		s.mu.Lock()
		delete(s.whole, key)
		s.mu.Unlock()
		freed += rec.Bytes
	}
	blobs, err := os.ReadDir(s.path("blobs", "sha256"))
	if err != nil {
		return freed, fmt.Errorf("image store: %w", err)
	}
	for _, e := range blobs {
		if keep[digestPrefix+e.Name()] || len(e.Name()) != hexLen {
			continue
		}
		n, err := s.removeFile(s.path("blobs", "sha256", e.Name()))
		if err != nil {
			return freed, err
		}
		freed += n
	}
	grants, err := os.ReadDir(s.path("access"))
	if err != nil {
		return freed, fmt.Errorf("image store: %w", err)
	}
	for _, e := range grants {
		if !keep[digestPrefix+e.Name()] && len(e.Name()) == hexLen {
			_ = os.Remove(s.path("access", e.Name())) // of nothing that is here
		}
	}
	return freed + s.removeParts(keep), nil
}

// removeFile removes a blob; one that has a second name (a module) frees
// nothing.
func (s *Store) removeFile(path string) (int64, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return 0, fmt.Errorf("remove blob: %w", err)
	}
	if err := os.Remove(path); err != nil {
		return 0, fmt.Errorf("remove blob: %w", err)
	}
	if st.Nlink > 1 {
		return 0, nil
	}
	return st.Size, nil
}

// removeParts removes parts of blobs that nobody has fetched for a day.
func (s *Store) removeParts(keep map[string]bool) (freed int64) {
	parts, err := os.ReadDir(s.path("partial"))
	if err != nil {
		return 0
	}
	for _, e := range parts {
		info, err := e.Info()
		if err != nil || len(e.Name()) != hexLen || keep[digestPrefix+e.Name()] || time.Since(info.ModTime()) < partialKept {
			continue
		}
		path := s.path("partial", e.Name())
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		if scratch.Lock(f, unix.LOCK_EX|unix.LOCK_NB) == nil {
			_ = os.Remove(statePath(path))
			_ = os.Remove(path)
			freed += info.Size()
		}
		_ = f.Close()
	}
	return freed
}
