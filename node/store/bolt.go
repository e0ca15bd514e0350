package store

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync/atomic"
	"time"

	"go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/spare"
	"github.com/dunlin-project/dunlin/wire"
)

const (
	bucketMeta       = "meta"
	bucketAssignment = "assignment"
	bucketObjects    = "objects"
	bucketPods       = "pods"
	bucketGone       = "gone"

	keyHeader = "header"
	keyFormat = "format"
	keyBoots  = "boots"

	// format rises only when an older program must not touch the file.
	format = 1
)

var buckets = []string{bucketMeta, bucketAssignment, bucketObjects, bucketPods, bucketGone}

// Bolt is the Store on disk.
type Bolt struct {
	db       *bbolt.DB
	seal     *Seal
	pageSize int
	boots    uint64
	commits  atomic.Uint64
	failed   atomic.Bool // the last write
	spare    *spare.File
}

// spareBytes are kept aside for a full disk: room for the records of many
// pods on their way out.
const spareBytes = 512 << 10

// update commits a transaction, synced, and counts it; in the space that was
// kept aside when there is no other.
func (b *Bolt) update(f func(tx *bbolt.Tx) error) error {
	err := b.db.Update(f)
	if full(err) && b.spare.Release() {
		err = b.db.Update(f)
	} else if err == nil {
		b.spare.Renew()
	}
	if err == nil {
		b.commits.Add(1)
	}
	b.failed.Store(err != nil)
	return err
}

// Check implements Store.
func (b *Bolt) Check() error {
	if !b.failed.Load() {
		return nil
	}
	return b.update(func(*bbolt.Tx) error { return nil })
}

// Open opens or makes the database at path, waiting at most wait for another
// process to let go of it. A damaged file is moved aside (path + ".damaged")
// with one clear line, and an empty database takes its place: the pods are
// learnt again from the control plane, and what runs is adopted. Secrets are
// kept under seal; those of a file from before that are sealed at once.
func Open(path string, seal *Seal, wait time.Duration, log *slog.Logger) (*Bolt, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("open node database: %w", err)
	}
	if st, err := os.Stat(path); err == nil && st.Size() == 0 {
		log.Warn("node database is empty, as after a power cut while it was made: pods are learnt again and running ones adopted", "path", path)
	}
	b, err := openSealed(path, seal, wait, log)
	if err == nil || !errors.Is(err, ErrDamaged) {
		return b, err
	}
	to, qerr := atomicfile.Quarantine(path)
	if qerr != nil {
		return nil, errors.Join(err, qerr)
	}
	log.Error("node database is damaged: starting with an empty one; pods are learnt again and running ones adopted",
		"path", path, "moved_to", to, "err", err)
	return open(path, seal, wait)
}

// openSealed opens, and sees to it that no Secret is in the file in clear.
func openSealed(path string, seal *Seal, wait time.Duration, log *slog.Logger) (*Bolt, error) {
	b, err := open(path, seal, wait)
	if err != nil {
		return nil, err
	}
	old, err := b.sealOld()
	if old && err == nil {
		if err = b.rewrite(path); err == nil {
			if err := b.Close(); err != nil {
				return nil, err
			}
			return open(path, seal, wait)
		}
	}
	if err != nil { // a full disk: what is known starts all the same
		log.Warn("Secrets of an older version are still readable in the node database; the next start tries again to seal them", "path", path, "error", err)
	}
	return b, nil
}

