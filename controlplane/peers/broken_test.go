package peers

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// TestAReadOnlyDiskIsNamed: a lone server whose file system turned read-only
// leads no more; what is said then is its disk's fault, and that no server is
// missing. It goes on by itself once it can write.
func TestAReadOnlyDiskIsNamed(t *testing.T) {
	d := dirs(t, 1)
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		broken := new(atomic.Bool)
		w.broken = map[string]*atomic.Bool{"s0": broken}
		s := w.start("s0", options{dir: d[0]})
		_, err := s.node.WaitLeading(t.Context())
		must(t, err)
		must(t, create(t.Context(), s, "before"))
		broken.Store(true)
		for i, name := range []string{"first", "second", "third"} {
			err := create(t.Context(), s, name)
			if !errors.Is(err, state.ErrDiskFull) || !strings.Contains(err.Error(), "read-only file system") {
				t.Errorf("write %d: %v", i, err)
			}
			time.Sleep(time.Minute)
		}
		if err := s.writes.Barrier(t.Context()); !errors.Is(err, state.ErrDiskFull) || errors.Is(err, state.ErrNoQuorum) {
			t.Errorf("a read: %v", err)
		}
		broken.Store(false)
		time.Sleep(time.Minute)
		if err := create(t.Context(), s, "after"); err != nil {
			t.Errorf("writable again: %v", err)
		}
	})
}
