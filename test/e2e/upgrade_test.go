//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// upgrade is three servers and two nodes of which each has one of two builds.
type upgrade struct {
	*cluster.Servers
	t      *testing.T
	next   string
	agents []*cluster.Agent
	guests []map[string]int
	n      int
}

// install gives one part another build and looks whether all is well: parts 0
// to 2 are the servers.
func (u *upgrade) install(part int, bin string) {
	u.t.Helper()
	what := "next"
	if bin == "" {
		what = "old"
	}
	if part < 3 {
		s := u.List[part]
		u.t.Logf("server %s: %s", s.Name, what)
		s.Stop(syscall.SIGTERM)
		s.Bin = bin
		s.Start()
		u.Roles(3, 3)
	} else {
		a := u.agents[part-3]
		u.t.Logf("node %s: %s", a.Name, what)
		a.Stop(syscall.SIGTERM)
		a.Bin = bin
		a.Start()
	}
	u.well()
}

// well: every server takes writes, every node is Ready and connected, and what
// ran runs on.
func (u *upgrade) well() {
	u.t.Helper()
	for i := range u.List {
		u.n++
		u.Eventually(time.Minute, "a write goes through", func() error {
			_, err := u.TryIn(i, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: w%d}\n", u.n), "apply", "-f", "-")
			return err
		})
	}
	for i, a := range u.agents {
		u.Eventually(time.Minute, a.Name+" is connected and Ready", func() error {
			if s, err := a.Status(); err != nil || !s.Connected {
				return fmt.Errorf("%+v, %v", s, err)
			}
			return u.NodeReady(0, a.Name)
		})
		if now := a.HostPIDs(); !maps.Equal(now, u.guests[i]) {
			u.t.Fatalf("guests of %s: %v, were %v", a.Name, now, u.guests[i])
		}
	}
}

// all gives every part a build, in any order. While a server has the old one
// the feature level cannot be raised.
func (u *upgrade) all(bin string) {
	u.t.Helper()
	for _, part := range rand.Perm(3 + len(u.agents)) {
		u.install(part, bin)
		old := ""
		for _, s := range u.List {
			if s.Bin == "" {
				old = s.Name
			}
		}
		if old == "" {
			continue
		}
		if _, err := u.Try(0, "server", "raise-level", "--to", "2", "--yes"); err == nil || !strings.Contains(err.Error(), "understands level 1: upgrade it first") {
			u.t.Fatalf("raised while %s is old: %v", old, err)
		}
	}
}

// commands: the command line of a build does its work with servers of another,
// and restores no snapshot that it does not understand.
func (u *upgrade) commands(bin string) {
	u.t.Helper()
	for _, c := range []struct{ args, want string }{
		{"version", "Kubernetes API"},
		{"get nodes", "Ready"},
		{"get pods -o yaml", "containerStatuses"},
		{"describe deploy/app-n1", "progressDeadlineSeconds"},
		{"scale deploy/app-n1 --replicas=1", "scaled"},
		{"rollout status deploy/app-n1 --timeout 30s", "rolled out"},
		{"rollout history deploy/app-n1", "REVISION"},
		{"events", ""},
		{"logs deploy/app-n1", ""},
		{"token create", "dunlin1"},
		{"server list", "leader"},
		{"snapshot save " + filepath.Join(u.t.TempDir(), "snapshot"), ""},
	} {
		// A node may be between two servers, of which one has just been stopped.
		u.Eventually(20*time.Second, c.args+" by "+bin, func() error {
			cmd := exec.CommandContext(u.t.Context(), bin, strings.Fields(c.args)...)
			cmd.Env = append(os.Environ(), "KUBECONFIG="+u.Kubeconfig(0))
			out, err := cmd.CombinedOutput()
			if strings.Contains(string(out), "understands 1: install the version that the other servers run") && bin != u.next {
				return nil
			}
			if err != nil || !strings.Contains(string(out), c.want) {
				return fmt.Errorf("%s, %v", out, err)
			}
			return nil
		})
	}
}

// noPanic: nothing crashed, whatever it read.
func (u *upgrade) noPanic() {
	u.t.Helper()
	for _, s := range u.List {
		if l := s.Log(); strings.Contains(l, "panic:") || strings.Contains(l, "goroutine ") {
			u.t.Fatalf("%s crashed: %s", s.Name, l)
		}
	}
	for _, a := range u.agents {
		if l := a.Log(); strings.Contains(l, "panic:") || strings.Contains(l, "goroutine ") {
			u.t.Fatalf("%s crashed: %s", a.Name, l)
		}
	}
}

