package wasm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
)

// settleTime is how old a module without a name must be before it counts as
// one that nobody names: between a module and its name is a moment, in another
// process perhaps.
const settleTime = time.Hour

// names reads all name records; damaged ones are left to readName.
func (s *Store) names() ([]nameRecord, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "names"))
	if err != nil {
		return nil, fmt.Errorf("module store: %w", err)
	}
	var out []nameRecord
	for _, e := range entries {
		var r nameRecord
		b, err := atomicfile.Read(filepath.Join(s.dir, "names", e.Name()))
		if err == nil && json.Unmarshal(b, &r) == nil && validDigest(r.Digest) {
			out = append(out, r)
		}
	}
	return out, nil
}

// Named lists modules that have a name of their own here: name, digest, size.
func (s *Store) Named(each func(name, digest string, size int64, at time.Time)) error {
	recs, err := s.names()
	for _, r := range recs {
		if !strings.HasPrefix(r.Name, takenPrefix) {
			each(r.Name, r.Digest, r.Size, r.ImportedAt)
		}
	}
	return err
}

// NamesDir is the folder of the names: its time of change moves whenever Named
// lists something else.
func (s *Store) NamesDir() string { return filepath.Join(s.dir, "names") }

// Forget takes a name off a module; fs.ErrNotExist says that there is none.
func (s *Store) Forget(name string) error {
	if _, ok := s.readName(name); !ok {
		return fmt.Errorf("module %s: %w", name, fs.ErrNotExist)
	}
	if err := os.Remove(s.recordPath(name)); err != nil {
		return fmt.Errorf("module %s: %w", name, err)
	}
	return atomicfile.SyncDir(filepath.Join(s.dir, "names"))
}

// Collect removes modules that nobody needs, all of them: each can be had
// again from its file or image. Modules with a name that was given by hand
// stay, and what inUse lists: images as specs name them, digests of what runs.
func (s *Store) Collect(ctx context.Context, inUse []string) (freed int64, err error) {
	recs, err := s.names()
	if err != nil {
		return 0, err
	}
	keep := map[string]bool{}
	images := map[string]bool{}
	for _, u := range inUse {
		images[u] = true
		if _, digest, ok := strings.Cut(u, "@"); ok {
			keep[digest] = true
		} else {
			keep[u] = true
		}
	}
	for _, r := range recs {
		byHand := !strings.HasPrefix(r.Name, takenPrefix) && !strings.HasPrefix(r.Name, "file://")
		if byHand || images[r.Name] || keep[r.Digest] {
			keep[r.Digest] = true
		} else if err := os.Remove(s.recordPath(r.Name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return 0, fmt.Errorf("module store: %w", err)
		}
	}
	blobs, err := os.ReadDir(s.blobs())
	if err != nil {
		return 0, fmt.Errorf("module store: %w", err)
	}
	for _, b := range blobs {
		if ctx.Err() != nil {
			return freed, fmt.Errorf("module store: %w", context.Cause(ctx))
		}
		// A damaged copy is kept as long as its module is wanted: it tells why
		// that is not here.
		digest := digestPrefix + strings.TrimSuffix(b.Name(), atomicfile.DamagedSuffix)
		if keep[digest] || !validDigest(digest) {
			continue
		}
		path := filepath.Join(s.blobs(), b.Name())
		var st unix.Stat_t
		if unix.Lstat(path, &st) != nil || s.clock.Now().Sub(time.Unix(st.Ctim.Unix())) < settleTime {
			continue
		}
		if err := os.Remove(path); err != nil {
			return freed, fmt.Errorf("module store: %w", err)
		}
		if st.Nlink == 1 {
			freed += st.Size
		}
	}
	return freed, nil
}

// recordPath is where a name's record is.
func (s *Store) recordPath(name string) string {
	path := s.namePath(name)
	if len(filepath.Base(path)) > maxFileName {
		sum := sha256.Sum256([]byte(name))
		return filepath.Join(s.dir, "names", "long-"+hex.EncodeToString(sum[:])+".json")
	}
	return path
}

// maxFileName is NAME_MAX.
const maxFileName = 255
