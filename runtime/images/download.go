package images

import (
	"context"
	"crypto/sha256"
	"encoding"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/dunlin-project/dunlin/internal/atomicfile"
	"github.com/dunlin-project/dunlin/internal/scratch"
	"github.com/dunlin-project/dunlin/runtime/images/registry"
)

// How a download goes on after a cut.
const (
	maxIdleCuts = 5 // cuts one after the other that brought nothing
	maxChunk    = 64 << 10
	firstPause  = 500 * time.Millisecond
	maxPause    = 15 * time.Second
)

// checkpoint says how much of a partial download is on the disk for sure, and
// the hash of that: with it no byte is read or fetched twice.
type checkpoint struct {
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
	Offset int64  `json:"offset"`
	Hash   []byte `json:"hash"` // state of SHA-256
}

// download is one blob on its way.
type download struct {
	s          *Store
	digest     string
	size       int64
	f          *os.File
	sum        hash.Hash
	offset     int64
	saved      int64 // the offset of the last checkpoint
	savedAt    time.Time
	resumed    bool // what is there came from an earlier process or pull
	limiter    *rate.Limiter
	onProgress func(n int64) // bytes that came
	// rest pauses after a connection that brought nothing.
	rest func(ctx context.Context, d time.Duration, why error) error
}

func (s *Store) partialPath(digest string) string { return s.path("partial", hexOf(digest)) }

const stateSuffix = ".state"

func statePath(partial string) string { return partial + stateSuffix }

// partialSize is how much of a blob is here already.
func (s *Store) partialSize(digest string) int64 {
	c, err := readRecord[checkpoint](statePath(s.partialPath(digest)))
	if err != nil || c.Digest != digest {
		return 0
	}
	return c.Offset
}

// openDownload begins, or goes on from the last checkpoint. It waits until no
// other process fetches the same.
func (s *Store) openDownload(ctx context.Context, digest string, size int64) (*download, error) {
	d := &download{s: s, digest: digest, size: size, savedAt: time.Now(), sum: sha256.New(), onProgress: func(int64) {},
		rest: func(ctx context.Context, d time.Duration, _ error) error { return pause(ctx, d) }}
	for {
		f, err := os.OpenFile(s.partialPath(digest), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, fmt.Errorf("download: %w", err)
		}
		if err = scratch.Lock(f, unix.LOCK_EX|unix.LOCK_NB); err == nil && f.Name() != "" && sameFile(f, s.partialPath(digest)) {
			d.f = f
			break
		}
		_ = f.Close()
		if err != nil && !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("download: %w", err)
		}
		if err := pause(ctx, s.pauseUnit); err != nil {
			return nil, err
		}
	}
	d.restore()
	if err := d.f.Truncate(d.offset); err != nil {
		_ = d.f.Close()
		return nil, fmt.Errorf("download: %w", err)
	}
	return d, nil
}

func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	b, err2 := os.Stat(path)
	return err == nil && err2 == nil && os.SameFile(a, b)
}

// restore takes up the last checkpoint, if it is one of this blob and the
// file holds that much.
func (d *download) restore() {
	c, err := readRecord[checkpoint](statePath(d.f.Name()))
	st, serr := d.f.Stat()
	if err != nil || serr != nil || c.Digest != d.digest || c.Size != d.size || c.Offset < 0 || c.Offset > d.size || st.Size() < c.Offset {
		return
	}
	sum := sha256.New()
	if u, ok := sum.(encoding.BinaryUnmarshaler); !ok || u.UnmarshalBinary(c.Hash) != nil {
		return
	}
	d.sum, d.offset, d.saved, d.resumed = sum, c.Offset, c.Offset, c.Offset > 0
}

// save makes what came durable: first the bytes, then the word of them.
func (d *download) save() error {
	d.savedAt = time.Now()
	if d.offset == d.saved {
		return nil
	}
	d.s.step("sync part")
	if err := unix.Fdatasync(int(d.f.Fd())); err != nil {
		return fmt.Errorf("download: %w", err)
	}
	m, ok := d.sum.(encoding.BinaryMarshaler)
	if !ok {
		return errors.New("download: the hash has no state")
	}
	state, err := m.MarshalBinary()
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	b, err := json.Marshal(checkpoint{Digest: d.digest, Size: d.size, Offset: d.offset, Hash: state})
	if err != nil {
		return fmt.Errorf("download: %w", err)
	}
	d.s.step("write part record")
	if err := atomicfile.Write(statePath(d.f.Name()), b, 0o600); err != nil {
		return err
	}
	d.saved = d.offset
	return nil
}

