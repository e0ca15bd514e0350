//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

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

// TestFailedImportKeepsTheName: a module that does not compile, and an import
// that a signal ends, leave the name as it was.
func TestFailedImportKeepsTheName(t *testing.T) {
	dir := t.TempDir()
	dirs := []string{"--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run")}
	args := func(file string) []string { return append([]string{"import", "app.wasm", file}, dirs...) }
	record := func() string {
		b, err := os.ReadFile(filepath.Join(dir, "state", "wasm", "modules", "names", "app.wasm.json"))
		if err != nil {
			t.Fatal(err)
		}
		return string(b) + fmt.Sprint(slices.Sorted(maps.Keys(snapshot(t, filepath.Join(dir, "state", "wasm", "modules")))))
	}
	if out, err := exec.Command(cluster.Binary(t), args(cluster.Module(t, "sleep"))...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	before := record()
	bad := filepath.Join(dir, "bad.wasm") // whole, with a function that adds nothing to nothing
	if err := os.WriteFile(bad, []byte("\x00asm\x01\x00\x00\x00\x01\x04\x01\x60\x00\x00\x03\x02\x01\x00\x07\x0a\x01\x06_start\x00\x00\x0a\x05\x01\x03\x00\x6a\x0b"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := refused(t, args(bad)...); !strings.Contains(got, "not valid") {
		t.Error(got)
	}
	if now := record(); now != before {
		t.Errorf("after a module that does not compile: %s, was %s", now, before)
	}
	if said, code := whileCompiling(t, syscall.SIGTERM, args(fresh(t, example(t, "hello.wasm")))...); code != 143 || !strings.Contains(said, "app.wasm was not imported: ") {
		t.Errorf("exit code %d: %s", code, said)
	}
	if now := record(); now != before {
		t.Errorf("after an interrupted import: %s, was %s", now, before)
	}
}

// TestRunInterruptedWhileCompiling has the exit code of the signal, and says
// so in one line.
func TestRunInterruptedWhileCompiling(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for sig, want := range map[syscall.Signal]int{syscall.SIGINT: 130, syscall.SIGTERM: 143} {
		file := fresh(t, example(t, "hello.wasm"))
		said, code := whileCompiling(t, sig, "run", file)
		if code != want || said != fmt.Sprintf("Error: %s was not started: compile: interrupted by %s", file, map[int]string{130: "SIGINT", 143: "SIGTERM"}[want]) {
			t.Errorf("exit code %d, want %d: %s", code, want, said)
		}
	}
}

// whileCompiling sends a command the signal as soon as it says that it
// compiles. It returns what it said after that, and its exit code.
func whileCompiling(t *testing.T, sig syscall.Signal, args ...string) (string, int) {
	t.Helper()
	cmd := exec.Command(cluster.Binary(t), args...)
	errw, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(errw)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatalf("dunlin %s did not compile: %v", strings.Join(args, " "), err)
		}
		if strings.HasPrefix(line, "compiling") {
			break
		}
	}
	if err := cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	return strings.TrimSpace(string(rest)), cmd.ProcessState.ExitCode()
}

