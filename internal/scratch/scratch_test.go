package scratch

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// TestSweepTakesOnlyWhatNobodyMakes: what is being made stays, however often
// others look; what a dead maker left goes at once.
func TestSweepTakesOnlyWhatNobodyMakes(t *testing.T) {
	dir := t.TempDir()
	sweeps := make(chan struct{})
	var sweeper, makers sync.WaitGroup
	sweeper.Go(func() {
		for {
			select {
			case <-sweeps:
				return
			default:
				Sweep(dir, ".import-*")
				Sweep(dir, ".new-*")
			}
		}
	})
	for range 4 {
		makers.Go(func() {
			for range 200 {
				f, err := File(dir, ".import-*")
				if err != nil {
					t.Error(err)
					return
				}
				folder, release, err := Folder(dir, ".new-*")
				if err != nil {
					t.Error(err)
					return
				}
				for _, p := range []string{f.Name(), folder} {
					if _, err := os.Stat(p); err != nil {
						t.Error(err)
					}
				}
				_ = f.Close()
				release()
			}
		})
	}
	makers.Wait()
	close(sweeps)
	sweeper.Wait()
	if err := os.WriteFile(filepath.Join(dir, ".new-1", "x"), nil, 0o600); err == nil {
		t.Fatal("a folder of that name is there already")
	}
	if err := os.MkdirAll(filepath.Join(dir, ".new-1", "code"), 0o700); err != nil {
		t.Fatal(err)
	}
	Sweep(dir, ".import-*")
	Sweep(dir, ".new-*")
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
