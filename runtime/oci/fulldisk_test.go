package oci

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// inodes is a file system that can be left with so many files to make.
type inodes struct {
	t   testing.TB
	dir string
	n   int
}

func smallDisk(t testing.TB, dir string) *inodes {
	t.Helper()
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m,nr_inodes=200,mode=755")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return &inodes{t: t, dir: dir}
}

func (d *inodes) leave(n int) {
	d.t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(d.dir, &st); err != nil {
		d.t.Fatal(err)
	}
	for have := int(st.Ffree); have != n; {
		var err error
		if have > n {
			d.n, have = d.n+1, have-1
			err = os.WriteFile(filepath.Join(d.dir, fmt.Sprint("full-", d.n)), nil, 0o600)
		} else {
			err = os.Remove(filepath.Join(d.dir, fmt.Sprint("full-", d.n)))
			d.n, have = d.n-1, have+1
		}
		if err != nil {
			d.t.Fatal(err)
		}
	}
}

// TestFullDiskInEveryStepOfAStart: a disk on which one file less can be made
// than a start needs, for each number of files: the start says that there is
// no space and leaves nothing. With one more it starts.
func TestFullDiskInEveryStepOfAStart(t *testing.T) {
	for _, place := range []string{"run", "state", "log"} {
		t.Run(place, func(t *testing.T) {
			b := newBench(t)
			var d *inodes
			switch place {
			case "run":
				d = smallDisk(t, b.cfg.RunDir)
			case "state":
				d = smallDisk(t, b.cfg.StateDir)
			case "log":
				d = smallDisk(t, b.logs)
			}
			if err := b.Runtime.Close(); err != nil {
				t.Fatal(err)
			}
			b.open()
			failed := 0
			for n := 0; ; n++ {
				if n > 60 {
					t.Fatal("it never started")
				}
				s := b.sh(fmt.Sprint(place, n), "exit 3")
				d.leave(n)
				_, err := b.Start(t.Context(), s)
				if err == nil {
					st := b.ended(s.ID)
					d.leave(60)
					if st.Reason == "MonitorLost" && strings.Contains(st.Message, "no space left") {
						continue // the code needs a file, too
					}
					if st.ExitCode != 3 {
						t.Errorf("with room for %d files it started and ended %+v", n, st)
					}
					if err := b.Remove(t.Context(), s.ID); err != nil {
						t.Error(err)
					}
					break
				}
				failed++
				var se *workload.StartError
				if !errors.As(err, &se) || se.Reason == "" || !strings.Contains(strings.ToLower(err.Error()), "no space left") {
					t.Errorf("room for %d files: %v", n, err)
				}
				d.leave(60)
				if _, ok, err := b.State(t.Context(), s.ID); ok || err != nil {
					t.Errorf("room for %d files: left over: %v %v", n, ok, err)
				}
			}
			if failed == 0 {
				t.Error("it needs no file there: nothing was tested")
			}
			t.Logf("%s: %d starts failed", place, failed)
		})
	}
}

// TestFullDiskOfTheLog: output that finds no room is lost, and the container
// runs on to its end.
func TestFullDiskOfTheLog(t *testing.T) {
	b := newBench(t)
	d := smallDisk(t, b.logs)
	s := b.sh("chatty", "i=0; while [ $i -lt 200 ]; do echo line $i of some length; i=$((i+1)); done; exit 5")
	if err := os.MkdirAll(filepath.Dir(s.LogPath), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.dir, "full"), make([]byte, 4<<20-8<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	b.start(s)
	if st := b.ended(s.ID); st.ExitCode != 5 {
		t.Errorf("on a full disk it ended %+v", st)
	}
	if info, err := os.Stat(s.LogPath); err != nil || info.Size() > 8<<10 {
		t.Errorf("the log: %v, %v", info, err)
	}
}
