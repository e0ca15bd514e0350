package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// groups is the agent's root control group.
const groups = "/sys/fs/cgroup/dunlin"

// groupsV2 is a machine with control groups v2 and all controllers.
func groupsV2(g *guest) error {
	if err := groupTests(g); err != nil {
		return err
	}
	if err := quotaTests(g); err != nil {
		return err
	}
	out, err := g.must("/dunlin", "preflight")
	if err == nil {
		err = says(out, "memory limits are enforced")
	}
	if err != nil {
		return err
	}
	g.ok("preflight is content")
	if err := g.start(); err != nil {
		return err
	}
	if _, err := g.condition(corev1.NodeReady, corev1.ConditionTrue); err != nil {
		return err
	}
	if _, err := g.condition("dunlin.dev/LimitsEnforced", corev1.ConditionTrue); err != nil {
		return err
	}
	g.ok("the server runs, its node is Ready and enforces limits")
	if err := g.importModule("sleep", "loop", "touch"); err != nil {
		return err
	}
	g.ok("three modules are imported")
	err = g.apply(pod("idle", "sleep", "") +
		pod("busy", "loop", "requests: {cpu: 100m}, limits: {cpu: 200m, memory: 48Mi}") +
		pod("hungry", "touch", "limits: {memory: 32Mi}"))
	if err != nil {
		return err
	}
	if err := limits(g); err != nil {
		return err
	}
	if err := adoption(g); err != nil {
		return err
	}
	return cleanUp(g)
}

// quotaTests runs the test of project quotas, which the kernels of few test
// machines have; it may not be skipped.
func quotaTests(g *guest) error {
	if err := os.Setenv("DUNLIN_TEST_QUOTA_IMAGE", "/quota.img"); err != nil {
		return err
	}
	out, code, err := g.run("/volumes.test", "-test.v", "-test.run", "TestVolumesAreLimited|TestClaims", "-test.timeout", "80s")
	if err != nil {
		return err
	}
	if code != 0 || strings.Contains(out, "--- SKIP") {
		return fmt.Errorf("the tests of node/volumes: exit code %d:\n%s", code, out)
	}
	g.ok("volumes of claims are limited by project quotas")
	return nil
}

// groupTests runs the tests of runtime/cgroup; none may be skipped.
func groupTests(g *guest) error {
	out, code, err := g.run("/cgroup.test", "-test.v", "-test.timeout", "80s")
	if err != nil {
		return err
	}
	if code != 0 || strings.Contains(out, "--- SKIP") {
		return fmt.Errorf("the tests of runtime/cgroup: exit code %d:\n%s", code, out)
	}
	if err := says(out, "Mode:v2 Memory:true Swap:", "CPU:true PIDs:true", "--- PASS: TestMemoryLimitKillsAndIsNamed", "--- PASS: TestCPUQuota", "--- PASS: TestKillAndRemove"); err != nil {
		return err
	}
	if left, _ := filepath.Glob("/sys/fs/cgroup/dunlin*"); len(left) > 0 {
		return fmt.Errorf("the tests of runtime/cgroup left %v", left)
	}
	g.ok("%d tests of runtime/cgroup", strings.Count(out, "--- PASS"))
	return nil
}

// limits looks at the pods' control groups and at what the kernel did.
func limits(g *guest) error {
	end, err := g.ended("hungry")
	if err != nil {
		return err
	}
	if end.Reason != "OOMKilled" || end.ExitCode != 137 {
		return fmt.Errorf("the pod that needs more memory than its limit ended with %+v", *end)
	}
	g.ok("a guest above its memory limit is %s: %s", end.Reason, end.Message)
	busy, err := g.ready("busy")
	if err != nil {
		return err
	}
	dir := filepath.Join(groups, "pods/burstable", string(busy.UID), "main-0")
	for file, want := range map[string]string{
		"memory.max": strconv.Itoa(48 << 20), "cpu.max": "20000 100000", "memory.oom.group": "1", "cgroup.events": "populated 1",
	} {
		if b, err := os.ReadFile(filepath.Join(dir, file)); err != nil || !strings.Contains(string(b), want) {
			return errors.Join(fmt.Errorf("control group of pod busy: %s is %q, want %q", file, b, want), err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, "pids.max")); err != nil || strings.TrimSpace(string(b)) == "max" {
		return errors.Join(fmt.Errorf("control group of pod busy: pids.max is %q", b), err)
	}
	throttled := 0
	err = g.until("the guest's processor time is throttled", func() error {
		b, err := os.ReadFile(filepath.Join(dir, "cpu.stat"))
		if throttled = field(b, "nr_throttled"); throttled == 0 {
			return errors.Join(fmt.Errorf("cpu.stat: %q", b), err)
		}
		return err
	})
	if err != nil {
		return err
	}
	g.ok("limits are in the pod's group; its endless loop was throttled (nr_throttled %d)", throttled)
	return nil
}

func field(b []byte, name string) int {
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, name+" "); ok {
			n, _ := strconv.Atoi(strings.TrimSpace(v))
			return n
		}
	}
	return 0
}

