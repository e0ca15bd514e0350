package state

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"go.etcd.io/bbolt"

	"github.com/dunlin-project/dunlin/internal/feature"
)

// ImageFormat is the newest layout of a snapshot file this binary writes.
const ImageFormat = 1

// imageBatch bounds the bytes of one bbolt transaction while writing.
const imageBatch = 4 << 20

var (
	bucketHead    = []byte("head")
	bucketRecords = []byte("records")
	keyHead       = []byte("head")
)

// imageHead stands in a snapshot file beside the records.
type imageHead struct {
	Format          uint32 `cbor:"1,keyasint"`
	Facts           Facts  `cbor:"2,keyasint"`
	ResourceVersion uint64 `cbor:"3,keyasint"`
	Records         uint64 `cbor:"4,keyasint"`
}

// Image is one immutable version of the whole state, ready to be written.
type Image struct{ v *view }

// Image captures the current version: O(1).
func (m *Machine) Image() *Image { return &Image{v: m.cur.Load()} }

// Write writes the image as a fresh, compacted bbolt file: CBOR records in
// key order. The path must not exist. Nothing is synced: the caller syncs,
// takes the checksum and keeps it, since a bbolt file without one must never
// be opened.
func (im *Image) Write(path string) (err error) {
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout: time.Second, NoSync: true, NoGrowSync: true, NoFreelistSync: true, NoStatistics: true,
		// Larger than most records, and the same on every machine.
		PageSize: 16 << 10,
		OpenFile: func(name string, flag int, perm os.FileMode) (*os.File, error) {
			return os.OpenFile(name, flag|os.O_EXCL, perm)
		},
	})
	if err != nil {
		return fmt.Errorf("create snapshot file: %w", err)
	}
	defer func() {
		if cerr := db.Close(); err == nil && cerr != nil {
			err = fmt.Errorf("close snapshot file: %w", cerr)
		}
	}()
	w := imageWriter{db: db}
	if err := w.begin(); err != nil {
		return err
	}
	defer w.rollback()
	var n uint64
	err = im.v.each(func(r *Record) error {
		n++
		return w.put(r)
	})
	if err != nil {
		return fmt.Errorf("write snapshot file: %w", err)
	}
	return w.finish(imageHead{Format: ImageFormat, Facts: im.v.facts, ResourceVersion: im.v.rv, Records: n})
}

type imageWriter struct {
	db      *bbolt.DB
	tx      *bbolt.Tx
	records *bbolt.Bucket
	pending int
}

func (w *imageWriter) begin() error {
	tx, err := w.db.Begin(true)
	if err != nil {
		return fmt.Errorf("write snapshot file: %w", err)
	}
	b, err := tx.CreateBucketIfNotExists(bucketRecords)
	if err != nil {
		_ = tx.Rollback()
		return fmt.Errorf("write snapshot file: %w", err)
	}
	b.FillPercent = 1 // keys arrive in order
	w.tx, w.records, w.pending = tx, b, 0
	return nil
}

func (w *imageWriter) rollback() {
	if w.tx != nil {
		_ = w.tx.Rollback()
	}
}

func (w *imageWriter) put(r *Record) error {
	b, err := EncodeRecord(r)
	if err != nil {
		return err
	}
	if err := w.records.Put(imageKey(r.Header.Key), b); err != nil {
		return err
	}
	if w.pending += len(b); w.pending < imageBatch {
		return nil
	}
	tx := w.tx
	w.tx = nil
	if err := tx.Commit(); err != nil {
		return err
	}
	return w.begin()
}

func (w *imageWriter) finish(h imageHead) error {
	head, err := w.tx.CreateBucketIfNotExists(bucketHead)
	if err != nil {
		return fmt.Errorf("write snapshot file: %w", err)
	}
	b, err := codec.enc.Marshal(h)
	if err != nil {
		return fmt.Errorf("encode snapshot head: %w", err)
	}
	if err := head.Put(keyHead, b); err != nil {
		return fmt.Errorf("write snapshot file: %w", err)
	}
	tx := w.tx
	w.tx = nil
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("write snapshot file: %w", err)
	}
	return nil
}

// imageKey sorts like (kind, namespace, name): none of them holds a NUL.
func imageKey(k Key) []byte {
	b := make([]byte, 0, len(k.Kind)+len(k.Namespace)+len(k.Name)+2)
	b = append(b, k.Kind...)
	b = append(b, 0)
	b = append(b, k.Namespace...)
	b = append(b, 0)
	return append(b, k.Name...)
}

// ReadImage opens a snapshot file whose checksum the caller has verified, and
// calls f for each record in key order. It returns the facts and the version.
func ReadImage(path string, f func(*Record) error) (facts Facts, rv uint64, err error) {
	db, err := bbolt.Open(path, 0o400, &bbolt.Options{Timeout: time.Second, ReadOnly: true, NoStatistics: true})
	if err != nil {
		return Facts{}, 0, fmt.Errorf("open snapshot file: %w", err)
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	err = db.View(func(tx *bbolt.Tx) error {
		head, records := tx.Bucket(bucketHead), tx.Bucket(bucketRecords)
		if head == nil || records == nil {
			return fmt.Errorf("%w: snapshot file without its buckets", ErrMalformed)
		}
		var h imageHead
		if err := codec.version.Unmarshal(head.Get(keyHead), &h); err != nil {
			return fmt.Errorf("%w: snapshot head: %w", ErrMalformed, err)
		}
		if h.Format > ImageFormat {
			return fmt.Errorf("%w (snapshot format %d, known %d)", ErrNewerFormat, h.Format, ImageFormat)
		}
		if h.Facts.Feature > feature.Level {
			return fmt.Errorf("%w: %w", ErrNewerFormat, feature.Behind(h.Facts.Feature))
		}
		var n uint64
		err := records.ForEach(func(_, v []byte) error {
			r, err := DecodeRecord(v)
			if err != nil {
				return err
			}
			n++
			return f(r)
		})
		if err != nil {
			return err
		}
		if n != h.Records {
			return fmt.Errorf("%w: snapshot file holds %d records, not %d", ErrMalformed, n, h.Records)
		}
		facts, rv = h.Facts, h.ResourceVersion
		return nil
	})
	if err != nil {
		return Facts{}, 0, fmt.Errorf("read snapshot file: %w", err)
	}
	return facts, rv, nil
}

// Restore replaces the whole state by a snapshot file's (see ReadImage). On
// an error the state is as before. The ring is emptied: watches from before
// the file's version end with ErrTooOld.
func (m *Machine) Restore(path string) error {
	t := newTables()
	facts, rv, err := ReadImage(path, func(r *Record) error {
		internHeader(&r.Header)
		t.put(r, nil)
		return nil
	})
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	v := newView(t)
	v.rv, v.facts = rv, facts
	m.mu.Lock()
	defer m.mu.Unlock()
	m.t, m.halted = t, nil
	m.size.Store(t.bytes)
	m.cur.Store(v)
	m.ring.reset(rv)
	return nil
}

// Digest is a short form of Hash for logs.
func (m *Machine) Digest() (uint64, error) {
	h, err := m.Hash()
	return binary.BigEndian.Uint64(h[:8]), err
}
