package images

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/runtime/images/registry"
)

// trickle brings a byte a second, and then nothing for ever.
type trickle struct {
	ctx  context.Context
	left int
}

func (r *trickle) Close() error { return nil }

func (r *trickle) Read(p []byte) (int, error) {
	if r.left == 0 {
		<-r.ctx.Done()
		return 0, r.ctx.Err()
	}
	time.Sleep(time.Second)
	r.left--
	return copy(p, "x"), nil
}

// TestSlowDownloadIsKept: over a link of a byte a second a kill costs what came
// in the last seconds, and not all that is less than a checkpoint of a fast one.
func TestSlowDownloadIsKept(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := openStore(t, dir)
		digest := digestPrefix + strings.Repeat("a", 64)
		d, err := s.openDownload(t.Context(), digest, 1000)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = d.stretch(ctx, func(ctx context.Context, _ string, offset, _ int64) (*registry.Blob, error) {
				return &registry.Blob{ReadCloser: &trickle{ctx, 200}, Offset: offset}, nil
			})
		}()
		time.Sleep(5 * time.Minute)
		if n := s.partialSize(digest); n < 200-15 || n > 200 {
			t.Errorf("%d of 200 bytes would be there after a kill", n)
		}
		cancel()
		<-done
	})
}