// reset forgets everything that came.
func (d *download) reset() error {
	d.sum, d.offset, d.saved, d.resumed = sha256.New(), 0, 0, false
	if err := os.Remove(statePath(d.f.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("download: %w", err)
	}
	if err := d.f.Truncate(0); err != nil {
		return fmt.Errorf("download: %w", err)
	}
	return nil
}

// source opens a blob from an offset on.
type source func(ctx context.Context, digest string, offset, size int64) (*registry.Blob, error)

// run fetches what is missing, over as many connections as that takes, and
// gives the blob its name. A link that brings something between its cuts is
// never given up; pauses between cuts have jitter.
func (d *download) run(ctx context.Context, open source) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, d.save())
		}
		_ = d.f.Close()
	}()
	for idle := 0; d.offset < d.size; {
		before := d.offset
		err := d.stretch(ctx, open)
		if err == nil {
			continue
		}
		if ctx.Err() != nil {
			return fmt.Errorf("download: %w", context.Cause(ctx))
		}
		if !retriable(err) {
			return err
		}
		if idle++; d.offset > before {
			idle = 1
		}
		if idle > maxIdleCuts {
			return err
		}
		wait := min(d.s.pauseUnit<<(idle-1), maxPause)
		var re *registry.Error
		if errors.As(err, &re) && re.RetryAfter > 0 {
			if re.RetryAfter > maxPause {
				return err // the pod's back-off waits, not a place in the line
			}
			wait = re.RetryAfter
		}
		wait += rand.N(wait / 2)
		if d.offset > before {
			err = pause(ctx, wait)
		} else {
			err = d.rest(ctx, wait, err)
		}
		if err != nil {
			return err
		}
	}
	return d.finish()
}

// finish compares the digest and keeps the blob.
func (d *download) finish() error {
	got := digestPrefix + hex.EncodeToString(d.sum.Sum(nil))
	if got != d.digest {
		if err := d.reset(); err != nil {
			return err
		}
		return &mismatchError{want: d.digest, got: got}
	}
	if err := d.s.keepBlob(d.f, d.digest); err != nil {
		return err
	}
	d.s.step("remove part record")
	if err := os.Remove(statePath(d.s.partialPath(d.digest))); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("download: %w", err)
	}
	return nil
}

// mismatchError is a blob whose content is not what its digest says.
type mismatchError struct{ want, got string }

func (e *mismatchError) Error() string {
	return fmt.Sprintf("what came for %s has digest %s", e.want, e.got)
}

func retriable(err error) bool {
	var (
		re     *registry.Error
		length *registry.LengthError
		disk   *os.PathError
		space  *SpaceError
	)
	if errors.As(err, &length) || errors.As(err, &disk) || errors.As(err, &space) {
		return false
	}
	return !errors.As(err, &re) || !re.Answered()
}

// errCut says that a connection ended before the blob.
var errCut = errors.New("the connection was cut")

// stretch reads one connection to its end.
func (d *download) stretch(ctx context.Context, open source) error {
	b, err := open(ctx, d.digest, d.offset, d.size)
	if err != nil {
		return err
	}
	defer func() { _ = b.Close() }()
	if skip := d.offset - b.Offset; skip > 0 {
		// The registry has no ranges: what is here already is thrown away.
		if _, err := io.CopyN(io.Discard, &limitedRate{ctx, b, d.limiter}, skip); err != nil {
			return &registry.Error{Host: b.Host, Err: fmt.Errorf("%w: %w", errCut, err)}
		}
	}
	r := &limitedRate{ctx, b, d.limiter}
	buf := make([]byte, maxChunk)
	for d.offset < d.size {
		n, err := r.Read(buf[:min(int64(len(buf)), d.size-d.offset)])
		if n > 0 {
			if _, werr := d.f.WriteAt(buf[:n], d.offset); werr != nil {
				return d.full(werr)
			}
			_, _ = d.sum.Write(buf[:n])
			d.offset += int64(n)
			d.onProgress(int64(n))
		}
		if d.offset-d.saved >= d.s.checkpoint || time.Since(d.savedAt) >= checkpointAfter {
			if err := d.save(); err != nil {
				return d.full(err)
			}
		}
		if d.offset < d.size && err != nil {
			return &registry.Error{Host: b.Host, Err: fmt.Errorf("%w after %d of %d bytes: %w", errCut, d.offset, d.size, err)}
		}
	}
	return nil
}

func (d *download) full(err error) error {
	if errors.Is(err, unix.ENOSPC) {
		if serr := d.s.room(d.size - d.offset); serr != nil {
			return serr
		}
	}
	return err
}

// limitedRate reads no faster than all downloads of the node may.
type limitedRate struct {
	ctx     context.Context //nolint:containedctx // a reader has no other way
	r       io.Reader
	limiter *rate.Limiter
}

func (l *limitedRate) Read(p []byte) (int, error) {
	if err := l.ctx.Err(); err != nil {
		return 0, context.Cause(l.ctx)
	}
	if l.limiter == nil {
		return l.r.Read(p)
	}
	n, err := l.r.Read(p[:min(len(p), l.limiter.Burst())])
	if n > 0 {
		if werr := l.limiter.WaitN(l.ctx, n); werr != nil && err == nil {
			err = werr
		}
	}
	return n, err
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("download: %w", context.Cause(ctx))
	}
}