// guests are the processes of all pods, by control group.
func guests() (map[string]string, error) {
	out := map[string]string{}
	err := filepath.WalkDir(groups, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return err
		}
		b, err := os.ReadFile(p)
		if procs := strings.Join(strings.Fields(string(b)), " "); procs != "" {
			out[strings.TrimPrefix(filepath.Dir(p), groups)] = procs
		}
		return err
	})
	return out, err
}

// adoption kills the server and starts it again.
func adoption(g *guest) error {
	if _, err := g.ready("idle"); err != nil {
		return err
	}
	before, err := guests()
	if err != nil || len(before) != 2 {
		return errors.Join(fmt.Errorf("processes of two pods: %v", before), err)
	}
	g.kill()
	if now, err := guests(); err != nil || fmt.Sprint(now) != fmt.Sprint(before) {
		return errors.Join(fmt.Errorf("guests after the server's death: %v, were %v", now, before), err)
	}
	if err := g.start(); err != nil {
		return err
	}
	// Its first report tells that the new agent has looked at its pods.
	if _, err := g.condition(corev1.NodeReady, corev1.ConditionTrue); err != nil {
		return err
	}
	if err := g.apply(pod("late", "sleep", "")); err != nil {
		return err
	}
	for _, name := range []string{"late", "idle", "busy"} {
		p, err := g.ready(name)
		if err != nil {
			return err
		}
		if n := p.Status.ContainerStatuses[0].RestartCount; n != 0 {
			return fmt.Errorf("pod %s counts %d restarts", name, n)
		}
	}
	now, err := guests()
	if err != nil {
		return err
	}
	for group, procs := range before {
		if now[group] != procs {
			return fmt.Errorf("group %s: processes %s, were %s", group, now[group], procs)
		}
	}
	g.ok("kill -9 of the server: the next one adopts %d guests and runs a new pod", len(before))
	return nil
}

// cleanUp deletes the pods and sweeps: no group and no namespace is left.
func cleanUp(g *guest) error {
	if _, err := g.must("/dunlin", "--kubeconfig", kubeconfig, "delete", "pod", "idle", "busy", "hungry", "--timeout", "80s"); err != nil {
		return err
	}
	left, err := guests()
	if err != nil || len(left) != 1 {
		return errors.Join(fmt.Errorf("processes of the one pod that is left: %v", left), err)
	}
	g.ok("deleted pods are gone, with their processes")
	if err := g.stop(); err != nil {
		return err
	}
	if now, err := guests(); err != nil || fmt.Sprint(now) != fmt.Sprint(left) {
		return errors.Join(fmt.Errorf("guests after the server's orderly end: %v, were %v", now, left), err)
	}
	if _, err := g.must("/dunlin", "server", "sweep"); err != nil {
		return err
	}
	for _, p := range []string{groups, "/run/netns/dunlin", "/sys/class/net/dunlin0"} {
		if _, err := os.Stat(p); !errors.Is(err, fs.ErrNotExist) {
			return errors.Join(fmt.Errorf("%s is left after 'server sweep'", p), err)
		}
	}
	g.ok("'server sweep' ends the last guest and leaves no group and no namespace")
	return nil
}

// otherProcessor is a small slice on arm64: the code that the compiler makes
// for it, the sandbox's filters, one pod.
func otherProcessor(g *guest) error {
	out, err := g.must("/dunlin", "preflight")
	if err == nil {
		err = says(out, "arm64 (kernel aarch64)", "memory limits are enforced")
	}
	if err != nil {
		return err
	}
	g.ok("preflight is content")
	if out, err = g.must("/dunlin", "run", "/wasm/chello.wasm"); err != nil {
		return err
	}
	if strings.TrimSpace(out) == "" {
		return errors.New("'dunlin run' of a C module printed nothing")
	}
	g.ok("'dunlin run' of a C module")
	out, code, err := g.run("/dunlin", "run", "/wasm/fail.wasm")
	if err != nil || code == 0 || code > 125 {
		return errors.Join(fmt.Errorf("a guest that fails: exit code %d: %s", code, out), err)
	}
	g.ok("'dunlin run' passes the guest's exit code on: %d", code)
	return onePod(g)
}

