package consensus

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Two of three servers are lost for good: the survivor goes on alone with
// all that was acknowledged to it, in a new epoch, and takes further servers.
func TestRecoverSurvivor(t *testing.T) {
	dirs := [3]string{t.TempDir(), t.TempDir(), t.TempDir()}
	var version uint64
	synctest.Test(t, func(t *testing.T) {
		c := newSim(t, dirs)
		lead := c.leader(-1)
		for _, name := range []string{"a", "b", "c"} {
			if err := c.propose(lead, name); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Second) // all have it
		version = c.nodes[0].State().Snapshot().ResourceVersion()
		for i := range c.nodes {
			c.stop(i)
		}
	})
	cfg := Config{Dir: dirs[1], ExpectClusterID: "cluster-1", Log: testLog(t)}
	for range 2 { // it can be repeated
		out, err := Recover(t.Context(), cfg)
		if err != nil || out.Epoch != 2 || out.Version != version || out.ClusterID != "cluster-1" {
			t.Fatalf("%+v, %v (the version was %d)", out, err, version)
		}
	}
	n := openTest(t, cfg)
	if n.Epoch() != 2 || n.State().Facts().Epoch != 2 {
		t.Errorf("epoch %d, of the state %d", n.Epoch(), n.State().Facts().Epoch)
	}
	members, _, err := n.Members()
	if err != nil || len(members) != 1 || members[0].ID != "server-1" || !members[0].Voter {
		t.Errorf("members %+v, %v", members, err)
	}
	s := n.State().Snapshot()
	for _, name := range []string{"a", "b", "c"} {
		if _, ok := s.Get(state.Key{Kind: "ConfigMap", Name: name}); !ok {
			t.Errorf("%s was acknowledged and is missing", name)
		}
	}
	if s.ResourceVersion() < version+1<<32 {
		t.Errorf("version %d after %d: it could be handed out twice", s.ResourceVersion(), version)
	}
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", "after")})
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	// The epoch outlives a start without the log replayed.
	again := openTest(t, cfg)
	if again.Epoch() != 2 {
		t.Errorf("epoch %d after a restart", again.Epoch())
	}
	if err := again.AddNonvoter("server-9", 0); err != nil {
		t.Error(err)
	}
}

// A recovery whose disk fails, once or for good, at any of its writes has
// changed nothing, or says that it is to be done again, which can be done.
func TestRecoverOnAFailingDisk(t *testing.T) {
	dirs := [3]string{t.TempDir(), t.TempDir(), t.TempDir()}
	synctest.Test(t, func(t *testing.T) {
		c := newSim(t, dirs)
		for _, name := range []string{"a", "b", "c"} {
			if err := c.propose(c.leader(-1), name); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Second)
		for i := range c.nodes {
			c.stop(i)
		}
	})
	outcomes := map[string]int{}
	for _, forGood := range []bool{false, true} {
		for at, done := 1, false; !done; at++ {
			dir := filepath.Join(t.TempDir(), "raft")
			if err := os.CopyFS(dir, os.DirFS(dirs[1])); err != nil {
				t.Fatal(err)
			}
			n := 0
			disk := &Disk{Observe: func(DiskEvent) error {
				if n++; n == at || forGood && n > at {
					return syscall.ENOSPC
				}
				return nil
			}}
			cfg := Config{Dir: dir, ExpectClusterID: "cluster-1", Log: slog.New(slog.DiscardHandler), Disk: disk}
			_, err := Recover(t.Context(), cfg)
			done = n < at
			cfg.Disk = nil
			voters, epoch, later := Voters(t.Context(), cfg)
			switch {
			case later != nil:
				t.Fatalf("for good %v, event %d: %v after %v", forGood, at, later, err)
			case err == nil && epoch == 2 && len(voters) == 1:
				outcomes["recovered"]++
			case errors.Is(err, ErrHalfRecovered):
				outcomes["half done"]++
			case err != nil && epoch == 1 && len(voters) == 3:
				outcomes["as it was"]++
			default:
				t.Errorf("for good %v, event %d: epoch %d, voters %v after %v", forGood, at, epoch, voters, err)
			}
			if out, err := Recover(t.Context(), cfg); err != nil || out.Epoch != 2 {
				t.Errorf("for good %v, event %d: again: %+v, %v", forGood, at, out, err)
			}
		}
	}
	t.Log(outcomes)
	if outcomes["as it was"] < 4 || outcomes["half done"] == 0 || outcomes["recovered"] < 2 {
		t.Error("the disk did not fail where it should")
	}
}

