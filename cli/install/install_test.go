package install

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/internal/claim"
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
	if Present(p, false) || Role(p) != "" {
		t.Fatal("something is installed before it was")
	}
	for range 2 { // the second time changes nothing
		if _, err := Install(Options{Role: "agent", JoinLine: "line", Self: self, Paths: p}); err != nil {
			t.Fatal(err)
		}
	}
	if !Present(p, true) || Role(p) != "agent" {
		t.Fatalf("installed: %v, role %q", Present(p, true), Role(p))
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
	if Present(p, false) {
		t.Fatal("something is still there")
	}
	if after := tree(t, root); !slices.Equal(before, after) {
		t.Fatalf("before %v, after %v", before, after)
	}
}

func TestUnitIsAcceptedBySystemd(t *testing.T) {
	for _, role := range []string{"server", "agent"} {
		unit := Unit(role, "/bin/true")
		if !strings.Contains(string(unit), "\nExecStart=/bin/true "+role+"\n") || strings.Contains(string(unit), "@") {
			t.Fatalf("not filled in: %s", unit)
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

// TestOtherAgentsKeepTheirClaims: one with another network namespace, and one
// with a run folder below.
func TestOtherAgentsKeepTheirClaims(t *testing.T) {
	p := Paths{Root: t.TempDir()}
	theirs := []string{"netns/other.lock", "second/lock"}
	for _, f := range theirs {
		c, err := claim.Take(filepath.Join(p.Run(), f), claim.Holder{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Release)
	}
	if Present(p, false) {
		t.Error("something of this installation's is found")
	}
	for _, f := range []string{"wasm/x", "agent.sock"} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(p.Run(), f)), 0o700), os.WriteFile(filepath.Join(p.Run(), f), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Remove(p, false); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(filepath.Join(p.Run(), "*", "*"))
	if err != nil || len(left) != 2 || !claim.Held(filepath.Join(p.Run(), theirs[0])) || !claim.Held(filepath.Join(p.Run(), theirs[1])) {
		t.Fatalf("left %v, %v", left, err)
	}
}

// TestNamedFolders: of what the configuration names only Dunlin's part goes,
// and the configuration last.
func TestNamedFolders(t *testing.T) {
	p := Paths{Root: t.TempDir(), StateDir: "/data", RunDir: "/run/other", ConfigDir: "/data/config"}
	self := filepath.Join(t.TempDir(), "dunlin")
	put := func(files ...string) {
		t.Helper()
		for _, f := range files {
			if err := errors.Join(os.MkdirAll(filepath.Dir(f), 0o700), os.WriteFile(f, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
	}
	put(self, p.at("data/somebody's"))
	before := tree(t, p.Root)
	if _, err := Install(Options{Role: "agent", JoinLine: "line", Self: self, Paths: p}); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"data/config/join", "etc/dunlin"} {
		if !there(p.at(f)) {
			t.Errorf("%s was not made", f)
		}
	}
	if got := p.States(); !slices.Equal(got, []string{p.at("data"), p.at("var/lib/dunlin")}) {
		t.Errorf("state folders: %v", got)
	}
	fill := func() {
		put(p.ConfigFile(), p.at("data/server/raft/lock"), p.at("data/node.forgotten1/x"), p.at("data/claims/x/y"), p.at("run/other/agent.sock"), p.at("run/dunlin/netns/a"), p.at("var/lib/dunlin/server/x"))
	}
	fill()
	if _, err := Remove(p, true); err != nil || there(p.Run()) || !there(p.ConfigFile()) || !there(p.at("data/server")) || !there(p.at("var/lib/dunlin")) {
		t.Errorf("keeping the state: %v, %v", err, tree(t, p.Root))
	}
	fill()
	held := p.at("data/claims/x")
	if err := unix.Mount("tmpfs", held, "tmpfs", 0, ""); err == nil {
		_, err := Remove(p, false)
		if err == nil || !there(p.ConfigFile()) || !Present(p, false) {
			t.Errorf("something could not be removed: %v, %v", err, tree(t, p.Root))
		}
		if err := unix.Unmount(held, 0); err != nil {
			t.Fatal(err)
		}
	}
	did, err := Remove(p, false)
	if err != nil || did[len(did)-1] != "removed  "+p.at("etc/dunlin") {
		t.Errorf("%v, %v", did, err)
	}
	if after := tree(t, p.Root); !slices.Equal(before, after) || there(p.Run()) || there(p.Config()) || Present(p, false) {
		t.Errorf("before %v, after %v", before, after)
	}
}

// TestAnotherAgentsUsualFolder: one that runs with the usual run folder keeps
// it when an installation with another one goes.
func TestAnotherAgentsUsualFolder(t *testing.T) {
	p := Paths{Root: t.TempDir(), RunDir: "/run/other"}
	c, err := claim.Take(p.at("run/dunlin/lock"), claim.Holder{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Release)
	if _, err := Remove(p, false); err != nil || !there(p.at("run/dunlin/lock")) {
		t.Fatalf("%v, %v", err, tree(t, p.Root))
	}
}

// TestBesideTheService: of what was started by hand its own part goes, and
// nothing of the machine's service, whether that runs or not; nor of a folder
// that both have.
func TestBesideTheService(t *testing.T) {
	root := t.TempDir()
	service := Paths{Root: root}
	self := filepath.Join(t.TempDir(), "dunlin")
	put := func(files ...string) {
		t.Helper()
		for _, f := range files {
			if err := errors.Join(os.MkdirAll(filepath.Dir(f), 0o700), os.WriteFile(f, nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		}
	}
	put(self, service.ConfigFile(), service.at("run/dunlin/wasm/x"), service.at("run/dunlin/lock"), service.at("second/somebody's"))
	if _, err := Install(Options{Role: "server", Self: self, Paths: service}); err != nil {
		t.Fatal(err)
	}
	put(service.at("var/lib/dunlin/claims/x/y"), service.at("etc/dunlin/manifests/x"))
	for _, p := range []Paths{
		{Root: root, StateDir: "/second", RunDir: "/run/second", ConfigDir: "/etc/second", Service: &service},
		{Root: root, StateDir: "/second", Service: &service},
	} {
		before := tree(t, root)
		put(filepath.Join(p.State(), "claims/x/y"), filepath.Join(p.State(), "node/node.db"))
		if p.RunDir != "" {
			put(filepath.Join(p.Run(), "agent.sock"), filepath.Join(p.Config(), "join"))
		}
		if got := p.States(); !slices.Equal(got, []string{p.State()}) || !Present(p, false) {
			t.Errorf("state folders: %v", got)
		}
		if _, err := Remove(p, false); err != nil {
			t.Fatal(err)
		}
		if after := tree(t, root); !slices.Equal(before, after) || Present(p, false) {
			t.Errorf("before %v, after %v", before, after)
		}
	}
}
