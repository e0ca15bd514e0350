package cli

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/cli/install"
	"github.com/dunlin-project/dunlin/runtime/wasm"
)

func TestCheckInstall(t *testing.T) {
	p := install.Paths{Root: t.TempDir()}
	const line = "a line"
	check := func(role, join string, force bool, says string) {
		t.Helper()
		err := checkInstall(p, role, join, force)
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) {
			t.Errorf("install %s --join=%q --force=%v: %v, want %q", role, join, force, err, says)
		}
	}
	put := func(path, text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	check("server", "", false, "")
	check("agent", "", false, "'dunlin install agent --join LINE'")
	check("agent", line, false, "")
	put(filepath.Join(p.Config(), "join"), line) // of an installation whose agent never started
	check("agent", "", false, "")
	if err := os.Remove(filepath.Join(p.Config(), "join")); err != nil {
		t.Fatal(err)
	}
	put(filepath.Join(p.State(), "node", "identity", "grant.json"), "{}") // it joined
	check("agent", "", false, "")

	put(p.Unit(), string(install.Unit("server", "/usr/local/bin/dunlin")))
	check("server", "", false, "")
	check("agent", line, false, "service of a dunlin server")
	check("agent", line, true, "")
	put(p.Unit(), string(install.Unit("agent", "/usr/local/bin/dunlin")))
	check("agent", "", false, "")
	check("server", "", false, "--force")
}

// TestInstallRefusesLines: before root is asked for, and before anything is
// made.
func TestInstallRefusesLines(t *testing.T) {
	t.Setenv("DUNLIN_CONFIG", os.DevNull)
	for args, says := range map[string]string{
		"install agent --join nonsense":    "it must start with",
		"install agent --join dunlin1.a.b": "copy the whole line",
		"install server --join dunlin1.a":  "'dunlin server --join LINE'",
	} {
		if code, _, errs := run(strings.Fields(args)...); code != 2 || !strings.Contains(errs, says) {
			t.Errorf("dunlin %s: exit %d %s", args, code, errs)
		}
	}
}

// TestUninstallWithoutRoot: the error names what ends the guests, and the
// folders.
func TestUninstallWithoutRoot(t *testing.T) {
	d := dirs{state: "/home/u/.local/state/dunlin", run: "/run/user/1000/dunlin", config: "/home/u/.config/dunlin"}
	says := []string{"needs root", "'dunlin server sweep'", d.state, d.run, d.config}
	said := []string{rootless(d).Error()}
	if os.Geteuid() != 0 {
		_, _, errs := run("uninstall", "--yes", "--state-dir", d.state, "--run-dir", d.run, "--config-dir", d.config)
		said = append(said, errs)
	}
	for _, s := range said {
		for _, want := range says {
			if !strings.Contains(s, want) {
				t.Errorf("%q does not name %s", s, want)
			}
		}
	}
}