func open(path string, seal *Seal, wait time.Duration) (b *Bolt, err error) {
	// bbolt panics on damaged pages, in goroutines of its own too, and reads
	// past the end of a truncated file fault. So the structure is checked
	// first, on plain bytes.
	if err := verifyFile(path, wait); err != nil {
		return nil, err
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	var db *bbolt.DB
	defer func() {
		if r := recover(); r != nil {
			b, err = nil, fmt.Errorf("%w: %v", ErrDamaged, r)
		}
		if err != nil && db != nil {
			_ = db.Close()
		}
	}()
	db, err = bbolt.Open(path, 0o600, &bbolt.Options{Timeout: wait})
	switch {
	case errors.Is(err, bolterrors.ErrTimeout):
		return nil, fmt.Errorf("%w: %s (is another agent running?)", ErrLocked, path)
	case errors.Is(err, bolterrors.ErrInvalid), errors.Is(err, bolterrors.ErrChecksum), errors.Is(err, bolterrors.ErrVersionMismatch):
		return nil, fmt.Errorf("%w: %s: %w", ErrDamaged, path, err)
	case err != nil:
		return nil, fmt.Errorf("open node database %s: %w", path, err)
	}
	b = &Bolt{db: db, seal: seal, pageSize: db.Info().PageSize, spare: spare.Open(path+".spare", spareBytes)}
	switch err := b.update(b.begin); {
	case full(err):
		// What is known must start on a full disk too, so only the boot is
		// not counted. The buckets are there unless the file is new.
		if err := db.View(b.resume); err != nil {
			return nil, fmt.Errorf("open node database %s: %w", path, err)
		}
	case err != nil:
		return nil, fmt.Errorf("open node database %s: %w", path, err)
	}
	if err := b.readAll(); err != nil {
		return nil, fmt.Errorf("open node database %s: %w", path, err)
	}
	return b, nil
}

func full(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}

// resume reads what begin could not write.
func (b *Bolt) resume(tx *bbolt.Tx) error {
	for _, name := range buckets {
		if tx.Bucket([]byte(name)) == nil {
			return fmt.Errorf("the disk is full and the database is new: %w", unix.ENOSPC)
		}
	}
	if raw := tx.Bucket([]byte(bucketMeta)).Get([]byte(keyBoots)); raw != nil {
		if err := decode(bucketMeta, keyBoots, raw, &b.boots); err != nil {
			return err
		}
	}
	b.boots++
	return nil
}

// begin checks the format and counts the boot.
func (b *Bolt) begin(tx *bbolt.Tx) error {
	for _, name := range append(buckets, bucketSealed) {
		if _, err := tx.CreateBucketIfNotExists([]byte(name)); err != nil {
			return err
		}
	}
	meta := tx.Bucket([]byte(bucketMeta))
	for key, v := range map[string]*uint64{keyFormat: new(uint64), keyBoots: &b.boots} {
		raw := meta.Get([]byte(key))
		if raw != nil {
			if err := decode(bucketMeta, key, raw, v); err != nil {
				return err
			}
		}
		if key == keyFormat && *v > format {
			return fmt.Errorf("%w: format %d, this program knows %d", ErrNewer, *v, format)
		}
	}
	b.boots++
	if err := put(tx, bucketMeta, keyFormat, uint64(format)); err != nil {
		return err
	}
	return put(tx, bucketMeta, keyBoots, b.boots)
}

// readAll proves that every record can be read.
func (b *Bolt) readAll() error {
	if _, err := b.Assignment(); err != nil {
		return err
	}
	if _, err := b.Pods(); err != nil {
		return err
	}
	_, err := b.Gones()
	return err
}

// verifyFile checks the file while nobody writes it.
func verifyFile(path string, wait time.Duration) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("open node database: %w", err)
	}
	defer func() { _ = f.Close() }() // lets go of the lock
	if err := lock(f, wait); err != nil {
		return err
	}
	raw, err := io.ReadAll(f)
	if err != nil {
		return fmt.Errorf("read node database: %w", err)
	}
	if len(raw) == 0 { // made, and nothing written before the power went
		return nil
	}
	if err := verify(raw); err != nil {
		return fmt.Errorf("%w: %s: %w", ErrDamaged, path, err)
	}
	return nil
}

// lock takes bbolt's own lock, waiting at most wait.
func lock(f *os.File, wait time.Duration) error {
	const poll = 50 * time.Millisecond
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("lock node database: %w", err)
		case wait <= 0:
			return fmt.Errorf("%w: %s (is another agent running?)", ErrLocked, f.Name())
		}
		wait -= poll
		time.Sleep(poll) //nolint:forbidigo // bounded by wait, before anything runs
	}
}

func put(tx *bbolt.Tx, bucket, key string, v any) error {
	raw, err := encode(bucket, key, v)
	if err != nil {
		return err
	}
	return tx.Bucket([]byte(bucket)).Put([]byte(key), raw)
}