// failStart runs a server that must refuse to start, and returns what it said.
func failStart(t *testing.T, dir string, flags ...string) string {
	t.Helper()
	args := append([]string{"server", "--gossip-port", "0", "--no-node", "--node-name", "x", "--state-dir", filepath.Join(dir, "state"), "--run-dir", filepath.Join(dir, "run"), "--config-dir", filepath.Join(dir, "config")}, flags...)
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

// TestWrongModulesAsPods: a module that cannot run says why in the pod's
// status, and the guest beside it goes on.
func TestWrongModulesAsPods(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Apply(deployment("healthy", "sleep.wasm", 1, ""))
	c.WaitReady("app=healthy", 1)
	before := c.HostPIDs()
	pod := func(name, image string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec:\n  runtimeClassName: wasm\n  containers: [{name: main, image: %q}]\n", name, image)
	}
	html := filepath.Join(c.Dir, "page.wasm")
	if err := os.WriteFile(html, []byte("<!DOCTYPE html><html></html>"), 0o644); err != nil { //nolint:gosec // any user may read it
		t.Fatal(err)
	}
	for name, f := range map[string]struct{ image, says string }{
		"imports": {"file://" + cluster.Module(t, "imports"), "env.read_sensor, spin.http_send"},
		"html":    {"file://" + html, "HTML"},
		"absent":  {"file:///no/such/file.wasm", "must exist on this node"},
		"unknown": {"unknown.wasm", "dunlin import unknown.wasm"},
	} {
		c.Apply(pod(name, f.image))
		c.Eventually(30*time.Second, name+" says why it does not run", func() error {
			out := c.Run("describe", "pod", name)
			if !strings.Contains(out, "Why:") || !strings.Contains(out, "Next:") || !strings.Contains(out, f.says) {
				return errors.New(out)
			}
			return nil
		})
	}
	// A module that comes by file is compiled when it is needed, and its pod says so.
	byFile := fresh(t, cluster.Module(t, "sleep"))
	if err := os.Chmod(filepath.Dir(byFile), 0o755); err != nil { //nolint:gosec // nothing but the module is there
		t.Fatal(err)
	}
	c.Apply(pod("compiled", "file://"+byFile))
	c.Eventually(30*time.Second, "the pod tells that its module is compiled", func() error {
		if out := c.Run("describe", "pod", "compiled"); !strings.Contains(out, "Compiling module \"file://"+byFile) {
			return errors.New(out)
		}
		return nil
	})
	// What is given later starts by itself.
	c.Import("unknown.wasm", cluster.Module(t, "sleep"))
	c.Eventually(60*time.Second, "the pod starts once its module is there", func() error {
		if out := c.Run("get", "pod", "unknown"); !strings.Contains(out, "Running") {
			return errors.New(out)
		}
		return nil
	})
	for k, pid := range before {
		if c.HostPIDs()[k] != pid {
			t.Errorf("the healthy guest %s was disturbed", k)
		}
	}
}

// TestWhatDoesNotRunSaysWhy: pending and terminating objects give one reason,
// its age and the next action.
func TestWhatDoesNotRunSaysWhy(t *testing.T) {
	c := cluster.New(t)
	pod := func(name, meta, spec, container string) string {
		return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s%s}\nspec:\n  runtimeClassName: wasm\n%s  containers:\n  - {name: main, image: sleep.wasm%s}\n", name, meta, spec, container)
	}
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	other := []string{"cannot run RuntimeClass oci", "runtimeClassName: wasm"}
	if _, err := exec.LookPath("runc"); err == nil {
		other = []string{"ImagePullBackOff", "cannot pull sleep.wasm"}
	}
	for name, f := range map[string]struct {
		manifest string
		says     []string
	}{
		"big":      {pod("big", "", "", ", resources: {requests: {memory: 900Gi}}"), []string{"1 Insufficient memory (needs 900Gi, most free ", "ask for less"}},
		"picky":    {pod("picky", "", "  nodeSelector: {disk: ssd}\n", ""), []string{"0/1 nodes are available", "compare its nodeSelector"}},
		"other":    {strings.Replace(pod("other", "", "", ""), "wasm\n", "oci\n", 1), other},
		"waiting":  {pod("waiting", "", "", ", envFrom: [{configMapRef: {name: later}}]"), []string{`configmap "later" not found`, "create what is missing"}},
		"finalize": {pod("finalize", ", finalizers: [example.com/hold]", "", ""), nil},
	} {
		c.Apply(f.manifest)
		c.Eventually(30*time.Second, name+" says why", func() error {
			out := c.Run("describe", "pod", name)
			for _, want := range f.says {
				if !strings.Contains(out, want) {
					return fmt.Errorf("no %q in:\n%s", want, out)
				}
			}
			return nil
		})
	}
	if _, err := c.Try("delete", "pod", "finalize", "--timeout", "2s"); err == nil || !strings.Contains(err.Error(), "it waits for finalizers example.com/hold") {
		t.Errorf("delete: %v", err)
	}
	if out := c.Run("describe", "pod", "finalize"); !strings.Contains(out, "Terminating:") || !strings.Contains(out, "finalizers example.com/hold") {
		t.Errorf("describe: %s", out)
	}
	c.Apply("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: later}\ndata: {A: b}\n")
	c.Eventually(60*time.Second, "the pod starts once its ConfigMap is there", func() error {
		if out := c.Run("get", "pod", "waiting"); !strings.Contains(out, "Running") {
			return errors.New(out)
		}
		return nil
	})
}

