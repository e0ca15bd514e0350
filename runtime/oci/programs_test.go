package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
)

// TestRuntimeThatHangs: an OCI runtime that does not come back is not waited
// for for ever, its name is said, and nothing stays of the container that it
// made all the same.
func TestRuntimeThatHangs(t *testing.T) {
	cfg, _ := config(t, "dunlin-test-oci-h")
	bin := t.TempDir()
	made := filepath.Join(bin, "made")
	// It makes the container, and then waits as if it had not.
	script := fmt.Sprintf("#!/bin/sh\n%s \"$@\" || exit\ncase \"$*\" in *' create '*) touch %s; exec sleep 1000;; esac\n", cfg.Programs.Runtime, made)
	if err := os.WriteFile(filepath.Join(bin, "runc"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"conmon", "sleep", "touch"} {
		path, err := exec.LookPath(p)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(bin, p)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin)
	tree := cgroup.New(cgroup.Config{Name: fmt.Sprintf("dunlin-test-oci-hang-%d", os.Getpid())})
	dir := t.TempDir()
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for !exists(made) {
			select {
			case <-tick.C:
			case <-t.Context().Done():
				return
			}
		}
		cancel(errors.New("it took too long"))
	}()
	_, err := Find(ctx, dir, tree)
	var missing *MissingError
	if !errors.As(err, &missing) || !strings.Contains(err.Error(), "runc does not work here: it took too long") || strings.Contains(err.Error(), "busy") {
		t.Errorf("%v", err)
	}
	if err := tree.Destroy(); err != nil {
		t.Errorf("left: %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