func each[T any](tx *bbolt.Tx, bucket string, f func(T)) error {
	return tx.Bucket([]byte(bucket)).ForEach(func(k, raw []byte) error {
		var v T
		if err := decode(bucket, string(k), raw, &v); err != nil {
			return err
		}
		f(v)
		return nil
	})
}

func all[T any](db *bbolt.DB, bucket string) (out []T, err error) {
	err = db.View(func(tx *bbolt.Tx) error {
		return each(tx, bucket, func(v T) { out = append(out, v) })
	})
	return out, err
}

// Assignment implements Store.
func (b *Bolt) Assignment() (a Assignment, err error) {
	err = b.db.View(func(tx *bbolt.Tx) error { return b.readAssignment(tx, &a) })
	return a, err
}

func (b *Bolt) readAssignment(tx *bbolt.Tx, a *Assignment) error {
	a.Objects = map[string]wire.Object{}
	if err := each(tx, bucketAssignment, func(h header) { h.into(a) }); err != nil {
		return err
	}
	if err := each(tx, bucketObjects, func(o wire.Object) { a.Objects[o.UID] = o }); err != nil {
		return err
	}
	return b.readSealed(tx, a)
}

// SaveAssignment implements Store.
func (b *Bolt) SaveAssignment(a Assignment) error {
	err := b.update(func(tx *bbolt.Tx) error {
		// Missing only where the disk was full at the start.
		if _, err := tx.CreateBucketIfNotExists([]byte(bucketSealed)); err != nil {
			return err
		}
		var old Assignment
		if err := b.readAssignment(tx, &old); err != nil {
			return err
		}
		add, del := changed(old.Objects, a.Objects)
		for _, o := range add {
			if err := b.putObject(tx, o); err != nil {
				return err
			}
		}
		for _, uid := range append(del, b.sealedShut(tx, a)...) {
			if err := deleteObject(tx, uid); err != nil {
				return err
			}
		}
		return b.putHeader(tx, a)
	})
	if err != nil {
		return fmt.Errorf("save assignment: %w", err)
	}
	return nil
}

// Pods implements Store.
func (b *Bolt) Pods() ([]Pod, error) { return all[Pod](b.db, bucketPods) }

// SavePod implements Store.
func (b *Bolt) SavePod(p Pod) error {
	if err := b.update(func(tx *bbolt.Tx) error { return put(tx, bucketPods, p.UID, p) }); err != nil {
		return fmt.Errorf("save pod %s/%s: %w", p.Namespace, p.Name, err)
	}
	return nil
}

// DeletePod implements Store.
func (b *Bolt) DeletePod(uid string, gone *Gone) error {
	err := b.update(func(tx *bbolt.Tx) error {
		if err := tx.Bucket([]byte(bucketPods)).Delete([]byte(uid)); err != nil || gone == nil {
			return err
		}
		return put(tx, bucketGone, gone.UID, gone)
	})
	if err != nil {
		return fmt.Errorf("delete pod record %s: %w", uid, err)
	}
	return nil
}

// Gones implements Store.
func (b *Bolt) Gones() ([]Gone, error) { return all[Gone](b.db, bucketGone) }

// SaveGone implements Store.
func (b *Bolt) SaveGone(g Gone) error {
	if err := b.update(func(tx *bbolt.Tx) error { return put(tx, bucketGone, g.UID, g) }); err != nil {
		return fmt.Errorf("save tombstone %s: %w", g.UID, err)
	}
	return nil
}

// DeleteGone implements Store.
func (b *Bolt) DeleteGone(uid string) error {
	if err := b.update(func(tx *bbolt.Tx) error { return tx.Bucket([]byte(bucketGone)).Delete([]byte(uid)) }); err != nil {
		return fmt.Errorf("delete tombstone %s: %w", uid, err)
	}
	return nil
}

// Boots implements Store.
func (b *Bolt) Boots() uint64 { return b.boots }

// Close implements Store.
func (b *Bolt) Close() error {
	if err := b.db.Close(); err != nil {
		return fmt.Errorf("close node database: %w", err)
	}
	return nil
}
