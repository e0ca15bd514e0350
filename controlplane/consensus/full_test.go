package consensus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// smallDisk mounts a tmpfs of the size.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting a small tmpfs needs root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Skipf("SKIPPED: cannot mount a tmpfs here: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// writeUntil writes until a write fails, and returns how many were
// acknowledged and the error.
func writeUntil(t *testing.T, n *Node, from, limit int) (int, error) {
	t.Helper()
	for i := from; i < limit; i++ {
		r := object("ConfigMap", "", fmt.Sprintf("full-%05d", i))
		r.Spec.Data = make([]byte, 2000)
		if _, err := n.Propose(testContext(t), []state.Op{{Type: state.OpCreate, Record: r}}); err != nil {
			return i, err
		}
	}
	t.Fatal("the disk never filled up")
	return 0, nil
}

// tryUntil repeats f until it succeeds.
func tryUntil(t *testing.T, f func(context.Context) error) {
	t.Helper()
	ctx := testContext(t)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f(ctx)
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("never succeeded: %v", err)
		}
	}
}

func checkFull(t *testing.T, n *Node, count int) {
	t.Helper()
	if got := n.State().Snapshot().Len("ConfigMap", ""); got != count {
		t.Errorf("%d objects, %d were acknowledged", got, count)
	}
}

