package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/runtime/cgroup"
)

// TestSweepMakesNothing: where nothing is, nothing is made, not even by the
// looking; and only the flags that say where the agent is are there.
func TestSweepMakesNothing(t *testing.T) {
	t.Setenv("DUNLIN_CONFIG", os.DevNull)
	dir := t.TempDir()
	netns := fmt.Sprintf("dsw%d", os.Getpid()%100000)
	sweep := func() {
		t.Helper()
		var out, errw bytes.Buffer
		args := []string{"server", "sweep", "--netns", netns, "--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"), "--config-dir", filepath.Join(dir, "config")}
		if code := Main(args, strings.NewReader(""), &out, &errw); code != 0 || errw.Len() > 0 {
			t.Fatalf("exit %d: %s", code, errw.String())
		}
		if _, err := os.Lstat(filepath.Join(netnsClaims, netns+".lock")); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the claim is left: %v", err)
		}
	}
	sweep()
	if made, err := os.ReadDir(dir); err != nil || len(made) > 0 {
		t.Errorf("made %v, %v", made, err)
	}
	// What was there stays.
	for _, f := range []string{"run/wasm", "run/oci", "state/node"} {
		if err := os.MkdirAll(filepath.Join(dir, f), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	sweep()
	if made, err := os.ReadDir(filepath.Join(dir, "state")); err != nil || len(made) != 1 {
		t.Errorf("in the state folder: %v, %v", made, err)
	}
	var out, errw bytes.Buffer
	if code := Main([]string{"server", "sweep", "--help"}, strings.NewReader(""), &out, &errw); code != 0 {
		t.Fatal(errw.String())
	}
	if s := out.String(); strings.Contains(s, "--max-pods") || strings.Contains(s, "--node-labels") || !strings.Contains(s, "--cgroup") {
		t.Errorf("help: %s", s)
	}
}

// TestRootsInstead: who has no agent is told of root's, and who has one, or
// names another folder, is not.
func TestRootsInstead(t *testing.T) {
	dir := t.TempDir()
	usual, roots := dirs{state: filepath.Join(dir, "mine")}, filepath.Join(dir, "roots")
	is := func(state, says string) {
		t.Helper()
		o := nodeOptions{dirs: dirs{state: state}}
		if err := o.rootsInstead(usual, filepath.Join(dir, "none"), roots); (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", state, err, says)
		}
	}
	is(usual.state, "")
	if err := os.Mkdir(roots, 0o700); err != nil {
		t.Fatal(err)
	}
	is(usual.state, "try sudo")
	is(dir, "")
	if err := os.MkdirAll(filepath.Join(usual.state, "wasm"), 0o700); err != nil { // of 'dunlin images'
		t.Fatal(err)
	}
	is(usual.state, "try sudo")
	if err := os.Mkdir(filepath.Join(usual.state, "node"), 0o700); err != nil {
		t.Fatal(err)
	}
	is(usual.state, "")
}

// TestWhyNoLimits is one line that says a thing once.
func TestWhyNoLimits(t *testing.T) {
	for want, f := range map[string]cgroup.Facts{
		"only root can make control groups": {Reason: "no control group can be made: a\nb", MemoryReason: "memory limits are not enforced: only root can make control groups"},
		"none: a; b":                        {Reason: "none: a\nb", MemoryReason: "memory limits are not enforced: none: a\nb"},
		"x":                                 {Reason: "x"},
	} {
		if got := whyNoLimits(f); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// TestReadOnlyConfigFolder: a server that cannot write its kubeconfig makes
// nothing.
func TestReadOnlyConfigFolder(t *testing.T) {
	t.Setenv("DUNLIN_CONFIG", os.DevNull)
	dir := t.TempDir()
	config := filepath.Join(dir, "config")
	if err := os.Mkdir(config, 0o500); err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := unix.Mount("tmpfs", config, "tmpfs", unix.MS_RDONLY, ""); err != nil {
			t.Skipf("SKIPPED: cannot mount a tmpfs here: %v", err)
		}
		t.Cleanup(func() { _ = unix.Unmount(config, 0) })
	}
	var out, errw bytes.Buffer
	args := []string{"server", "--no-node", "--listen", "127.0.0.1:0", "--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"), "--config-dir", filepath.Join(config, "dunlin")}
	if code := Main(args, strings.NewReader(""), &out, &errw); code != exitFailed || !strings.Contains(errw.String(), "nothing was made") || strings.Count(strings.TrimSpace(errw.String()), "\n") > 0 {
		t.Errorf("exit %d: %s", code, errw.String())
	}
	if made, err := os.ReadDir(dir); err != nil || len(made) != 1 {
		t.Errorf("made %v, %v", made, err)
	}
}
