//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestWrongManifestsChangeNothing: each fault gets one line with file and
// line, exit code not 0, and no object of the file exists afterwards.
func TestWrongManifestsChangeNothing(t *testing.T) {
	c := cluster.New(t)
	const good = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: good}\n---\n"
	pod := func(rest string) string {
		return "apiVersion: v1\nkind: Pod\nmetadata: {name: bad}\nspec:\n  runtimeClassName: wasm\n  containers:\n  - name: c\n    image: x.wasm\n" + rest
	}
	for name, f := range map[string]struct{ manifest, says string }{
		"unknown field":     {pod("    resource: {}\n"), "did you mean"},
		"duplicate key":     {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: bad}\ndata: {a: x}\ndata: {b: y}\n", "data"},
		"milli memory":      {pod("    resources: {limits: {memory: 400m}}\n"), "400M"},
		"wrong unit":        {pod("    resources: {limits: {memory: 1g}}\n"), "memory"},
		"string for number": {pod("    ports: [{containerPort: \"80\"}]\n"), "containerPort"},
		"boolean label":     {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: bad, labels: {on-sale: yes}}\n", "labels"},
		"wrong kind":        {"apiVersion: apps/v1\nkind: Deploymnt\nmetadata: {name: bad}\n", "Deployment"},
		"no kind":           {"apiVersion: v1\nmetadata: {name: bad}\n", "kind"},
		"not YAML":          {"apiVersion: v1\nkind: [\n", ""},
		"hostPID":           {"apiVersion: v1\nkind: Pod\nmetadata: {name: bad}\nspec:\n  runtimeClassName: wasm\n  hostPID: true\n  containers: [{name: c, image: x.wasm}]\n", "hostPID"},
		"privileged":        {pod("    securityContext: {privileged: true}\n"), "privileged"},
		"no such class":     {"apiVersion: v1\nkind: Pod\nmetadata: {name: bad}\nspec:\n  runtimeClassName: nope\n  containers: [{name: c, image: x.wasm}]\n", "nope"},
		"bad name":          {"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: Not_Valid}\n", "name"},
		"alias bomb":        {"a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\ng: [*f,*f,*f,*f,*f,*f,*f,*f,*f]\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "m.yaml")
			if err := os.WriteFile(file, []byte(f.manifest), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := c.Try("apply", "-f", file)
			if err == nil {
				t.Fatal("accepted")
			}
			if !strings.Contains(err.Error(), "m.yaml") || !strings.Contains(err.Error(), f.says) {
				t.Fatalf("%v\nmust name the file and %q", err, f.says)
			}
			if _, err := c.Try("get", "pod", "bad"); err == nil {
				t.Fatal("the pod exists")
			}
		})
	}
	// A fault anywhere in a file stops all of it before anything is sent.
	file := filepath.Join(t.TempDir(), "m.yaml")
	if err := os.WriteFile(file, []byte(good+"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: bad}\ndta: {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Try("apply", "-f", file); err == nil || !strings.Contains(err.Error(), "m.yaml:8") {
		t.Fatalf("%v", err)
	}
	if _, err := c.Try("get", "cm", "good"); err == nil {
		t.Fatal("half of the file was applied")
	}
}

func TestWrongModulesAreRefusedInWords(t *testing.T) {
	dir := t.TempDir()
	for name, f := range map[string]struct{ content, says string }{
		"component": {"\x00asm\x0d\x00\x01\x00", "component"},
		"elf":       {"\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 64), "ELF"},
		"gzip":      {"\x1f\x8b\x08\x00" + strings.Repeat("\x00", 16), "gzip"},
		"html":      {"<!DOCTYPE html><html><body>404</body></html>", "HTML"},
		"text":      {"(module)", "text"},
		"empty":     {"", "empty"},
		"truncated": {"\x00asm\x01\x00\x00\x00\x01\xff", ""},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(dir, name+".wasm")
			if err := os.WriteFile(file, []byte(f.content), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(cluster.Binary(t), "import", "bad.wasm", file, "--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"))
			out, err := cmd.CombinedOutput()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.ExitCode() != 1 {
				t.Fatalf("exit: %v: %s", err, out)
			}
			if !strings.Contains(strings.ToLower(string(out)), strings.ToLower(f.says)) || strings.Count(strings.TrimSpace(string(out)), "\n") > 1 {
				t.Fatalf("says %q, wants %q in a line", out, f.says)
			}
		})
	}
}

// failStart runs a server that must refuse to start, and returns what it said.
func failStart(t *testing.T, dir string, flags ...string) string {
	t.Helper()
	args := append([]string{"server", "--no-node", "--node-name", "x", "--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"), "--config-dir", filepath.Join(dir, "config")}, flags...)
	cmd := exec.Command("timeout", append([]string{"20", cluster.Binary(t)}, args...)...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() == 124 {
		t.Fatalf("the server started, or hung: %v: %s", err, out)
	}
	last := strings.TrimSpace(string(out))
	last = last[strings.LastIndexByte(last, '\n')+1:]
	if !strings.HasPrefix(last, "Error: ") {
		t.Fatalf("no clear last line: %s", out)
	}
	return last
}

func TestPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if got := failStart(t, t.TempDir(), "--listen", l.Addr().String()); !strings.Contains(got, "in use") {
		t.Fatal(got)
	}
}

func TestStateFolderThatCannotBeUsed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, needs root to mount file systems (CI runs it as root)")
	}
	for name, c := range map[string]struct{ options, says string }{
		"read-only": {"ro", "read-only"},
		"full":      {"size=64k", "full"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			state := filepath.Join(dir, "state")
			if err := os.Mkdir(state, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mount("tmpfs", state, "tmpfs", flagsOf(c.options), strings.TrimPrefix(c.options, "ro")); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = syscall.Unmount(state, 0) }()
			got := failStart(t, dir, "--listen", "127.0.0.1:0")
			if !strings.Contains(got, c.says) && !strings.Contains(got, "space") {
				t.Fatal(got)
			}
		})
	}
}

func flagsOf(options string) uintptr {
	if options == "ro" {
		return syscall.MS_RDONLY
	}
	return 0
}

func TestSecondServerOnOneFolder(t *testing.T) {
	c := cluster.New(t)
	got := failStart(t, c.Dir, "--listen", "127.0.0.1:0")
	if !strings.Contains(got, fmt.Sprint(c.Cmd.Process.Pid)) && !strings.Contains(got, "in use") {
		t.Fatalf("must say which process holds the folder: %s", got)
	}
}
