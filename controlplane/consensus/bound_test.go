package consensus

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// used returns the last file of a log and how many bytes of it are used.
func used(t *testing.T, dir string) (path string, content []byte, n int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "log", "*.wal"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	path = files[len(files)-1]
	if content, err = os.ReadFile(path); err != nil {
		t.Fatal(err)
	}
	return path, content, len(bytes.TrimRight(content, "\x00"))
}

// killedFolder returns a copy of a running server's files, as a kill leaves
// them, with every change in its bound.
func killedFolder(t *testing.T, changes int) (dir string, hash [32]byte) {
	t.Helper()
	cfg := crashConfig(filepath.Join(t.TempDir(), "raft"))
	cfg.SegmentBytes, cfg.SnapshotBytes = 256<<10, 1<<20
	bounds := make(chan struct{}, 1000)
	cfg.Disk = &Disk{Observe: func(e DiskEvent) error {
		if e.Done && e.Op == DiskWrite && filepath.Base(e.Path) == "bound" {
			bounds <- struct{}{}
		}
		return nil
	}}
	n := openTest(t, cfg)
	for i := range changes {
		mustPropose(t, n, crashOps(i)...)
	}
	for { // what was committed last is in the bound within a second
		var b boundFile
		b.path = filepath.Join(cfg.Dir, "bound")
		if b.load(); b.index == n.logs.last.Load() {
			break
		}
		select {
		case <-bounds:
		case <-testContext(t).Done():
			t.Fatalf("the bound is %d, the log ends at %d", b.index, n.logs.last.Load())
		}
	}
	dir = copyOf(t, cfg.Dir)
	hash, err := n.State().Hash()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	return dir, hash
}

// TestCutLogAfterAKill: nothing was noted at a stop, and yet a log that lost
// its end is noticed, said and gone on from in a new epoch, once.
func TestCutLogAfterAKill(t *testing.T) {
	killed, _ := killedFolder(t, 30)
	whole := openTest(t, crashConfig(copyOf(t, killed)))
	if e := whole.Epoch(); e != 1 {
		t.Errorf("without any damage: epoch %d", e)
	}
	for name, cut := range map[string]func(path string, b []byte, keep int) error{
		"truncated": func(p string, _ []byte, keep int) error { return os.Truncate(p, int64(keep)) },
		"NUL": func(p string, b []byte, keep int) error {
			clear(b[keep:])
			return os.WriteFile(p, b, 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := copyOf(t, killed)
			path, b, n := used(t, dir)
			if err := cut(path, b, n*9/10); err != nil {
				t.Fatal(err)
			}
			var said bytes.Buffer
			cfg := crashConfig(dir)
			cfg.Log = slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelError}))
			node, err := Open(testContext(t), cfg)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := node.WaitLeading(testContext(t)); err != nil {
				t.Fatal(err)
			}
			if f := node.State().Facts(); f.Epoch != 2 {
				t.Errorf("epoch %d", f.Epoch)
			}
			if err := node.Close(); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(said.String(), "acknowledged changes are lost") {
				t.Errorf("it said %q", said.String())
			}
			// Killed before anything reached the old bound again, it is no new loss.
			if e := openTest(t, crashConfig(dir)).Epoch(); e != 2 {
				t.Errorf("after another start: epoch %d", e)
			}
		})
	}
	// Without a bound, the size of the file still tells that entries were cut off.
	t.Run("truncated, no bound", func(t *testing.T) {
		dir := copyOf(t, killed)
		path, b, n := used(t, dir)
		keep := bytes.LastIndex(b[:n], bytes.Repeat([]byte("x"), 400)) + 200
		if err := errors.Join(os.Remove(filepath.Join(dir, "bound")), os.Truncate(path, int64(keep))); err != nil {
			t.Fatal(err)
		}
		if e := openTest(t, crashConfig(dir)).Epoch(); e != 2 {
			t.Errorf("epoch %d", e)
		}
	})
}

// TestShortTail: a kill can leave the last file of the log without the space
// that it was to have. Nothing is missing then, now and after more writes.
func TestShortTail(t *testing.T) {
	const segment = 8 << 10
	dir := filepath.Join(t.TempDir(), "log")
	l, _ := openLog(t, dir, segment)
	l.close()
	path, _, _ := used(t, filepath.Dir(dir))
	var terms []uint64
	for round, size := range []int64{0, 32, -1, -1} {
		if size < 0 { // all that was written, and a little
			_, _, n := used(t, filepath.Dir(dir))
			size = int64(n) + 8
		}
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		l, report := openLog(t, dir, segment)
		if report != nil {
			t.Fatalf("round %d: taken for damage: %v", round, report.Cause)
		}
		if st, err := os.Stat(path); err != nil || st.Size() != segment {
			t.Errorf("round %d: %v, %v", round, st, err)
		}
		if round > 0 {
			appendLog(t, l, uint64(round), uint64(round), 1)
			terms = append(terms, 1)
			checkLog(t, l, terms)
		}
		l.close()
	}
}

func copyOf(t *testing.T, dir string) string {
	t.Helper()
	to := t.TempDir()
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	return to
}

// TestBoundIsCheap: no fsync of its own, and one write a second however many
// commits there are.
func TestBoundIsCheap(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		var writes, syncs atomic.Int64
		cfg := Config{Dir: dir, ClusterID: "cluster-1", ServerID: "server-1", Log: slog.New(slog.DiscardHandler)}
		cfg.Disk = &Disk{Observe: func(e DiskEvent) error {
			if e.Done && filepath.Base(e.Path) == "bound" {
				switch e.Op {
				case DiskWrite:
					writes.Add(1)
				case DiskSync:
					syncs.Add(1)
				}
			}
			return nil
		}}
		n, err := Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.WaitLeading(t.Context()); err != nil {
			t.Fatal(err)
		}
		for i := range 200 { // ten seconds
			mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", fmt.Sprint("o", i))})
			time.Sleep(50 * time.Millisecond)
		}
		time.Sleep(2 * boundEvery)
		if w := writes.Load(); w < 10 || w > 13 || syncs.Load() != 0 {
			t.Errorf("%d writes and %d fsyncs in ten seconds", w, syncs.Load())
		}
		var b boundFile
		b.path = filepath.Join(dir, "bound")
		if b.load(); b.index != n.logs.last.Load() {
			t.Errorf("the bound is %d, the log ends at %d", b.index, n.logs.last.Load())
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
}

// TestBoundRecords: whichever record is torn, what is left is a lower bound;
// lowered, it stays low.
func TestBoundRecords(t *testing.T) {
	path := filepath.Join(t.TempDir(), "bound")
	b := &boundFile{disk: &Disk{}, path: path}
	for _, index := range []uint64{5, 9, 7} {
		if err := b.raise(index); err != nil {
			t.Fatal(err)
		}
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	read := func() uint64 {
		r := &boundFile{disk: &Disk{}, path: path}
		r.load()
		return r.index
	}
	if got := read(); got != 9 {
		t.Errorf("read %d", got)
	}
	record := frameHeader + 8
	for i := range 2 * record {
		at := i%record + int(boundOffsets[i/record])
		torn := bytes.Clone(whole)
		torn[at] ^= 0x40
		if err := os.WriteFile(path, torn, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := read(); got != 5 && got != 9 {
			t.Fatalf("byte %d damaged: read %d", at, got)
		}
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.lower(3); err != nil {
		t.Fatal(err)
	}
	if got := read(); got != 3 {
		t.Errorf("lowered, read %d", got)
	}
	b.close()
}
