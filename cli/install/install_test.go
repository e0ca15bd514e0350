package install

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func tree(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			out = append(out, p)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestInstallAndRemoveLeaveTheHostAsItWas(t *testing.T) {
	root := t.TempDir()
	self := filepath.Join(t.TempDir(), "dunlin")
	if err := os.WriteFile(self, []byte("program"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "usr/local/bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(root, "usr/local/bin/other")
	if err := os.WriteFile(other, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	before := tree(t, root)
	p := Paths{Root: root}
	for range 2 { // the second time changes nothing
		if _, err := Install(Options{Role: "agent", JoinLine: "line", Self: self, Paths: p}); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(filepath.Join(p.Config(), "join"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("join line: %v %v", info, err)
	}
	if err := os.WriteFile(filepath.Join(p.State(), "db"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := Remove(p, false); err != nil {
			t.Fatal(err)
		}
	}
	if after := tree(t, root); !slices.Equal(before, after) {
		t.Fatalf("before %v, after %v", before, after)
	}
}

func TestUnitIsAcceptedBySystemd(t *testing.T) {
	for _, role := range []string{"server", "agent"} {
		unit, err := Unit(role, "/bin/true")
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(unit), "KillMode=process") {
			t.Fatal("a stop of the unit would kill the guests")
		}
		analyze, err := exec.LookPath("systemd-analyze")
		if err != nil {
			t.Skip("SKIPPED: systemd-analyze is not installed (CI installs the package systemd)")
		}
		f := filepath.Join(t.TempDir(), UnitName)
		if err := os.WriteFile(f, unit, 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(analyze, "verify", "--man=no", f).CombinedOutput()
		if err != nil || strings.Contains(string(out), UnitName) {
			t.Fatalf("%v: %s", err, out)
		}
	}
}
