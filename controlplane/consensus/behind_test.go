package consensus

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
)

// TestNULsInTheMiddle: a block of NULs in the middle of the log looks like its
// end. What follows it is given up, said, and kept, with a bound and without.
func TestNULsInTheMiddle(t *testing.T) {
	killed, _ := killedFolder(t, 60)
	for name, bounded := range map[string]bool{"bound": true, "no bound": false} {
		t.Run(name, func(t *testing.T) {
			dir := copyOf(t, killed)
			path, b, used := used(t, dir)
			clear(b[used/2 : used/2+4096])
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			if !bounded {
				if err := os.Remove(filepath.Join(dir, "bound")); err != nil {
					t.Fatal(err)
				}
			}
			var said bytes.Buffer
			cfg := crashConfig(dir)
			cfg.Log = slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelWarn}))
			n := openTest(t, cfg)
			if e := n.Epoch(); e != 2 {
				t.Errorf("epoch %d", e)
			}
			kept, err := os.ReadFile(filepath.Join(dir, "log.damaged", filepath.Base(path)))
			if err != nil || !bytes.Equal(kept, b) {
				t.Errorf("the damaged log is not kept as it was: %v", err)
			}
			if s := said.String(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "acknowledged changes are lost") ||
				!strings.Contains(s, " lost=") || strings.Contains(s, "lost=unknown") || !strings.Contains(s, "moved="+filepath.Join(dir, "log.damaged")) {
				t.Errorf("it said %q", s)
			}
			mustWriteAndReopen(t, n, cfg)
			if err := n.Close(); err != nil {
				t.Fatal(err)
			}
			said.Reset()
			// What was behind the damage is no new loss.
			again := openTest(t, cfg)
			if e := again.Epoch(); e != 2 || said.Len() > 0 {
				t.Errorf("after another start: epoch %d, it said %q", e, said.String())
			}
			if err := again.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestTornWriteIsNoLoss: whatever part of the last write is missing, it was
// never acknowledged, and nothing is said or kept.
func TestTornWriteIsNoLoss(t *testing.T) {
	killed, _ := killedFolder(t, 20)
	if err := os.Remove(filepath.Join(killed, "bound")); err != nil {
		t.Fatal(err)
	}
	_, b, end := used(t, killed)
	end = (end + walFrame - 1) / walFrame * walFrame
	start := bytes.LastIndex(b[:end-walFrame], commitMark[:4]) + walFrame
	for name, torn := range map[string][2]int{
		"all": {start, end}, "the beginning": {start, start + 64}, "the end": {end - 64, end}, "the middle": {start + 64, end - 64},
	} {
		dir := copyOf(t, killed)
		path, b, _ := used(t, dir)
		clear(b[torn[0]:torn[1]])
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		var said lines
		cfg := crashConfig(dir)
		cfg.Log = slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelWarn}))
		n := openTest(t, cfg)
		if e := n.Epoch(); e != 1 || said.count() > 0 {
			t.Errorf("%s: epoch %d, %d lines", name, e, said.count())
		}
		if _, err := os.Stat(filepath.Join(dir, "log.damaged")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestBehindEnd: only whole writes after another one count, not what somebody's
// data looks like.
func TestBehindEnd(t *testing.T) {
	file := func(entries ...[]*raft.Log) (string, []byte, int) {
		t.Helper()
		parent := t.TempDir()
		l, _ := openLog(t, filepath.Join(parent, "log"), 64<<10)
		for _, batch := range entries {
			if err := l.StoreLogs(batch); err != nil {
				t.Fatal(err)
			}
		}
		l.close()
		return used(t, parent)
	}
	entry := func(i uint64, data []byte) *raft.Log { return &raft.Log{Index: i, Term: 1, Data: data} }
	filler := bytes.Repeat([]byte("x"), 800)
	_, other, n := file([]*raft.Log{entry(70, filler)}, []*raft.Log{entry(71, filler)}, []*raft.Log{entry(72, filler)})
	if got := behindEnd(other); got != 0 {
		t.Errorf("whole: %d", got)
	}
	cut := bytes.Clone(other)
	clear(cut[walHeader : walHeader+128])
	if got := behindEnd(cut); got != 72 {
		t.Errorf("NULs in the first of three writes: %d", got)
	}
	fake := bytes.Clone(other[:(n+7)/8*8])
	for pad := range walFrame { // wherever it comes to lie
		_, b, _ := file([]*raft.Log{entry(1, append(make([]byte, pad), fake...))}, []*raft.Log{entry(2, filler)})
		if got := behindEnd(b); got != 0 {
			t.Errorf("in somebody's data, at %d: %d", pad, got)
		}
	}
	// One write of several entries that lost its beginning was never acknowledged.
	_, b, _ := file([]*raft.Log{entry(1, filler)}, []*raft.Log{entry(2, filler), entry(3, filler), entry(4, filler)})
	torn := walHeader + bytes.Index(b[walHeader:], commitMark[:4]) + walFrame
	clear(b[torn : torn+512])
	if got := behindEnd(b); got != 0 {
		t.Errorf("a torn write: %d", got)
	}
}

// TestNULsOnOneOfSeveral: a server that is not the only voter refuses, at every
// start, and its files stay as they are.
func TestNULsOnOneOfSeveral(t *testing.T) {
	dirs := [3]string{t.TempDir(), t.TempDir(), t.TempDir()}
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		c := newSim(t, dirs)
		lead := c.leader(-1)
		for i := range 30 {
			if err := c.propose(lead, fmt.Sprint("object-", i)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Second)                               // all have it
		if err := os.CopyFS(dir, os.DirFS(dirs[1])); err != nil { // as a kill leaves it
			t.Fatal(err)
		}
		for i := range c.nodes {
			c.stop(i)
		}
	})
	path, b, used := used(t, dir)
	clear(b[used/2 : used/2+512])
	if err := errors.Join(os.WriteFile(path, b, 0o600), os.Remove(filepath.Join(dir, "bound"))); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		_, err := Open(testContext(t), Config{Dir: dir, ExpectClusterID: "cluster-1", Log: testLog(t), SegmentBytes: 16 << 10})
		if !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), "are lost, and this server is not the only voter") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v", err)
		}
	}
	if kept, err := os.ReadFile(path); err != nil || !bytes.Equal(kept, b) {
		t.Errorf("the damaged log is another one now: %v", err)
	}
}