func TestDiskFullIsRefusedInTime(t *testing.T) {
	dir := smallDisk(t, "4m")
	cfg := testConfig(t, filepath.Join(dir, "state"))
	cfg.SegmentBytes = 64 << 10
	n := openTest(t, cfg)
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("Node", "", "n1")})
	deployment := object("Deployment.apps", "", "d")
	deployment.Spec.Data = []byte("a")
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: deployment})
	count, err := writeUntil(t, n, 0, 10_000)
	if !errors.Is(err, state.ErrDiskFull) {
		t.Fatal(err)
	}
	checkFull(t, n, count)
	if err := n.Barrier(testContext(t)); err != nil {
		t.Errorf("linearizable read on a full disk: %v", err)
	}
	if _, leading := n.Leadership(); !leading {
		t.Error("leadership was lost")
	}
	// What a node says of itself, its full disk say, is taken, and not without
	// a bound.
	say := func() error {
		node := object("Node", "", "n1")
		node.Spec.Data = []byte(time.Now().String())
		old, ok := n.State().Snapshot().Get(node.Header.Key)
		if !ok {
			return errors.New("no node")
		}
		res, err := n.Propose(testContext(t), []state.Op{{Type: state.OpUpdate, Record: node, UID: old.Header.UID, ResourceVersion: old.Header.ResourceVersion}})
		if err == nil && res[0].Reason != state.ReasonNone {
			err = errors.New(res[0].Detail)
		}
		return err
	}
	said := 0
	for range 20 {
		switch err := say(); {
		case err == nil:
			said++
		case !errors.Is(err, state.ErrDiskFull):
			t.Fatal(err)
		}
	}
	if said == 0 || said > 6 {
		t.Errorf("%d of 20 words of a node were taken", said)
	}
	// What a deletion makes untrue is corrected, so often as there were
	// deletions; what somebody wants is not.
	correct := func(spec string) error {
		d := object("Deployment.apps", "", "d")
		d.Spec.Data = []byte(spec)
		keep := uint8(0)
		if spec == "" {
			d.Spec, keep = nil, state.KeepSpec
		}
		d.Status = &state.Body{Codec: state.CodecKubeCBOR, Data: []byte(time.Now().String())}
		old, ok := n.State().Snapshot().Get(d.Header.Key)
		if !ok {
			return errors.New("no Deployment")
		}
		_, err := n.Propose(testContext(t), []state.Op{{Type: state.OpUpdate, Record: d, Keep: keep, UID: old.Header.UID, ResourceVersion: old.Header.ResourceVersion}})
		return err
	}
	if err := correct(""); !errors.Is(err, state.ErrDiskFull) {
		t.Errorf("a status, before any deletion: %v", err)
	}
	remove := func(i int) {
		r := object("ConfigMap", "", fmt.Sprintf("full-%05d", i))
		mustPropose(t, n, state.Op{Type: state.OpDelete, Key: &r.Header.Key, UID: r.Header.UID})
	}
	junk := filepath.Join(dir, "junk") // what the reserve shrinks by
	if err := os.WriteFile(junk, make([]byte, 256<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	remove(3)
	if err := correct("b"); !errors.Is(err, state.ErrDiskFull) {
		t.Errorf("another spec: %v", err)
	}
	for i := range creditEach + 1 {
		if err := correct(""); (err == nil) != (i < creditEach) {
			t.Errorf("status %d after a deletion: %v", i, err)
		}
	}
	if err := os.Remove(junk); err != nil {
		t.Fatal(err)
	}
	// Deletions go on; a snapshot still fits, and two let the log shrink.
	for i := range 3 {
		r := object("ConfigMap", "", fmt.Sprintf("full-%05d", i))
		mustPropose(t, n, state.Op{Type: state.OpDelete, Key: &r.Header.Key, UID: r.Header.UID})
		if err := n.Snapshot(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	if first := n.logs.first.Load(); first == 1 {
		t.Error("the log did not shrink")
	}
}

func TestDiskFullHeals(t *testing.T) {
	dir := smallDisk(t, "4m")
	cfg := testConfig(t, filepath.Join(dir, "state"))
	cfg.SegmentBytes, cfg.ReserveBytes = 64<<10, -1 // no reserve: run into it
	n := openTest(t, cfg)
	ballast := filepath.Join(dir, "ballast")
	fillDisk(t, ballast)
	count, err := writeUntil(t, n, 0, 10_000)
	if !errors.Is(err, state.ErrDiskFull) {
		t.Fatal(err)
	}
	if got := n.State().Snapshot().Len("ConfigMap", ""); got != count {
		t.Errorf("%d objects are seen, %d were acknowledged", got, count)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	tryUntil(t, func(ctx context.Context) error {
		_, err := n.Propose(ctx, []state.Op{{Type: state.OpTimeFloor, Unix: 1}})
		return err
	})
	checkFull(t, n, count)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	checkFull(t, openTest(t, cfg), count)
}

// TestDeletionsOnADiskThatIsFullToTheLastByte: others filled it, at once. The
// mark and the end of a deletion are taken in the space that was kept aside.
func TestDeletionsOnADiskThatIsFullToTheLastByte(t *testing.T) {
	t.Run("tmpfs", func(t *testing.T) { testDeletionsOnAFullDisk(t, smallDisk(t, "4m")) })
	// Of an ext4, 5 % are for root alone: more than what is kept aside.
	t.Run("ext4", func(t *testing.T) { testDeletionsOnAFullDisk(t, newLoopDisk(t).mount) })
}

func testDeletionsOnAFullDisk(t *testing.T, dir string) {
	cfg := testConfig(t, filepath.Join(dir, "state"))
	cfg.SegmentBytes = 64 << 10
	n := openTest(t, cfg)
	const count = 20
	for i := range count {
		mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", fmt.Sprint("o", i))})
	}
	owned := object("ConfigMap", "", "owned")
	owned.Header.Owners = []state.Owner{{UID: "1", Kind: "ConfigMap", Name: "o0"}}
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: owned})
	ballast := filepath.Join(dir, "ballast")
	fillDisk(t, ballast)
	late := state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", "late")}
	if _, err := n.Propose(testContext(t), []state.Op{late}); !errors.Is(err, state.ErrDiskFull) {
		t.Fatalf("a new object: %v", err)
	}
	for i := range count {
		r := object("ConfigMap", "", fmt.Sprint("o", i))
		plain := state.Op{Type: state.OpUpdate, Record: r, UID: r.Header.UID}
		if _, err := n.Propose(testContext(t), []state.Op{plain}); !errors.Is(err, state.ErrDiskFull) {
			t.Fatalf("an ordinary update: %v", err)
		}
		marked := object("ConfigMap", "", fmt.Sprint("o", i))
		marked.Header.Deleted = 1
		mustPropose(t, n, state.Op{Type: state.OpUpdate, Record: marked, UID: r.Header.UID})
		mustPropose(t, n, state.Op{Type: state.OpDelete, Key: &r.Header.Key, UID: r.Header.UID})
	}
	orphan := object("ConfigMap", "", "owned")
	mustPropose(t, n, state.Op{Type: state.OpUpdate, Record: orphan, UID: orphan.Header.UID})
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	mustPropose(t, n, late)
	checkFull(t, n, 2)
	if _, err := os.Stat(filepath.Join(cfg.Dir, "spare")); err != nil {
		t.Errorf("the space is not kept aside again: %v", err)
	}
}

func fillDisk(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	block := make([]byte, 64<<10)
	for len(block) > 0 {
		if _, err := f.Write(block); err != nil {
			block = block[:len(block)/2]
		}
	}
}

// TestFullAtOpen: a folder that cannot even be opened for lack of space.
func TestFullAtOpen(t *testing.T) {
	dir := smallDisk(t, "1m")
	fillDisk(t, filepath.Join(dir, "ballast"))
	_, err := Open(testContext(t), testConfig(t, filepath.Join(dir, "state")))
	if !errors.Is(err, state.ErrDiskFull) {
		t.Errorf("open: %v", err)
	}
}

// TestDiskFaults lets every write and fsync fail for a while.
func TestDiskFaults(t *testing.T) {
	for _, errno := range []syscall.Errno{unix.EIO, unix.EROFS, unix.ENOSPC} {
		t.Run(errno.Error(), func(t *testing.T) {
			var failing atomic.Bool
			cfg := testConfig(t, t.TempDir())
			cfg.Disk = &Disk{Observe: func(e DiskEvent) error {
				if failing.Load() && !e.Done {
					return errno
				}
				return nil
			}}
			n := openTest(t, cfg)
			mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", "before")})
			failing.Store(true)
			_, err := n.Propose(testContext(t), []state.Op{{Type: state.OpCreate, Record: object("ConfigMap", "", "during")}})
			if !errors.Is(err, state.ErrDiskFull) {
				t.Errorf("write: %v", err)
			}
			tryUntil(t, func(context.Context) error { // leadership ends
				if _, leading := n.Leadership(); leading {
					return errors.New("still leading")
				}
				return nil
			})
			if _, err := n.Propose(testContext(t), []state.Op{{Type: state.OpTimeFloor, Unix: 1}}); !errors.Is(err, state.ErrDiskFull) {
				t.Errorf("next write: %v", err)
			}
			if _, ok := n.State().Snapshot().Get(object("ConfigMap", "", "before").Header.Key); !ok {
				t.Error("reading failed")
			}
			failing.Store(false)
			tryUntil(t, func(ctx context.Context) error {
				_, err := n.Propose(ctx, []state.Op{{Type: state.OpCreate, Record: object("ConfigMap", "", "after")}})
				return err
			})
			if err := n.Stats().Fault; err != nil {
				t.Errorf("fault remains: %v", err)
			}
		})
	}
}

// TestReadsWaitForAFullDisk: while the log cannot be opened again after a
// failed write, what Raft reads from it is late, and not missing: a leader
// that hears that it is missing asks for ever older entries, and in the end
// sends a snapshot that may be older than what is here (seed 8820 of three
// servers: Raft went back, and panicked).
func TestReadsWaitForAFullDisk(t *testing.T) {
	n := openTest(t, testConfig(t, t.TempDir()))
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", "before")})
	last := n.logs.last.Load()
	n.logs.mu.Lock() // as when it could not be opened again
	n.logs.closeWAL()
	n.logs.broken = unix.ENOSPC
	n.logs.mu.Unlock()
	if err := n.logs.get(last, new(raft.Log)); !errors.Is(err, ErrClosed) {
		t.Fatalf("who does not wait: %v", err)
	}
	if err := n.logs.GetLog(last+100, new(raft.Log)); !errors.Is(err, raft.ErrLogNotFound) {
		t.Errorf("what was never there: %v", err)
	}
	if err := n.logs.GetLog(last, new(raft.Log)); err != nil {
		t.Errorf("read: %v", err)
	}
}

// TestCloseOnFailingDisk: closing must not wait for a disk that never heals.
func TestCloseOnFailingDisk(t *testing.T) {
	var failing atomic.Bool
	cfg := testConfig(t, t.TempDir())
	cfg.Disk = &Disk{Observe: func(e DiskEvent) error {
		if failing.Load() && !e.Done {
			return unix.EIO
		}
		return nil
	}}
	n := openTest(t, cfg)
	failing.Store(true)
	_, _ = n.Propose(testContext(t), []state.Op{{Type: state.OpTimeFloor, Unix: 1}})
	// Into the election that cannot save its term.
	tryUntil(t, func(context.Context) error {
		if n.raft.State().String() != "Candidate" {
			return errors.New("no candidate yet")
		}
		return nil
	})
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	failing.Store(false)
	openTest(t, cfg)
}
