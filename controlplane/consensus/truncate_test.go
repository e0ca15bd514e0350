package consensus

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"
)

func openLog(t *testing.T, dir string, segment int) (*logStore, *salvageReport) {
	t.Helper()
	l := &logStore{disk: &Disk{}, dir: dir, segment: segment, logger: hclog.NewNullLogger(),
		kept: func() (uint64, uint64) { return 0, 0 }, fault: func(err error) { t.Error(err) }}
	report, err := l.open()
	if err != nil {
		t.Fatal(err)
	}
	return l, report
}

func appendLog(t *testing.T, l *logStore, from, to, term uint64) {
	t.Helper()
	for i := from; i <= to; i++ {
		if err := l.StoreLog(&raft.Log{Index: i, Term: term, Data: []byte(fmt.Sprintf("entry %d of term %d, and some more to fill the segment", i, term))}); err != nil {
			t.Fatal(err)
		}
	}
}

// checkLog compares the log with terms: terms[i] is that of entry i+1.
func checkLog(t *testing.T, l *logStore, terms []uint64) {
	t.Helper()
	if l.first.Load() != 1 || l.last.Load() != uint64(len(terms)) {
		t.Fatalf("the log is %d to %d, want 1 to %d", l.first.Load(), l.last.Load(), len(terms))
	}
	for i, term := range terms {
		var e raft.Log
		if err := l.GetLog(uint64(i)+1, &e); err != nil || e.Term != term {
			t.Fatalf("entry %d: term %d, want %d; %v", i+1, e.Term, term, err)
		}
	}
}

// A follower's last entries are cut off and others take their place, again
// and again, in small segments; after every cut the log is opened anew, in
// order or after a kill, and holds exactly what it did.
func TestTruncatedTailOpensAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	l, _ := openLog(t, dir, 4<<10)
	var terms []uint64
	for term := uint64(1); term <= 40; term++ {
		keep := len(terms)
		if term > 1 {
			keep -= int(term*7) % 23 % (len(terms)/2 + 1)
			if keep < len(terms) {
				if err := l.DeleteRange(uint64(keep)+1, uint64(len(terms))); err != nil {
					t.Fatal(err)
				}
			}
		}
		terms = terms[:keep]
		more := term * 5 % 17
		if term%4 == 0 {
			more = 0 // cut, and nothing after it
		}
		appendLog(t, l, uint64(keep)+1, uint64(keep)+more, term)
		for range more {
			terms = append(terms, term)
		}
		checkLog(t, l, terms)
		if term%3 == 0 { // killed: a copy of the files as they are
			next := filepath.Join(t.TempDir(), "log")
			l.meta.rotation.wait()
			if err := os.CopyFS(next, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			l.close()
			dir = next
		} else {
			l.close()
		}
		var report *salvageReport
		if l, report = openLog(t, dir, 4<<10); report != nil {
			t.Fatalf("term %d: the log was taken for damaged: %v", term, report.Cause)
		}
		checkLog(t, l, terms)
	}
	// Damage elsewhere: the mark of a cut is no entry.
	l.close()
	names, err := filepath.Glob(filepath.Join(dir, "segments.*"))
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	for _, n := range names {
		if err := os.Remove(n); err != nil {
			t.Fatal(err)
		}
	}
	l, report := openLog(t, dir, 4<<10)
	if report == nil || report.Gap {
		t.Fatalf("salvaged: %+v", report)
	}
	for i, term := range terms {
		var e raft.Log
		if err := l.GetLog(uint64(i)+1, &e); err != nil || e.Term != term {
			t.Fatalf("salvaged entry %d: term %d, want %d; %v", i+1, e.Term, term, err)
		}
	}
	l.close()
	l, report = openLog(t, dir, 4<<10)
	if report != nil {
		t.Errorf("what was salvaged is taken for damaged: %v", report.Cause)
	}
	l.close()
}

// A leader that was cut off has entries that nobody else got. Back again, it
// learns of a new term, notes the end of its log with it, and the new leader
// cuts those entries away. Killed right after, it starts again: what is gone
// was no loss.
func TestKilledAfterItsTailWasCut(t *testing.T) {
	dirs := [3]string{t.TempDir(), t.TempDir(), t.TempDir()}
	killed := t.TempDir()
	var before, after uint64
	synctest.Test(t, func(t *testing.T) {
		c := newSim(t, dirs)
		old := c.leader(-1)
		if err := c.propose(old, "everywhere"); err != nil {
			t.Fatal(err)
		}
		c.cut(old)
		var lost []raft.ApplyFuture
		for range 20 {
			lost = append(lost, c.nodes[old].raft.Apply([]byte("nobody else gets this"), 0))
		}
		c.leader(old)
		for _, f := range lost {
			if err := f.Error(); err == nil {
				t.Error("acknowledged without a majority")
			}
		}
		before = c.nodes[old].logs.last.Load()
		c.heal(old)
		for range 300 {
			if after = c.nodes[old].logs.last.Load(); after < before {
				break
			}
			time.Sleep(10 * time.Millisecond)
		}
		synctest.Wait()
		if err := os.CopyFS(killed, os.DirFS(dirs[old])); err != nil {
			t.Fatal(err)
		}
		for i := range c.nodes {
			c.stop(i)
		}
	})
	if after >= before {
		t.Fatalf("nothing was cut: the log ends at %d, before at %d", after, before)
	}
	n, err := Open(testContext(t), Config{Dir: killed, ExpectClusterID: "cluster-1", Log: testLog(t), SegmentBytes: 16 << 10})
	if err != nil {
		t.Fatal(err)
	}
	if noted := n.stable.disk.LastIndex; noted > after {
		t.Errorf("the noted end is %d; the log ended at %d before and %d after", noted, before, after)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
}
