package consensus

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/fxamacker/cbor/v2"

	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/internal/feature"
)

// filledFolder commits changes until there are two snapshots and a log after
// them, and returns the folder and the hash of its state.
func filledFolder(t *testing.T) (dir string, hash [32]byte) {
	t.Helper()
	dir = t.TempDir()
	n := openTest(t, crashConfig(dir))
	for i := range 60 {
		mustPropose(t, n, crashOps(i)...)
		if i == 20 || i == 40 {
			if err := n.Snapshot(testContext(t)); err != nil {
				t.Fatal(err)
			}
		}
	}
	hash, err := n.State().Hash()
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	return dir, hash
}

var damages = []struct {
	name string
	do   func(path string, b []byte) error
}{
	{"missing", func(p string, _ []byte) error { return os.Remove(p) }},
	{"empty", func(p string, _ []byte) error { return os.WriteFile(p, nil, 0o600) }},
	{"half", func(p string, b []byte) error { return os.WriteFile(p, b[:len(b)/2], 0o600) }},
	{"one byte less", func(p string, b []byte) error { return os.WriteFile(p, b[:max(0, len(b)-1)], 0o600) }},
	{"NUL", func(p string, b []byte) error { return os.WriteFile(p, make([]byte, len(b)), 0o600) }},
	{"NUL half", func(p string, b []byte) error {
		clear(b[len(b)/2:])
		return os.WriteFile(p, b, 0o600)
	}},
	{"NUL page", func(p string, b []byte) error {
		clear(b[:min(len(b), 4096)])
		return os.WriteFile(p, b, 0o600)
	}},
	{"bit early", func(p string, b []byte) error {
		b[len(b)/8] ^= 0x10
		return os.WriteFile(p, b, 0o600)
	}},
	{"bit middle", func(p string, b []byte) error {
		b[len(b)/2] ^= 1
		return os.WriteFile(p, b, 0o600)
	}},
	{"garbage", func(p string, b []byte) error {
		for i := range b {
			b[i] = byte(i * 7)
		}
		return os.WriteFile(p, b, 0o600)
	}},
}

// TestDamage damages each file of a state folder in each way, after a stop and
// after a kill. The server must come up with everything, or come up saying (by
// a new recovery epoch) that something is lost, or refuse with one line.
func TestDamage(t *testing.T) {
	for name, folder := range map[string]func(*testing.T) (string, [32]byte){
		"stopped": filledFolder,
		"killed":  func(t *testing.T) (string, [32]byte) { return killedFolder(t, 60) },
	} {
		t.Run(name, func(t *testing.T) {
			dir, want := folder(t)
			damageAll(t, dir, want)
		})
	}
}

func damageAll(t *testing.T, dir string, want [32]byte) {
	t.Helper()
	var files []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && d.Name() != "lock" {
			rel, _ := filepath.Rel(dir, path)
			files = append(files, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	outcomes := map[string]int{}
	for _, file := range files {
		for _, d := range damages {
			got := openDamaged(t, dir, file, d.name, d.do, want)
			outcomes[got]++
			if got != "whole" {
				t.Logf("%-45s %-14s %s", file, d.name, got)
			}
		}
	}
	t.Logf("%d files, outcomes %v", len(files), outcomes)
	if outcomes["whole"] < len(files)*len(damages)/2 {
		t.Error("too little survives single damages")
	}
}

func openDamaged(t *testing.T, dir, file, name string, do func(string, []byte) error, want [32]byte) string {
	t.Helper()
	copied := t.TempDir()
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(copied, file)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := do(path, b); err != nil {
		t.Fatal(err)
	}
	var said lines
	cfg := crashConfig(copied)
	cfg.Log = slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelWarn}))
	n, err := Open(testContext(t), cfg)
	if err != nil {
		if !errors.Is(err, ErrDamaged) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s, %s: %v", file, name, err)
		}
		return "refused"
	}
	defer func() { _ = n.Close() }()
	if _, err := n.WaitLeading(testContext(t)); err != nil {
		t.Errorf("%s, %s: %v", file, name, err)
		return "stuck"
	}
	mustWriteAndReopen(t, n, cfg)
	if n.State().Facts().Epoch != 1 {
		if said.count() == 0 {
			t.Errorf("%s, %s: lost something without a word", file, name)
		}
		return "lost"
	}
	got, err := n.State().Hash()
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("%s, %s: the state differs and nobody says so", file, name)
		return "silent"
	}
	return "whole"
}

// mustWriteAndReopen makes sure that a repaired folder takes writes. The
// write is undone by its condition: it changes nothing.
func mustWriteAndReopen(t *testing.T, n *Node, cfg Config) {
	t.Helper()
	if _, err := n.Propose(testContext(t), []state.Op{{Type: state.OpDelete, Key: &state.Key{Kind: "X", Name: "x"}, UID: "x"}}); err != nil {
		t.Errorf("%s: write after repair: %v", cfg.Dir, err)
	}
}

type lines struct {
	mu sync.Mutex
	n  int
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.n += strings.Count(string(p), "\n")
	return len(p), nil
}

func (l *lines) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.n
}

func TestNewerVersion(t *testing.T) {
	dir, _ := filledFolder(t)
	for _, file := range []string{"identity.0", "stable.0", "log/segments.1"} {
		copied := t.TempDir()
		if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(copied, file)
		if err := os.WriteFile(path, frame(frameFormat+1, 99, []byte("from the future")), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := Open(context.Background(), crashConfig(copied))
		if !errors.Is(err, ErrNewerVersion) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// A folder whose cluster has a higher feature level, or another form of
// snapshot, than this build knows is refused and left as it is: nothing is set
// aside, no older snapshot taken instead.
func TestSnapshotOfAHigherLevel(t *testing.T) {
	dir, hash := filledFolder(t)
	metas, err := filepath.Glob(filepath.Join(dir, "snapshots", "*.meta"))
	if err != nil || len(metas) != keepSnapshots {
		t.Fatal(metas, err)
	}
	slices.Sort(metas)
	for name, change := range map[string]func(*snapshotMeta){
		"level":  func(m *snapshotMeta) { m.Feature = feature.Level + 1 },
		"format": func(m *snapshotMeta) { m.Format = state.ImageFormat + 1 },
	} {
		for i, at := range metas {
			b, err := os.ReadFile(at)
			if err != nil {
				t.Fatal(err)
			}
			_, payload, err := unframe(b)
			if err != nil {
				t.Fatal(err)
			}
			var m snapshotMeta
			if err := cbor.Unmarshal(payload, &m); err != nil {
				t.Fatal(err)
			}
			change(&m)
			if payload, err = cbor.Marshal(&m); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(at, frame(frameFormat, 1, payload), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err = Open(context.Background(), crashConfig(dir))
			if !errors.Is(err, ErrNewerVersion) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%s of snapshot %d: %v", name, i, err)
			}
			if err := os.WriteFile(at, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	n := openTest(t, crashConfig(dir))
	if got, err := n.State().Hash(); err != nil || got != hash {
		t.Errorf("the folder is another one now: %v", err)
	}
}
