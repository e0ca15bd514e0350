package consensus

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft-wal/types"
	"golang.org/x/sys/unix"
)

// DiskOp is one kind of change to the disk.
type DiskOp string

// The changes a Disk makes.
const (
	DiskCreate   DiskOp = "create"
	DiskWrite    DiskOp = "write"
	DiskSync     DiskOp = "fsync"
	DiskSyncDir  DiskOp = "fsyncdir"
	DiskRename   DiskOp = "rename"
	DiskDelete   DiskOp = "delete"
	DiskSnapshot DiskOp = "snapshot" // the records of a snapshot file, many writes
)

// DiskEvent tells an observer of a change, before (Done false) and after it.
type DiskEvent struct {
	Op    DiskOp
	Path  string
	Bytes int
	Done  bool
}

// ErrTear is what an observer returns for a write to let its first half
// reach the file and then fail.
var ErrTear = errors.New("consensus: torn write")

// Disk is every access of a Node to its state folder. Observe, if set, sees
// each change; an error that it returns before a change fails the change.
// Fault tests and counters hang there. The zero value is the real disk.
type Disk struct {
	Observe func(DiskEvent) error
	// Slow, if set, is called before each append to the log and each write of
	// the stable store, while no lock is held: a test of slow disks sleeps
	// there, in virtual time too. Its time counts as the fsync's.
	Slow func()
	// Free, if set, says how much room is left instead of the file system.
	Free func() int64

	syncs  atomic.Uint64
	writes atomic.Uint64
	bytes  atomic.Uint64
	times  syncTimes
}

// DiskStats count what was written since the start.
type DiskStats struct {
	Writes, Bytes, Syncs uint64
	SyncP99              time.Duration // of the last 256 fsyncs of the log and the stable store
}

// Stats returns the counts so far.
func (d *Disk) Stats() DiskStats {
	return DiskStats{Writes: d.writes.Load(), Bytes: d.bytes.Load(), Syncs: d.syncs.Load(), SyncP99: d.times.p99()}
}

// delay is where a test's slow disk takes its time.
func (d *Disk) delay() {
	if d.Slow == nil {
		return
	}
	start := time.Now()
	d.Slow()
	d.times.add(time.Since(start))
}

// do runs one change between its two events.
func (d *Disk) do(op DiskOp, path string, n int, f func() error) error {
	e := DiskEvent{Op: op, Path: path, Bytes: n}
	if d.Observe != nil {
		if err := d.Observe(e); err != nil {
			return &fs.PathError{Op: string(op), Path: path, Err: err}
		}
	}
	if err := f(); err != nil {
		return err
	}
	switch op {
	case DiskSync, DiskSyncDir:
		d.syncs.Add(1)
	case DiskWrite:
		d.writes.Add(1)
		d.bytes.Add(uint64(n))
	}
	if d.Observe != nil {
		e.Done = true
		if err := d.Observe(e); err != nil {
			return &fs.PathError{Op: string(op), Path: path, Err: err}
		}
	}
	return nil
}

var _ types.VFS = (*Disk)(nil)

