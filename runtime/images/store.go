package images

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/clock"
	"github.com/dunlin-project/dunlin/internal/scratch"
)

// What a power cut may cost a download: on a fast link bytes, of which a write
// each would wear the card out; on a slow one time, which is dearer there.
const (
	checkpointEvery = 16 << 20
	checkpointAfter = 15 * time.Second
)

// Config of a Store.
type Config struct {
	Dir      string   // "/var/lib/dunlin/images"
	Platform Platform // zero is Local()
	// Reserve is how many bytes of the file system stay free; 0 is 64 MiB.
	Reserve int64
	Clock   clock.Clock // nil is the system's
	Logger  *slog.Logger
}

// Store keeps images. It is safe for concurrent use, by several processes too.
type Store struct {
	cfg Config
	log *slog.Logger

	mu    sync.Mutex
	whole map[string]bool // layers that were compared with their record, by its key
	// stands are layers, by chainKey, that are on those below them as they are
	// on their own.
	stands map[string]bool
	busy   map[string]*turn
	held   map[string]int // blobs of pulls that are under way

	checkpoint int64             // bytes that a power cut may cost a download
	pauseUnit  time.Duration     // between two connections of a download, doubled each time
	step       func(name string) // told before what a power cut may undo; for tests
}

// nameRecord is what a name means.
type nameRecord struct {
	Name       string    `json:"name"`
	Digest     string    `json:"digest"` // of a manifest, or of an index
	Imported   bool      `json:"imported,omitempty"`
	AddedAt    time.Time `json:"addedAt"`
	LastUsedAt time.Time `json:"lastUsedAt"`
}

// Open opens, or makes, the store.
func Open(cfg Config) (*Store, error) {
	if cfg.Platform == (Platform{}) {
		cfg.Platform = Local()
	}
	if cfg.Reserve == 0 {
		cfg.Reserve = 64 << 20
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.System
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Store{cfg: cfg, log: cfg.Logger, whole: map[string]bool{}, stands: map[string]bool{}, busy: map[string]*turn{}, held: map[string]int{}, checkpoint: checkpointEvery, pauseUnit: firstPause, step: func(string) {}}
	for _, d := range []string{"blobs/sha256", "names", "layers", "l", "partial", "signatures", "access", "tmp"} {
		// Nobody else on the machine may reach the setuid programs in layers, nor
		// read the images of one pod's owner.
		if err := os.MkdirAll(s.path(d), 0o700); err != nil {
			return nil, fmt.Errorf("image store: %w", err)
		}
	}
	scratch.Sweep(s.path("tmp"), "*")
	for _, d := range []string{"names", "layers", "partial", "blobs/sha256", "access"} {
		atomicfile.Sweep(s.path(d))
	}
	s.sweepPartial()
	s.sweepSignatures()
	return s, s.sweepLayers()
}

// sweepPartial removes records of downloads that became blobs just before a
// power cut.
func (s *Store) sweepPartial() {
	records, _ := filepath.Glob(s.path("partial", "*"+stateSuffix))
	for _, r := range records {
		if _, err := os.Stat(strings.TrimSuffix(r, stateSuffix)); errors.Is(err, fs.ErrNotExist) {
			_ = os.Remove(r)
		}
	}
}

// sweepLayers removes unpacked layers that have no record (any more), once a
// boot of the machine: until then a container may run on them.
func (s *Store) sweepLayers() error {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil //nolint:nilerr // without boots to tell apart nothing is swept
	}
	mark := s.path("boot")
	if last, err := atomicfile.Read(mark); err == nil && bytes.Equal(last, boot) {
		return nil
	}
	unlock, err := s.lock(unix.LOCK_EX | unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil // somebody adds: next time
	}
	if err != nil {
		return err
	}
	defer unlock()
	keep := map[string]bool{}
	records, err := os.ReadDir(s.path("layers"))
	if err != nil {
		return fmt.Errorf("image store: %w", err)
	}
	for _, e := range records {
		if rec, err := readRecord[layerRecord](s.path("layers", e.Name())); err == nil {
			keep[rec.Dir] = true
		}
	}
	dirs, err := os.ReadDir(s.path("l"))
	if err != nil {
		return fmt.Errorf("image store: %w", err)
	}
	for _, d := range dirs {
		if n, err := strconv.ParseInt(d.Name(), layerBase, 64); err != nil || strconv.FormatInt(n, layerBase) != d.Name() {
			continue // not ours
		}
		if !keep[d.Name()] {
			if err := os.RemoveAll(s.path("l", d.Name())); err != nil {
				return fmt.Errorf("image store: %w", err)
			}
		}
	}
	return atomicfile.Write(mark, boot, 0o600)
}

// Platform is the one that images are chosen for.
func (s *Store) Platform() Platform { return s.cfg.Platform }

func (s *Store) path(elem ...string) string {
	return filepath.Join(append([]string{s.cfg.Dir}, elem...)...)
}

func (s *Store) blobPath(digest string) string { return s.path("blobs", "sha256", hexOf(digest)) }

func (s *Store) namePath(name string) string { return s.path("names", hexOf(digestOf([]byte(name)))) }

