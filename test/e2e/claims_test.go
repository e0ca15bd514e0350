//go:build e2e

package e2e

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// refused runs a command that must fail soon, and returns its last line.
func refused(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command("timeout", append([]string{"20", cluster.Binary(t)}, args...)...).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() == 124 {
		t.Fatalf("dunlin %s: not refused: %v: %s", strings.Join(args, " "), err, out)
	}
	said := strings.TrimSpace(string(out))
	last := said[strings.LastIndexByte(said, '\n')+1:]
	if !strings.HasPrefix(last, "Error: ") {
		t.Fatalf("dunlin %s: no clear last line: %s", strings.Join(args, " "), out)
	}
	return last
}

// TestSecondNodeInOnePlace: whoever comes second to a run folder or a network
// namespace is told who has it, and touches nothing; after kill -9 of the
// first its successor starts at once.
func TestSecondNodeInOnePlace(t *testing.T) {
	c := cluster.New(t)
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Apply(deployment("kept", "sleep.wasm", 2, ""))
	c.WaitReady("app=kept", 2)
	before := c.HostPIDs()
	run := filepath.Join(c.Dir, "run")
	for name, f := range map[string]struct {
		command []string
		run     string
		netns   string
		says    string
	}{
		"server, run folder": {[]string{"server", "--listen", "127.0.0.1:0"}, run, c.NetNS + "x", "run folder " + run},
		"server, namespace":  {[]string{"server", "--listen", "127.0.0.1:0"}, "", c.NetNS, "network namespace " + c.NetNS},
		"agent, run folder":  {[]string{"agent", "--join", strings.TrimSpace(c.Run("token", "create"))}, run, c.NetNS + "x", "run folder " + run},
		"agent, namespace":   {[]string{"agent", "--join", strings.TrimSpace(c.Run("token", "create"))}, "", c.NetNS, "network namespace " + c.NetNS},
	} {
		t.Run(name, func(t *testing.T) {
			if os.Geteuid() != 0 && f.run == "" {
				t.Skip("SKIPPED, needs root: others have no network namespaces (CI runs it as root)")
			}
			dir := t.TempDir()
			state := filepath.Join(dir, "state")
			if f.run == "" {
				f.run = filepath.Join(dir, "run")
			}
			got := refused(t, append(f.command, "--node-name", "second", "--gossip-port", "0", "--netns", f.netns,
				"--state-dir", state, "--run-dir", f.run, "--config-dir", filepath.Join(dir, "config"))...)
			for _, want := range []string{f.says, "process " + strconv.Itoa(c.Cmd.Process.Pid), filepath.Join(c.Dir, "state"), "stop that one first, or give this one its own"} {
				if !strings.Contains(got, want) {
					t.Errorf("%q does not say %q", got, want)
				}
			}
			if _, err := os.Stat(state); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("state of the refused one: %v", err)
			}
		})
	}
	if got := refused(t, append([]string{"server", "sweep", "--netns", c.NetNS}, c.DirFlags()...)...); !strings.Contains(got, "in use") {
		t.Errorf("sweep below a living agent: %s", got)
	}
	if now := c.HostPIDs(); !maps.Equal(before, now) {
		t.Fatalf("guests %v, were %v", now, before)
	}
	if out := c.Run("get", "pods", "--local", "--run-dir", run); strings.Count(out, "kept-") != 2 {
		t.Fatalf("the first agent's socket: %s", out)
	}
	c.Kill()
	c.Start()
	c.Eventually(30*time.Second, "the successor adopts", func() error {
		if out, err := c.Try("get", "pods", "--local", "--run-dir", run); err != nil || strings.Count(out, "Running") != 2 {
			return errors.Join(errors.New(out), err)
		}
		return nil
	})
	if now := c.HostPIDs(); !maps.Equal(before, now) {
		t.Fatalf("guests %v, were %v", now, before)
	}
}

