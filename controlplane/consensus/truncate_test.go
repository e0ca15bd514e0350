package consensus

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

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
