//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// holder is a pod that takes so many MiB and keeps them.
func holder(name string, mib int, spec, resources string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {app: %[1]s}}
spec:
  runtimeClassName: wasm
  automountServiceAccountToken: false
%[3]s  containers:
  - {name: main, image: hold.wasm, args: ["%[2]d"]%[4]s}
---
`, name, mib, spec, resources)
}

// TestMemoryFilledEvicts: a node whose memory is filled to 95 % evicts the pod
// that takes more than it asked for; the critical one, and the one that keeps
// to its request, are the same processes as before. A leaker without a limit
// is killed before its neighbours.
func TestMemoryFilledEvicts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, needs root for control groups (CI runs it as root)")
	}
	c := cluster.New(t, "--node-memory", "200Mi", "--eviction-hard", "memory.available<10%", "--eviction-pressure-transition-period", "10s")
	var n corev1.Node
	if err := c.Get("node/e2e", &n); err != nil {
		t.Fatal(err)
	}
	if got := n.Status.Capacity.Memory().String(); got != "200Mi" {
		t.Fatalf("capacity %s", got)
	}
	for _, cond := range n.Status.Conditions {
		if cond.Type == "dunlin.dev/LimitsEnforced" && cond.Status != corev1.ConditionTrue {
			t.Skip("SKIPPED, no memory controller here: " + cond.Message)
		}
	}
	c.Import("hold.wasm", cluster.Module(t, "hold"))
	c.Import("grow.wasm", cluster.Module(t, "grow"))
	c.Apply(holder("critical", 40, "  priorityClassName: system-node-critical\n", "") +
		holder("modest", 40, "", ", resources: {requests: {memory: 64Mi}}"))
	for _, app := range []string{"critical", "modest"} {
		c.WaitReady("app="+app, 1)
	}
	before := c.HostPIDs()
	kept := func() error {
		now := c.HostPIDs()
		for id, pid := range before {
			if now[id] != pid {
				return fmt.Errorf("guest %s was %d and is %d", id, pid, now[id])
			}
		}
		return nil
	}
	one := func(app string) *corev1.Pod {
		l := c.Pods("app=" + app)
		if len(l) != 1 {
			t.Fatalf("%d pods of %s", len(l), app)
		}
		return &l[0]
	}
	c.Apply(holder("filler", 106, "", ""))
	c.Eventually(90*time.Second, "the filler is evicted", func() error {
		p := one("filler")
		if p.Status.Phase != corev1.PodFailed || p.Status.Reason != "Evicted" || !strings.HasPrefix(p.Status.Message, "The node was low on resource: memory. Threshold quantity: 20Mi, available: ") ||
			!strings.Contains(p.Status.Message, "Container main was using ") {
			return fmt.Errorf("%s %s: %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		n := corev1.Node{}
		if err := c.Get("node/e2e", &n); err != nil {
			return err
		}
		if !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeMemoryPressure }) {
			return fmt.Errorf("taints %v", n.Spec.Taints)
		}
		return nil
	})
	if err := kept(); err != nil {
		t.Fatal(err)
	}
	c.Eventually(90*time.Second, "the pressure is over", func() error {
		n := corev1.Node{}
		if err := c.Get("node/e2e", &n); err != nil {
			return err
		}
		if len(n.Spec.Taints) > 0 {
			return fmt.Errorf("taints %v", n.Spec.Taints)
		}
		return nil
	})
	c.Apply(strings.Replace(holder("leaker", 0, "  restartPolicy: Never\n", ""), "hold.wasm", "grow.wasm", 1))
	c.Eventually(60*time.Second, "the leaker is killed", func() error {
		p := one("leaker")
		if p.Status.Phase != corev1.PodFailed {
			return errors.New(string(p.Status.Phase))
		}
		if p.Status.Reason == "Evicted" {
			return nil // the agent was faster than the kernel
		}
		if s := p.Status.ContainerStatuses[0].State.Terminated; s == nil || s.Reason != "OOMKilled" || !strings.Contains(s.Message, "no limit of its own") {
			return fmt.Errorf("ended %+v", s)
		}
		return nil
	})
	if err := kept(); err != nil {
		t.Fatal(err)
	}
}