// lock takes the store for this process and others: shared while something is
// added (a blob and what names it), exclusive while things are removed.
func (s *Store) lock(how int) (unlock func(), err error) {
	f, err := os.OpenFile(s.path("lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("image store: %w", err)
	}
	if err := scratch.Lock(f, how); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock image store: %w", err)
	}
	return func() { _ = f.Close() }, nil
}

// turn is a place in the line for one thing of the store.
type turn struct {
	ch    chan struct{}
	users int
}

// single gives the caller one thing of the store for itself, in this process.
func (s *Store) single(ctx context.Context, key string) (release func(), err error) {
	return s.singleOr(ctx, key, func() {})
}

// singleOr is single, and calls waits before it waits.
func (s *Store) singleOr(ctx context.Context, key string, waits func()) (release func(), err error) {
	s.mu.Lock()
	t := s.busy[key]
	if t == nil {
		t = &turn{ch: make(chan struct{}, 1)}
		s.busy[key] = t
	}
	t.users++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if t.users--; t.users == 0 {
			delete(s.busy, key)
		}
	}
	done := func() {
		<-t.ch
		leave()
	}
	select {
	case t.ch <- struct{}{}:
		return done, nil
	default:
		waits()
	}
	select {
	case t.ch <- struct{}{}:
		return done, nil
	case <-ctx.Done():
		leave()
		return nil, fmt.Errorf("image store: %w", context.Cause(ctx))
	}
}

func (s *Store) writeName(r nameRecord) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("image name: %w", err)
	}
	s.step("write name")
	return atomicfile.Write(s.namePath(r.Name), b, 0o600)
}

// readName returns what a name means; a damaged record is set aside and
// counts as unknown.
func (s *Store) readName(name string) (nameRecord, bool) {
	path := s.namePath(name)
	r, err := readRecord[nameRecord](path)
	if err == nil && r.Name == name && validDigest(r.Digest) {
		return r, true
	}
	if !errors.Is(err, fs.ErrNotExist) {
		s.setAside(path, err)
	}
	return nameRecord{}, false
}

func readRecord[T any](path string) (r T, err error) {
	b, err := atomicfile.Read(path)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, fmt.Errorf("%s: %w: %w", path, atomicfile.ErrCorrupt, err)
	}
	return r, nil
}

func (s *Store) setAside(path string, why error) {
	if _, err := atomicfile.Quarantine(path); err == nil {
		s.log.Warn("damaged file of the image store set aside", "path", path, "err", why)
	}
}

// errMissing says that a blob is not here.
var errMissing = errors.New("not on this node")

// readBlob returns a small blob (manifest, index, config), verified.
func (s *Store) readBlob(digest string, limit int64) ([]byte, error) {
	f, err := os.Open(s.blobPath(digest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("blob %s: %w", digest, errMissing)
	}
	if err != nil {
		return nil, fmt.Errorf("blob: %w", err)
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		return nil, fmt.Errorf("blob %s is larger than %d bytes", digest, limit)
	}
	if err == nil && digestOf(b) != digest {
		err = atomicfile.ErrCorrupt
	}
	if err != nil {
		s.setAside(s.blobPath(digest), err)
		return nil, fmt.Errorf("blob %s: %w: %w", digest, errMissing, err)
	}
	return b, nil
}

// hasBlob says that the blob is here, of that size (-1 is any). What it holds
// is compared when it is read.
func (s *Store) hasBlob(digest string, size int64) bool {
	st, err := os.Stat(s.blobPath(digest))
	return err == nil && st.Mode().IsRegular() && (size < 0 || st.Size() == size)
}

// putBlob keeps a small blob.
func (s *Store) putBlob(b []byte) (string, error) {
	d := digestOf(b)
	if old, err := os.ReadFile(s.blobPath(d)); err == nil && digestOf(old) == d {
		return d, nil
	}
	s.step("write description")
	return d, atomicfile.WriteRaw(s.blobPath(d), b, 0o600)
}

// keepBlob gives a whole, verified file the name of its digest.
func (s *Store) keepBlob(f *os.File, digest string) error {
	s.step("sync blob")
	if err := f.Sync(); err != nil {
		return fmt.Errorf("keep blob: %w", err)
	}
	s.step("rename blob")
	if err := os.Rename(f.Name(), s.blobPath(digest)); err != nil {
		return fmt.Errorf("keep blob: %w", err)
	}
	s.step("sync blobs")
	return atomicfile.SyncDir(s.path("blobs", "sha256"))
}

// SpaceError says that the disk has too little room.
type SpaceError struct {
	Dir              string
	Need, Free, Keep int64 // bytes
}

// Error implements error.
func (e *SpaceError) Error() string {
	return fmt.Sprintf("not enough space in %s: %s needed, %s free, of which %s stay free", e.Dir, mib(e.Need), mib(e.Free), mib(e.Keep))
}

func mib(n int64) string {
	if n < 1<<20 {
		return fmt.Sprintf("%d KiB", (n+1023)>>10)
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

// room refuses what would leave less than the reserve.
func (s *Store) room(need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.cfg.Dir, &st); err != nil {
		return fmt.Errorf("free space of %s: %w", s.cfg.Dir, err)
	}
	free := int64(st.Bavail) * int64(st.Bsize) //nolint:unconvert // an int32 on arm
	if need > free-s.cfg.Reserve {
		return &SpaceError{Dir: s.cfg.Dir, Need: need, Free: free, Keep: s.cfg.Reserve}
	}
	return nil
}
