package wasm

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
	"github.com/dunlin-project/dunlin/runtime/conformance"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

func TestConformance(t *testing.T) {
	dir := t.TempDir()
	tree := cgroup.New(cgroup.Config{Name: "dunlin-test-wasm"})
	t.Cleanup(func() {
		if err := tree.Destroy(); err != nil {
			t.Error(err)
		}
	})
	module, err := filepath.Abs("testdata/guest.wasm")
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), HostBinary: slimHost(t), Cgroups: tree,
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
	}
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	f := tree.Facts()
	conformance.Run(t, conformance.Subject{
		Open: func(t *testing.T) workload.Runtime {
			r, err := New(cfg)
			if err != nil {
				t.Fatal(err)
			}
			return r
		},
		Image: "file://" + module, Program: []string{"guest"}, MemoryLimited: f.Memory, CPULimited: f.CPU,
	})
}
