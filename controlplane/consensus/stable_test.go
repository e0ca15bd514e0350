package consensus

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Raft's goroutine stands for election while the disk is full, and the one
// that hears heartbeats learns of other terms meanwhile: whatever comes last,
// the term and the vote in it never fall.
func TestTermsWaitForTheDiskAndNeverFall(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		full := errors.New("full")
		var mu sync.Mutex
		fault := full
		s := &stableStore{
			slots: &slots{disk: &Disk{}, path: filepath.Join(dir, "stable")}, self: []byte("me"), ctx: t.Context(),
			last: func() uint64 { return 0 }, fault: func(error) {},
			gate: func(context.Context) error {
				mu.Lock()
				defer mu.Unlock()
				return fault
			},
		}
		var wg sync.WaitGroup
		for _, term := range []uint64{4, 6, 5} {
			wg.Go(func() {
				if err := s.SetUint64([]byte(keyCurrentTerm), term); err != nil {
					t.Error(err)
				}
			})
		}
		time.Sleep(time.Minute)
		if v, err := s.GetUint64([]byte(keyCurrentTerm)); err != nil || v != 0 {
			t.Fatalf("term %d before the disk took one: %v", v, err)
		}
		mu.Lock()
		fault = nil
		mu.Unlock()
		wg.Wait()
		if err := s.SetUint64([]byte(keyCurrentTerm), 3); err != nil {
			t.Fatal(err)
		}
		reread := &stableStore{slots: &slots{disk: &Disk{}, path: filepath.Join(dir, "stable")}}
		if ok, err := reread.load(); !ok || err != nil || reread.term != 6 || reread.voteTerm != 6 {
			t.Fatalf("on disk: %v, %v, term %d, vote in %d", ok, err, reread.term, reread.voteTerm)
		}
		for _, s := range []*stableStore{s, reread} {
			if err := s.close(); err != nil {
				t.Error(err)
			}
		}
	})
}