// TestStateOfAnotherVersionOrCluster: a server refuses what it must not
// touch, in one line, and leaves it as it is.
func TestStateOfAnotherVersionOrCluster(t *testing.T) {
	c := cluster.New(t)
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	raft := filepath.Join(c.Dir, "state", "server", "raft")
	t.Run("newer version", func(t *testing.T) {
		// A record is magic, format, length, sequence, checksum of these and
		// of the payload, payload.
		for _, slot := range []string{"identity.0", "identity.1"} {
			name := filepath.Join(raft, slot)
			old, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			newer := bytes.Clone(old)
			binary.BigEndian.PutUint32(newer[4:], binary.BigEndian.Uint32(old[4:])+1)
			table := crc32.MakeTable(crc32.Castagnoli)
			payload := newer[24 : 24+binary.BigEndian.Uint32(old[8:])]
			binary.BigEndian.PutUint32(newer[20:], crc32.Update(crc32.Checksum(newer[:20], table), table, payload))
			if err := os.WriteFile(name, newer, 0o600); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := os.WriteFile(name, old, 0o600); err != nil {
					t.Error(err)
				}
			}()
		}
		before := snapshot(t, raft)
		if got := failStart(t, c.Dir, "--listen", "127.0.0.1:0"); !strings.Contains(got, "newer version: upgrade dunlin") {
			t.Error(got)
		}
		now := snapshot(t, raft)
		delete(before, filepath.Join(raft, "lock")) // holds the last process id
		delete(now, filepath.Join(raft, "lock"))
		if !maps.Equal(before, now) {
			t.Errorf("the refused folder was changed: %v, was %v", now, before)
		}
	})
	t.Run("other cluster", func(t *testing.T) {
		other := cluster.New(t)
		if err := other.Stop(); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(raft, raft+".own"); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(other.Dir, "state", "server", "raft"), raft); err != nil {
			t.Fatal(err)
		}
		if got := failStart(t, c.Dir, "--listen", "127.0.0.1:0"); !strings.Contains(got, "another cluster") && !strings.Contains(got, "of cluster") {
			t.Error(got)
		}
		if err := errors.Join(os.RemoveAll(raft), os.Rename(raft+".own", raft)); err != nil {
			t.Fatal(err)
		}
	})
	c.Start() // with its own state it goes on
}

// TestHostnameIsCleaned: a name with capitals and underscores works, and the
// server says what it made of it.
func TestHostnameIsCleaned(t *testing.T) {
	c := cluster.New(t, "--node-name", "e2E") // the last flag counts
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	log, err := os.ReadFile(filepath.Join(c.Dir, "server.log"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(log), "from=e2E to=e2e") {
		t.Fatalf("the log does not say that the name was changed:\n%s", log)
	}
	out, err := exec.Command(cluster.Binary(t), "preflight", "--node-name", "Rpi_Node1").CombinedOutput()
	if !strings.Contains(string(out), "rpi-node1") {
		t.Fatalf("preflight: %s, %v", out, err)
	}
}

// TestWrongCommandLines have exit code 2, and what cannot be done 1.
func TestWrongCommandLines(t *testing.T) {
	c := cluster.New(t)
	for line, f := range map[string]struct {
		code int
		says string
	}{
		"nope":                               {2, "unknown command"},
		"get":                                {2, "Usage: dunlin get"},
		"get pods --nope":                    {2, "unknown flag"},
		"get pods -o nope":                   {2, "wide, yaml, json and name"},
		"get podz":                           {1, "did you mean"},
		"get pods nope":                      {1, `pods "nope" not found`},
		"describe pod nope":                  {1, `pods "nope" not found`},
		"logs nope":                          {1, `pods "nope" not found`},
		"delete pod":                         {2, "--all"},
		"delete pod nope":                    {1, "not found"},
		"delete pod nope --ignore-not-found": {0, ""},
		"scale ns/default --replicas=2":      {1, "cannot be scaled"},
		"scale deploy/nope --replicas=2":     {1, "not found"},
		"scale deploy/nope":                  {2, "replicas"},
		"rollout status ns/default":          {2, "works on Deployments"},
		"rollout undo deploy/nope":           {1, "not found"},
		"apply":                              {2, "-f"},
		"apply -f /nonexistent":              {1, "no such file"},
		"get pods --kubeconfig /nonexistent": {1, "/nonexistent"},
		"token create --ttl=-1s":             {2, "positive"},
		"version extra":                      {2, ""},
		"version":                            {0, "dunlin"},
		"kubeconfig --path":                  {0, "admin.kubeconfig"},
		"completion bash":                    {0, "bash completion"},
		"__complete get namesp":              {0, "namespaces"},
		"__complete describe ns ":            {0, "kube-system"},
	} {
		args := strings.Split(line, " ")
		cmd := exec.Command(cluster.Binary(t), args...)
		cmd.Env = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig(), "DUNLIN_CONFIG=/dev/null")
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if got := cmd.ProcessState.ExitCode(); got != f.code || !strings.Contains(string(out), f.says) {
			t.Errorf("dunlin %s: exit %d, want %d and %q: %s", line, got, f.code, f.says, out)
		}
	}
}