func TestRecoverRefusals(t *testing.T) {
	if _, err := Recover(t.Context(), Config{Dir: filepath.Join(t.TempDir(), "none"), Log: testLog(t)}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no folder: %v", err)
	}
	dir := t.TempDir()
	n := openTest(t, testConfig(t, dir))
	if _, err := Recover(t.Context(), testConfig(t, dir)); !errors.Is(err, ErrLocked) {
		t.Errorf("while it runs: %v", err)
	}
	_ = n.Close()
	if _, err := Recover(t.Context(), Config{Dir: dir, ExpectClusterID: "other", Log: testLog(t)}); !errors.Is(err, ErrOtherCluster) {
		t.Errorf("another cluster: %v", err)
	}
	joining := t.TempDir()
	cfg := testConfig(t, joining)
	cfg.Join = true
	j, err := Open(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if j, err = Open(testContext(t), cfg); err != nil { // it waits on
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Recover(t.Context(), testConfig(t, joining)); !errors.Is(err, ErrNothing) {
		t.Errorf("a server that never had a copy: %v", err)
	}
}

// A saved image is checked whole, and replaces a later state; versions never
// come back.
func TestImageAndRestore(t *testing.T) {
	dir, tmp := filepath.Join(t.TempDir(), "raft"), t.TempDir()
	n := openTest(t, testConfig(t, dir))
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", "early")})
	var b bytes.Buffer
	if err := WriteImage(n.State().Image(), tmp, &b); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(tmp, "saved")
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	info, err := ReadImageFile(file, filepath.Join(tmp, "x1"))
	if err != nil || info.ClusterID != "cluster-1" || info.Objects != 1 || info.Version != n.State().Snapshot().ResourceVersion() {
		t.Fatalf("%+v, %v", info, err)
	}
	size := b.Len() - streamHeader
	for name, c := range map[string]struct {
		damage func([]byte) []byte
		says   string // behind the file's name
	}{
		"cut short":             {func(b []byte) []byte { return b[:len(b)-100] }, fmt.Sprintf("the file is damaged: behind its header it has %d bytes and should have %d", size-100, size)},
		"a bit flip":            {func(b []byte) []byte { b[len(b)/2] ^= 1; return b }, "the file is damaged: its checksum differs"},
		"cut within the header": {func(b []byte) []byte { return b[:20] }, "the file is damaged: it ends within its header, after 20 bytes"},
		"no header":             {func(b []byte) []byte { return b[20:] }, "it is no snapshot of dunlin's"},
		"two bytes":             {func([]byte) []byte { return []byte("DS") }, "it is no snapshot of dunlin's"},
		"empty":                 {func([]byte) []byte { return nil }, "it is no snapshot of dunlin's"},
		"a newer one":           {func(b []byte) []byte { b[7] = 99; return b }, "written by a newer version: upgrade dunlin (format 99, known 1)"},
	} {
		bad := filepath.Join(tmp, "bad")
		if err := os.WriteFile(bad, c.damage(bytes.Clone(b.Bytes())), 0o600); err != nil {
			t.Fatal(err)
		}
		_ = os.Remove(filepath.Join(tmp, "x2"))
		if _, err := ReadImageFile(bad, filepath.Join(tmp, "x2")); err == nil || err.Error() != bad+": "+c.says {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := Restore(t.Context(), testConfig(t, filepath.Join(tmp, "never")), bad); err == nil {
			t.Errorf("%s: restored", name)
		}
		if _, err := os.Stat(filepath.Join(tmp, "never")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: a folder was made: %v", name, err)
		}
	}
	mustPropose(t, n, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", "late")})
	late := n.State().Snapshot().ResourceVersion()
	if _, err := Restore(t.Context(), testConfig(t, dir), file); !errors.Is(err, ErrLocked) {
		t.Errorf("while it runs: %v", err)
	}
	_ = n.Close()
	other := testConfig(t, dir)
	other.ClusterID = "cluster-2"
	if _, err := Restore(t.Context(), other, file); !errors.Is(err, ErrOtherCluster) {
		t.Errorf("of another cluster: %v", err)
	}
	for round := uint64(1); round <= 2; round++ { // the same image again: versions go on rising
		out, err := Restore(t.Context(), testConfig(t, dir), file)
		if err != nil || out.Epoch != 1+round {
			t.Fatalf("%+v, %v", out, err)
		}
		if _, err := os.Stat(filepath.Join(out.Moved, "log")); err != nil {
			t.Errorf("the old folder: %v", err)
		}
		if err := os.RemoveAll(out.Moved); err != nil {
			t.Fatal(err)
		}
		r := openTest(t, testConfig(t, dir))
		s := r.State().Snapshot()
		_, early := s.Get(state.Key{Kind: "ConfigMap", Name: "early"})
		_, isLate := s.Get(state.Key{Kind: "ConfigMap", Name: "late"})
		if !early || isLate || r.Epoch() != 1+round || r.State().Facts().Epoch != 1+round || s.ResourceVersion() <= late {
			t.Errorf("early %v, late %v, epoch %d, version %d (was %d)", early, isLate, r.Epoch(), s.ResourceVersion(), late)
		}
		mustPropose(t, r, state.Op{Type: state.OpCreate, Record: object("ConfigMap", "", "again")})
		late = r.State().Snapshot().ResourceVersion()
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
