//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestNetCheck: UDP from one node to another is blocked, in that direction
// alone. The check names both ends and the direction, from both, and says that
// all else gets through; so does the node's log, once; and the nodes' own view
// needs no server. Then the site gets new gossip keys.
func TestNetCheck(t *testing.T) {
	f := newFleet(t, 2)
	local := func(a *cluster.Agent) (string, error) {
		out, err := exec.Command(cluster.Binary(t), "net", "check", "--local", "--run-dir", filepath.Join(a.Dir, "run")).CombinedOutput()
		return string(out), err
	}
	everybody := func() error {
		for _, a := range f.agents {
			if s, err := a.Status(); err != nil || len(s.Gossip.Members) != 3 {
				return fmt.Errorf("%+v, %v", s, err)
			}
		}
		return nil
	}
	f.Eventually(time.Minute, "everybody knows everybody by gossip", everybody)
	f.Eventually(time.Minute, "all paths are good", func() error {
		out, err := f.Try("net", "check")
		if err != nil || strings.Contains(out, "blocked") || strings.Count(out, "gossip UDP") != 6 {
			return fmt.Errorf("%s, %v", out, err)
		}
		return nil
	})
	f.machines[0].BlockUDPTo(f.machines[1])
	f.Eventually(time.Minute, "the direction is named", func() error {
		out, err := f.Try("net", "check")
		if err == nil {
			return fmt.Errorf("no error: %s", out)
		}
		all := out + err.Error()
		if strings.Count(err.Error(), "is blocked") != 1 || !strings.Contains(err.Error(), "UDP from n1 ("+f.machines[0].IP) || !strings.Contains(err.Error(), "to n2 ("+f.machines[1].IP) {
			return fmt.Errorf("%s", all)
		}
		return nil
	})
	log := func() int {
		n := 0
		for _, a := range f.agents {
			b, err := os.ReadFile(filepath.Join(a.Dir, "log"))
			if err != nil {
				t.Fatal(err)
			}
			n += strings.Count(string(b), "a member of this site is reached by TCP only")
		}
		return n
	}
	f.Eventually(3*time.Minute, "a node says it", func() error {
		if log() == 0 {
			return fmt.Errorf("nobody")
		}
		return nil
	})
	f.ready()
	f.Run("net", "rotate-keys")
	for _, a := range f.agents {
		f.Eventually(time.Minute, "the keys arrive", func() error {
			if !strings.Contains(a.Log(), "gossip keys changed") {
				return fmt.Errorf("not yet: %s", a.Log())
			}
			return nil
		})
	}
	f.Eventually(time.Minute, "everybody knows everybody with the new keys", everybody)
	if err := f.Cmd.Process.Signal(syscall.SIGSTOP); err != nil { // no server answers
		t.Fatal(err)
	}
	defer func() { _ = f.Cmd.Process.Signal(syscall.SIGCONT) }()
	out, err := local(f.agents[0])
	if err == nil || !strings.Contains(out, "UDP from n1 ("+f.machines[0].IP) || !strings.Contains(out, f.machines[1].IP) {
		t.Errorf("the node's own view: %v, %s", err, out)
	}
	if n := log(); n > 2 {
		t.Errorf("it was said %d times", n)
	}
}