// TestUninstallIsRefusedWhileSomethingRuns: by the lock of a server, or of an
// agent.
func TestUninstallIsRefusedWhileSomethingRuns(t *testing.T) {
	for who, file := range map[string]string{"server": "server/raft/lock", "agent": "node/node.db"} {
		p := install.Paths{Root: t.TempDir()}
		path := filepath.Join(p.State(), file)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := checkIdle(p); err != nil {
			t.Errorf("no file: %v", err)
		}
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := checkIdle(p); err != nil {
			t.Errorf("no lock: %v", err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		if err := checkIdle(p); err == nil || !strings.Contains(err.Error(), "a dunlin "+who+" is running") || !strings.Contains(err.Error(), "process ") {
			t.Errorf("held: %v", err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if err := checkIdle(p); err != nil {
			t.Errorf("given back: %v", err)
		}
	}
}

// TestUninstallFollowsTheConfiguration: flags, the guard, the removal.
func TestUninstallFollowsTheConfiguration(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	code, err := wasm.ForegroundDir()
	if err != nil {
		t.Fatal(err)
	}
	p := install.Paths{Root: t.TempDir()}
	netns := fmt.Sprintf("dun%d", os.Getpid()%100000)
	write := func(path, text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(code, "compiled", "x"), "")
	write(p.ConfigFile(), "state-dir: data\n")
	if _, err := servicePaths(p); err == nil || !strings.Contains(err.Error(), "state-dir: data: the whole path") {
		t.Errorf("a part of a path: %v", err)
	}
	write(p.ConfigFile(), "state-dir: /data\nrun-dir: /run/other\nnetns: "+netns+"\ncgroup: dun-test\nmax-pods: 3\n")
	p, err = servicePaths(p)
	if err != nil || p.StateDir != "/data" || p.RunDir != "/run/other" || p.ConfigDir != "" {
		t.Fatalf("%+v, %v", p, err)
	}
	var out bytes.Buffer
	a := &app{out: &out, errw: &out}
	cmd, _, err := a.root().Find([]string{"uninstall"})
	if err != nil {
		t.Fatal(err)
	}
	if err := applyConfig(cmd, p.ConfigFile()); err != nil {
		t.Fatal(err)
	}
	for flag, want := range map[string]string{"state-dir": "/data", "run-dir": "/run/other", "netns": netns, "cgroup": "dun-test"} {
		if got, err := cmd.Flags().GetString(flag); err != nil || got != want {
			t.Errorf("--%s=%s, %v", flag, got, err)
		}
	}
	if same, err := beside(p); err != nil || same.Service != nil {
		t.Errorf("the service itself: %+v, %v", same, err)
	}
	if other, err := beside(install.Paths{Root: p.Root, StateDir: "/second"}); err != nil || other.Service == nil || other.Service.State() != p.State() {
		t.Errorf("something beside it: %+v, %v", other, err)
	}
	o := nodeOptions{dirs: dirs{p.State(), p.Run(), p.Config()}, netns: netns, cgroup: "dun-test"}
	lock := filepath.Join(p.State(), "server", "raft", "lock")
	write(lock, "")
	f, err := os.Open(lock)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if err := a.takeAway(t.Context(), p, o, false); err == nil || !strings.Contains(err.Error(), "a dunlin server is running with "+p.State()) || !fileThere(lock) {
		t.Errorf("a server runs: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := a.takeAway(t.Context(), p, o, false); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{p.State(), p.Run(), p.Config(), code} {
		if fileThere(dir) {
			t.Errorf("%s is left", dir)
		}
	}
	if s := strings.TrimSpace(out.String()); !strings.HasSuffix(s, "removed  "+p.Config()) {
		t.Errorf("the configuration goes last: %s", s)
	}
	if err := (&nodeOptions{dirs: dirs{"/a", "b", "/c"}, netns: "x"}).placeWhole(); err == nil || !strings.Contains(err.Error(), "--run-dir=b") {
		t.Errorf("a part of a path: %v", err)
	}
}

// TestPartsAreKnown: what the commands make in their folders is what is
// removed from them.
func TestPartsAreKnown(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`Join\((?:o|p\.o)?\.?(state|run|runDir|config), "([^"]+)"`).FindAllStringSubmatch(string(text), -1) {
			n++
			known := map[string][]string{"state": install.StateParts, "run": install.RunParts, "runDir": install.RunParts, "config": install.ConfigParts}[m[1]]
			if !strings.HasSuffix(f, "_test.go") && !slices.Contains(known, m[2]) {
				t.Errorf("%s: %s is made in the %s folder, and uninstall does not know it", f, m[2], m[1])
			}
		}
	}
	if n < 20 || !slices.Contains(install.ConfigParts, client.AdminFile) {
		t.Errorf("%d seen", n)
	}
}

func TestLockHolder(t *testing.T) {
	const text = "1: POSIX  ADVISORY  WRITE 7 08:02:55 0 EOF\n2: FLOCK  ADVISORY  WRITE 42 08:02:55 0 EOF\n2: -> FLOCK  ADVISORY  READ 43 08:02:55 0 EOF\n3: FLOCK  ADVISORY  WRITE 0 08:02:56 0 EOF\n"
	for inode, want := range map[uint64]string{55: "process 42", 56: "another process", 5: "another process", 99: "another process"} {
		if got := lockHolder(text, inode); got != want {
			t.Errorf("%d: %q, want %q", inode, got, want)
		}
	}
	if got := lockHolder("x\n\n1: FLOCK\n", 1); got != "another process" {
		t.Error(got)
	}
}
