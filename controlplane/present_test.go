package controlplane

import (
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dunlin-project/dunlin/internal/clock"
)

// A server whose replicated state was removed, with its keys left, must not
// begin an empty cluster under the old id. It comes back with a snapshot.
func TestStateGone(t *testing.T) {
	dir := t.TempDir()
	one := startServer(t, "one", dir, nil)
	one.waitRoles("one=leader")
	code, body, _ := one.do(one.admin, "POST", "/api/v1/namespaces/default/configmaps", map[string]any{"metadata": map[string]any{"name": "kept"}})
	if code != http.StatusCreated {
		t.Fatalf("create: %d %s", code, body)
	}
	code, image, _ := one.do(one.admin, "GET", SnapshotPath, nil)
	if code != http.StatusOK {
		t.Fatalf("snapshot: %d %s", code, image)
	}
	saved := filepath.Join(t.TempDir(), "saved")
	must(t, os.WriteFile(saved, []byte(image), 0o600))
	one.stop()
	must(t, one.err)

	raft, mark := filepath.Join(dir, "raft"), filepath.Join(dir, markFile)
	refused := func(what string) {
		t.Helper()
		l := listenFor(t, "one")
		defer func() { _ = l.Close() }()
		_, err := New(t.Context(), Config{StateDir: dir, Listener: l, Advertise: []string{l.Addr().String()}, Clock: clock.System, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
		if !errors.Is(err, ErrStateGone) || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), raft) || !strings.Contains(err.Error(), "dunlin snapshot restore FILE --yes") {
			t.Fatalf("%s: %v", what, err)
		}
	}
	must(t, os.RemoveAll(raft))
	refused("no folder")
	if _, err := os.Stat(raft); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the refused start made the folder: %v", err)
	}
	must(t, os.Mkdir(raft, 0o700))
	refused("an empty folder, as where a disk is not mounted")
	if err := checkState(dir, raft, true); !errors.Is(err, ErrStateGone) || !strings.Contains(err.Error(), "join again") {
		t.Errorf("a server that joined: %v", err)
	}

	for _, empty := range []bool{true, false} {
		must(t, os.RemoveAll(raft))
		if empty {
			must(t, os.Mkdir(raft, 0o700))
		}
		if _, err := Restore(t.Context(), dir, saved, slog.New(slog.DiscardHandler)); err != nil {
			t.Fatalf("restore, folder there: %v: %v", empty, err)
		}
	}
	back := startServer(t, "one", dir, nil)
	back.waitRoles("one=leader")
	if code, body, _ := back.do(back.admin, "GET", "/api/v1/namespaces/default/configmaps/kept", nil); code != http.StatusOK {
		t.Errorf("after the restore: %d %s", code, body)
	}
	back.stop()
	must(t, back.err)

	// Without the mark it is a first start that was cut short.
	must(t, errors.Join(os.RemoveAll(raft), os.Remove(mark)))
	again := startServer(t, "one", dir, nil)
	again.waitRoles("one=leader")
	if _, err := os.Stat(mark); err != nil {
		t.Errorf("the mark: %v", err)
	}
}