// TestWrongNodeFlags are refused in one line, before anything is made.
func TestWrongNodeFlags(t *testing.T) {
	for name, f := range map[string]struct {
		flags []string
		says  string
	}{
		"negative pods":       {[]string{"--max-pods", "-1"}, "--max-pods=-1: must be at least 1"},
		"no pods":             {[]string{"--max-pods", "0"}, "--max-pods=0: must be at least 1"},
		"space in a label":    {[]string{"--node-labels", "a b=c"}, `--node-labels: "a b" is not the name of a label`},
		"bad label value":     {[]string{"--node-labels", "a=c d"}, `--node-labels: a="c d" is not the value of a label`},
		"host bits":           {[]string{"--pod-cidr", "198.18.1.0/16"}, "--pod-cidr=198.18.1.0/16: 198.18.1.0 is an address in a range; the range is 198.18.0.0/16"},
		"pods in pods":        {[]string{"--pod-cidr", "198.18.0.0/16,198.18.8.0/21"}, "--pod-cidr=198.18.0.0/16 and --pod-cidr=198.18.8.0/21 share addresses"},
		"pods in services":    {[]string{"--pod-cidr", "10.43.8.0/21"}, "--pod-cidr=10.43.8.0/21 and --service-cidr=10.43.0.0/16 share addresses"},
		"services, host bits": {[]string{"--service-cidr", "10.99.0.1/16"}, "--service-cidr=10.99.0.1/16: 10.99.0.1 is an address in a range"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if got := failStart(t, dir, append([]string{"--listen", "127.0.0.1:0"}, f.flags...)...); !strings.Contains(got, f.says) {
				t.Errorf("%s\nmust say %s", got, f.says)
			}
			if _, err := os.Stat(filepath.Join(dir, "state")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("state of the refused one: %v", err)
			}
		})
	}
}

// TestJoinLineOnAJoinedNode: one of the same cluster is not needed, one of
// another is refused, with both names; the node stays where it is.
func TestJoinLineOnAJoinedNode(t *testing.T) {
	c, other := cluster.NewControlPlane(t), cluster.NewControlPlane(t)
	a := cluster.NewAgent(t, "n1", nil)
	line := strings.TrimSpace(c.Run("token", "create"))
	a.Start("--join", line)
	ready := func(what string) {
		c.Eventually(time.Minute, what, func() error { return c.NodeReady("n1") })
	}
	ready("it joins")
	a.Stop(syscall.SIGTERM)
	foreign := strings.TrimSpace(other.Run("token", "create"))
	got := refused(t, append([]string{"agent", "--node-name", "n1", "--netns", a.NetNS, "--gossip-port", "0", "--join", foreign}, a.DirFlags()...)...)
	for _, want := range []string{"is in cluster ", "another one", strings.Split(line, ".")[3], strings.Split(foreign, ".")[3], "without --join", "dunlin agent reset"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q does not say %q", got, want)
		}
	}
	a.Start("--join", line) // used up long ago: it is not looked at
	ready("it is back")
	if !strings.Contains(a.Log(), "the join line is not needed") {
		t.Errorf("log: %s", a.Log())
	}
}

// TestChangedPodRange: a node keeps the range that it has, and the server says
// so at its start.
func TestChangedPodRange(t *testing.T) {
	c := cluster.New(t)
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	log := func() string {
		b, err := os.ReadFile(filepath.Join(c.Dir, "server.log"))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	c.Start()
	const says = "--pod-cidr was changed"
	if strings.Contains(log(), says) {
		t.Fatalf("it was not changed: %s", log())
	}
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	c.SetFlags("--pod-cidr", "198.19.248.0/21")
	c.Start()
	c.Eventually(30*time.Second, "the server says that it keeps the range", func() error {
		if l := log(); !strings.Contains(l, says) {
			return errors.New(l)
		}
		return nil
	})
}

// TestRemovedRunFolder: an agent whose run folder somebody removes answers on
// its socket again, and is still the only one there.
func TestRemovedRunFolder(t *testing.T) {
	c := cluster.New(t)
	run := filepath.Join(c.Dir, "run")
	if err := os.RemoveAll(run); err != nil {
		t.Fatal(err)
	}
	second := func() string {
		return refused(t, append([]string{"server", "--listen", "127.0.0.1:0", "--node-name", "second", "--gossip-port", "0", "--netns", c.NetNS + "x"}, c.DirFlags()...)...)
	}
	second() // its state is held, whatever became of the run folder
	c.Eventually(30*time.Second, "the agent answers", func() error {
		out, err := c.Try("get", "nodes", "--local", "--run-dir", run)
		if err != nil || !strings.Contains(out, "e2e") {
			return errors.Join(errors.New(out), err)
		}
		return nil
	})
	if got, want := second(), "run folder "+run+": in use by process "+strconv.Itoa(c.Cmd.Process.Pid); !strings.Contains(got, want) {
		t.Errorf("%q does not say %q", got, want)
	}
	if err := os.Remove(filepath.Join(run, "agent.sock")); err != nil {
		t.Fatal(err)
	}
	c.Eventually(30*time.Second, "the agent answers again", func() error {
		_, err := c.Try("get", "nodes", "--local", "--run-dir", run)
		return err
	})
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"agent.sock", "lock"} {
		if _, err := os.Lstat(filepath.Join(run, f)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", f, err)
		}
	}
}