// ListDir implements types.VFS.
func (d *Disk) ListDir(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Create implements types.VFS: a new file with its space reserved, so that a
// disk that fills up is noticed here and not in the middle of a log.
func (d *Disk) Create(dir, name string, size uint64) (types.WritableFile, error) {
	path := filepath.Join(dir, name)
	var f *os.File
	err := d.do(DiskCreate, path, int(size), func() (err error) {
		f, err = os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		if err = reserve(f, int64(size)); err != nil {
			_ = f.Close()
			_ = os.Remove(path)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return &diskFile{d: d, f: f, fresh: true}, nil
}

func reserve(f *os.File, size int64) error {
	if size == 0 {
		return nil
	}
	err := unix.Fallocate(int(f.Fd()), 0, 0, size)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) {
		return f.Truncate(size)
	}
	if err != nil {
		return &fs.PathError{Op: "reserve", Path: f.Name(), Err: err}
	}
	return nil
}

// Delete implements types.VFS.
func (d *Disk) Delete(dir, name string) error {
	path := filepath.Join(dir, name)
	if err := d.do(DiskDelete, path, 0, func() error { return os.Remove(path) }); err != nil {
		return err
	}
	return d.syncDir(dir)
}

// OpenReader implements types.VFS.
func (d *Disk) OpenReader(dir, name string) (types.ReadableFile, error) {
	return os.Open(filepath.Join(dir, name))
}

// OpenWriter implements types.VFS.
func (d *Disk) OpenWriter(dir, name string) (types.WritableFile, error) {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	return &diskFile{d: d, f: f, fresh: true}, nil
}

func (d *Disk) syncDir(dir string) error {
	return d.do(DiskSyncDir, dir, 0, func() error {
		f, err := os.Open(dir)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		return f.Sync()
	})
}

func (d *Disk) rename(from, to string) error {
	if err := d.do(DiskRename, to, 0, func() error { return os.Rename(from, to) }); err != nil {
		return err
	}
	return d.syncDir(filepath.Dir(to))
}

// replace writes a small file durably: temporary file, fsync, rename, fsync
// of the folder.
func (d *Disk) replace(path string, data []byte) error {
	tmp := path + ".tmp"
	_ = os.Remove(tmp)
	f, err := d.Create(filepath.Dir(tmp), filepath.Base(tmp), 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, 0)
	if err == nil {
		err = f.(*diskFile).syncOnly()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(tmp)
		return err
	}
	return d.rename(tmp, path)
}

// syncFile makes a file's content durable and drops it from the page cache,
// so that the next read is of the disk.
func (d *Disk) syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := d.do(DiskSync, path, 0, f.Sync); err != nil {
		return err
	}
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
	return nil
}

// free returns the bytes that an ordinary user may still write.
func (d *Disk) free(dir string) (int64, error) {
	if d.Free != nil {
		return d.Free(), nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", dir, err)
	}
	return int64(st.Bavail) * int64(st.Bsize), nil //nolint:unconvert // Bsize is smaller on 32-bit machines
}

// fits tries whether size bytes can be had in the folder. What statfs says does
// not tell: what a file system keeps for root counts for some users only (5 % of
// an ext4), and what it keeps for itself for nobody.
func (d *Disk) fits(dir string, size int64) bool {
	path := filepath.Join(dir, "room.tmp")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return false
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, size)
	return errors.Join(err, f.Close(), os.Remove(path)) == nil
}

// diskFile is a file of the log or the stable store. Its fsyncs are timed.
type diskFile struct {
	d     *Disk
	f     *os.File
	fresh bool // the folder has not been synced since the file was made or opened
}

func (f *diskFile) ReadAt(b []byte, off int64) (int, error) { return f.f.ReadAt(b, off) }
func (f *diskFile) Close() error                            { return f.f.Close() }

func (f *diskFile) WriteAt(b []byte, off int64) (n int, err error) {
	err = f.d.do(DiskWrite, f.f.Name(), len(b), func() error {
		n, err = f.f.WriteAt(b, off)
		return err
	})
	if errors.Is(err, ErrTear) {
		_, _ = f.f.WriteAt(b[:len(b)/2], off)
		_ = f.d.Observe(DiskEvent{Op: DiskWrite, Path: f.f.Name(), Bytes: len(b) / 2, Done: true})
	}
	return n, err
}

// Sync is fdatasync: the size was reserved at creation, and where a write
// grows the file the kernel writes the size too. The folder is synced once.
func (f *diskFile) Sync() error {
	if err := f.syncOnly(); err != nil {
		return err
	}
	if !f.fresh {
		return nil
	}
	if err := f.d.syncDir(filepath.Dir(f.f.Name())); err != nil {
		return err
	}
	f.fresh = false
	return nil
}

func (f *diskFile) syncOnly() error {
	return f.d.do(DiskSync, f.f.Name(), 0, func() error {
		start := time.Now()
		for {
			err := unix.Fdatasync(int(f.f.Fd()))
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return &fs.PathError{Op: "fsync", Path: f.f.Name(), Err: err}
			}
			f.d.times.add(time.Since(start))
			return nil
		}
	})
}

// syncTimes are the durations of the newest fsyncs.
type syncTimes struct {
	mu   sync.Mutex
	ring [256]time.Duration
	n    int
}

func (s *syncTimes) add(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ring[s.n%len(s.ring)] = d
	s.n++
}

func (s *syncTimes) p99() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := min(s.n, len(s.ring))
	if n == 0 {
		return 0
	}
	sorted := slices.Clone(s.ring[:n])
	slices.Sort(sorted)
	return sorted[(n*99)/100]
}

// diskFault says whether an error is the disk's (full, read-only, failing),
// which may pass, and not a defect of what was asked.
func diskFault(err error) bool {
	for _, e := range []syscall.Errno{unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EIO, unix.EFBIG} {
		if errors.Is(err, e) {
			return true
		}
	}
	return errors.Is(err, io.ErrShortWrite) || errors.Is(err, ErrTear)
}