// onePod starts the server and brings one pod to Ready.
func onePod(g *guest) error {
	if err := g.start(); err != nil {
		return err
	}
	if err := g.importModule("sleep"); err != nil {
		return err
	}
	if err := g.apply(pod("idle", "sleep", "limits: {memory: 32Mi}")); err != nil {
		return err
	}
	if _, err := g.ready("idle"); err != nil {
		return err
	}
	g.ok("the server runs and a pod is Ready")
	return nil
}

// noMemoryGroup is a machine whose memory controller is off, as on many a
// board's default kernel command line; its kernel has no veth either.
func noMemoryGroup(g *guest) error {
	out, code, err := g.run("/dunlin", "preflight")
	if err != nil {
		return err
	}
	if code == 0 {
		return fmt.Errorf("preflight is content without a memory control group: %s", out)
	}
	if err := says(out, "cgroup_disable=memory is on the kernel command line", "pods share the node's address: cannot make a veth pair"); err != nil {
		return err
	}
	if n := strings.Count(out, "FAILED"); n != 1 {
		return fmt.Errorf("%d checks failed, want 1:\n%s", n, out)
	}
	for line := range strings.Lines(out) {
		if strings.Contains(line, "FAILED") {
			g.ok("preflight exits with %d and says: %s", code, strings.Join(strings.Fields(line), " "))
		}
	}
	if err := onePod(g); err != nil {
		return err
	}
	c, err := g.condition("dunlin.dev/LimitsEnforced", corev1.ConditionFalse)
	if err == nil && c.Reason != "NoMemoryCgroup" {
		err = fmt.Errorf("condition %+v", c)
	}
	if err == nil {
		err = says(c.Message, "cgroup_disable=memory")
	}
	if err != nil {
		return err
	}
	g.ok("condition LimitsEnforced=False, %s: %s", c.Reason, c.Message)
	// Its memory as the guest sees it is limited all the same.
	if err := g.importModule("grow"); err != nil {
		return err
	}
	if err := g.apply(pod("hungry", "grow", "limits: {memory: 32Mi}")); err != nil {
		return err
	}
	end, err := g.ended("hungry")
	if err == nil && (end.ExitCode == 0 || !strings.Contains(end.Message, "memory limit of 32Mi")) {
		err = fmt.Errorf("the pod that needs more memory than its limit ended with %+v", *end)
	}
	if err != nil {
		return err
	}
	g.ok("the guest's own memory is limited still: %s", end.Message)
	if _, err := g.ready("idle"); err != nil {
		return err
	}
	return g.stop()
}

// clockAt1970 is a board without a battery whose first start is offline; then
// the time arrives.
func clockAt1970(g *guest) error {
	if y := time.Now().Year(); y != 1970 {
		return fmt.Errorf("the guest's clock says %d", y)
	}
	out, err := g.must("/dunlin", "preflight")
	if err == nil {
		err = says(out, "the clock says 1970-01-01")
	}
	if err != nil {
		return err
	}
	g.ok("preflight says that the clock is wrong")
	if err := onePod(g); err != nil {
		return err
	}
	before, err := guests()
	if err != nil {
		return err
	}
	tv := unix.NsecToTimeval(time.Date(2026, 12, 1, 12, 0, 0, 0, time.UTC).UnixNano())
	if err := unix.Settimeofday(&tv); err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	err = g.until("the administrator's kubeconfig is renewed", func() error {
		a, err := newAPI(kubeconfig)
		if err != nil {
			return err
		}
		if _, err = a.node(g.ctx); err == nil {
			g.api = a
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := g.apply(pod("late", "sleep", "")); err != nil {
		return fmt.Errorf("after the clock was set: %w", err)
	}
	if _, err := g.ready("late"); err != nil {
		return err
	}
	g.ok("the clock jumps to 2026: a new pod runs")
	g.kill()
	if err := g.start(); err != nil {
		return err
	}
	if _, err := g.condition(corev1.NodeReady, corev1.ConditionTrue); err != nil {
		return err
	}
	if _, err := g.ready("idle"); err != nil {
		return err
	}
	now, err := guests()
	if err != nil {
		return err
	}
	for group, procs := range before {
		if now[group] != procs {
			return fmt.Errorf("group %s: processes %q, were %q", group, now[group], procs)
		}
	}
	g.ok("a restart at the right time adopts what 1970 started")
	return g.stop()
}