// TestStory18Versions: servers and nodes are upgraded in any order, one after
// the other, and back while the feature level was not raised; work goes on.
// Once it was, a server of the old build stops with a line that says what to
// do, and the new build goes on with its folder; nodes of the old build stay.
func TestStory18Versions(t *testing.T) {
	u := &upgrade{t: t, next: cluster.NextBuild(t), Servers: cluster.NewServers(t, 3)}
	for i := range 2 {
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), nil)
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		a.Start("--join", strings.TrimSpace(u.Run(0, "token", "create")))
		u.agents = append(u.agents, a)
	}
	for _, a := range u.agents {
		u.Eventually(time.Minute, a.Name+" is Ready", func() error { return u.NodeReady(0, a.Name) })
	}
	for _, a := range u.agents {
		d := strings.Replace(deployment("app-"+a.Name, "sleep.wasm", 1, ""), "    spec:\n", "    spec:\n      nodeName: "+a.Name+"\n", 1)
		if _, err := u.TryIn(0, d, "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
	}
	u.Eventually(time.Minute, "each node has a guest", func() error {
		u.guests = nil
		for _, a := range u.agents {
			u.guests = append(u.guests, a.HostPIDs())
			if n := len(u.guests[len(u.guests)-1]); n != 1 {
				return fmt.Errorf("%s has %d", a.Name, n)
			}
		}
		return nil
	})
	u.commands(u.next)
	for range cycles(t) {
		u.all(u.next)
		u.all("")
	}
	u.all(u.next)
	u.noPanic()
	if _, err := u.Try(0, "server", "raise-level"); err == nil || !strings.Contains(err.Error(), "from 1 to 2") || !strings.Contains(err.Error(), "--yes") {
		t.Errorf("raised without --yes: %v", err)
	}
	saved := filepath.Join(t.TempDir(), "saved")
	u.Run(0, "snapshot", "save", saved)
	u.Run(0, "server", "raise-level", "--yes")
	for i := range u.List {
		u.Eventually(30*time.Second, "every server knows the level", func() error {
			out, err := u.Try(i, "server", "list", "-o", "json")
			if err != nil || strings.Count(out, `"featureLevel": 2`) != 4 { // the cluster's, and three
				return fmt.Errorf("%s, %v", out, err)
			}
			return nil
		})
	}
	u.well()
	u.commands(cluster.Binary(t))

	// No way back for a server, a polite one.
	s := u.List[rand.IntN(3)]
	s.Stop(syscall.SIGTERM)
	s.Bin = ""
	for range 2 { // again and again, as a supervisor would start it
		s.Start()
		if err := s.Cmd.Wait(); err == nil {
			t.Errorf("%s ended well", s.Name)
		}
	}
	if l := s.Log(); !strings.Contains(l, "the cluster's feature level is 2 and this build understands 1: install the version that the other servers run") {
		t.Errorf("%s does not say why it ended: %s", s.Name, l)
	}
	u.noPanic()
	// Nor does it take the others for lost because they refuse it.
	for _, args := range [][]string{{"server", "recover"}, {"snapshot", "restore", saved}} {
		if _, err := u.Try(0, append(args, "--yes", "--state-dir", filepath.Join(s.Dir, "state"))...); err == nil || !strings.Contains(err.Error(), "the cluster is not lost") {
			t.Errorf("%v with the old build: %v", args, err)
		}
	}
	s.Bin = u.next
	s.Start()
	u.Roles(3, 3)
	u.well()
	// Nodes may: they are spoken to at the level that both understand.
	for part := range u.agents {
		u.install(3+part, "")
	}
	// And no new server of the old build joins.
	args := append([]string{"server", "--no-node", "--node-name", "s9", "--listen", "127.0.0.1:0", "--gossip-port", "0", "--join", strings.TrimSpace(u.Run(0, "token", "create", "--server"))}, cluster.NewAgent(t, "s9", nil).DirFlags()...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, cluster.Binary(t), args...).CombinedOutput()
	if err == nil || ctx.Err() != nil || !strings.Contains(string(out), "the cluster is at level 2; upgrade it") {
		t.Errorf("an old server joined, or did not say why not: %v, %s", err, out)
	}
	u.noPanic()
}
