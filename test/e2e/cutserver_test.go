//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestAServerThatIsCutOff: two servers go on, and the third says what it is
// about: whom it reaches, and nothing that would end the two. A recovery or a
// restore is refused while they answer.
func TestAServerThatIsCutOff(t *testing.T) {
	site := cluster.NewSite(t)
	var machines []*cluster.Machine
	for i := range 3 {
		m := site.NewMachine()
		m.Address(11 + i)
		machines = append(machines, m)
	}
	c := cluster.NewServersApart(t, machines...)
	c.Roles(3, 3)
	file := filepath.Join(t.TempDir(), "saved")
	c.Run(0, "snapshot", "save", file)
	machines[2].Part(machines[:2]...)
	c.Eventually(time.Minute, "a write is refused, with what helps", func() error {
		_, err := c.TryIn(2, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: late}\n", "apply", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), "net check") || strings.Contains(err.Error(), "recover") {
			return fmt.Errorf("%w", err)
		}
		return nil
	})
	c.Eventually(time.Minute, "it says whom it does not reach", func() error {
		out, err := c.Try(2, "net", "check")
		if err == nil || !strings.Contains(out, machines[0].IP+":6443") || !strings.Contains(out, machines[1].IP+":6443") {
			return fmt.Errorf("%s, %w", out, err)
		}
		return nil
	})
	if out, _ := c.Warnings(2, "net", "check"); !strings.Contains(out, "nodes were not asked") {
		t.Errorf("it does not say that it is one server's word: %s", out)
	}
	c.Eventually(time.Minute, "the two go on", func() error {
		_, err := c.TryIn(0, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: kept}\n", "apply", "-f", "-")
		return err
	})
	c.List[2].Stop(syscall.SIGTERM)
	machines[2].Unite()
	state := []string{"--yes", "--state-dir", filepath.Join(c.List[2].Dir, "state")}
	for _, args := range [][]string{{"server", "recover"}, {"snapshot", "restore", file}} {
		_, err := c.Try(2, append(args, state...)...)
		if err == nil || !strings.Contains(err.Error(), "the cluster is not lost") || !strings.Contains(err.Error(), machines[0].IP+":6443") {
			t.Errorf("%v while two servers run: %v", args, err)
		}
	}
	// What it has cannot be read: then it is not known how many make a quorum.
	raft := filepath.Join(c.List[2].Dir, "state", "server", "raft")
	check(t, os.Rename(raft, raft+".aside"))
	if _, err := c.Try(2, append([]string{"snapshot", "restore", file}, state...)...); err == nil || !strings.Contains(err.Error(), "the cluster is not lost, perhaps: other servers answer") {
		t.Errorf("restore without a folder while two servers run: %v", err)
	}
	check(t, os.Rename(raft+".aside", raft))
	c.List[2].Start()
	c.Roles(3, 3)
	if _, err := c.Try(2, "get", "configmap", "kept"); err != nil {
		t.Error(err)
	}
}
