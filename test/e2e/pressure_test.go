//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestFullDiskIsToldAndTainted: a node whose disk is full says so with
// figures, gets the taint, takes no new pods, and what runs goes on.
func TestFullDiskIsToldAndTainted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, needs root to mount file systems (CI runs it as root)")
	}
	c := cluster.NewControlPlane(t)
	a := cluster.NewAgent(t, "small", nil)
	state := filepath.Join(a.Dir, "state")
	if err := os.Mkdir(state, 0o711); err != nil { //nolint:gosec // guests run as other users
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", state, "tmpfs", 0, "size=64m,mode=711"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		a.Stop(syscall.SIGTERM)
		_ = syscall.Unmount(state, syscall.MNT_DETACH)
	})
	a.Import("sleep.wasm", cluster.Module(t, "sleep"))
	a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	c.Apply(deployment("kept", "sleep.wasm", 2, ""))
	c.WaitReady("app=kept", 2)
	before := a.HostPIDs()
	f, err := os.Create(filepath.Join(state, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	for chunk := make([]byte, 1<<20); err == nil; {
		_, err = f.Write(chunk)
	}
	if cerr := f.Close(); !errors.Is(err, syscall.ENOSPC) || cerr != nil {
		t.Fatal(err, cerr)
	}
	c.Eventually(90*time.Second, "the node has the condition and the taint", func() error {
		var n corev1.Node
		if err := c.Get("node/small", &n); err != nil {
			return err
		}
		i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeDiskPressure })
		if i < 0 || n.Status.Conditions[i].Status != corev1.ConditionTrue || !strings.Contains(n.Status.Conditions[i].Message, " of 64Mi is free on the disk of "+state) {
			return fmt.Errorf("conditions %v", n.Status.Conditions)
		}
		if !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool {
			return t.Key == corev1.TaintNodeDiskPressure && t.Effect == corev1.TaintEffectNoSchedule
		}) {
			return fmt.Errorf("taints %v", n.Spec.Taints)
		}
		return nil
	})
	c.Apply(deployment("late", "sleep.wasm", 1, ""))
	c.Eventually(30*time.Second, "a new pod says why it waits", func() error {
		for _, p := range c.Pods("app=late") {
			if out := c.Run("describe", "pod", p.Name); strings.Contains(out, corev1.TaintNodeDiskPressure) {
				return nil
			}
		}
		return errors.New("it does not")
	})
	if now := a.HostPIDs(); !maps.Equal(before, now) {
		t.Fatalf("guests %v, were %v", now, before)
	}
}
