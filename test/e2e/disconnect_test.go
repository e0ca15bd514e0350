//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// annotated is a Deployment or a StatefulSet of one pod with annotations.
func annotated(kind, name string, annotations ...string) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: %[1]s
metadata: {name: %[2]s}
spec:
  selector: {matchLabels: {app: %[2]s}}
  template:
    metadata:
      labels: {app: %[2]s}
      annotations: {%[3]s}
    spec:
      runtimeClassName: wasm
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 2
      containers: [{name: main, image: sleep.wasm}]
---
`, kind, name, strings.Join(annotations, ", "))
}

// TestDisconnectPolicies: a node with pods of every policy is cut off, and its
// agent is killed. Those with a stop deadline stop by themselves, the others
// run on; in the cluster each is replaced as it says, one of which there may
// be one only not before it has stopped. Then the node is back: the original,
// the replacement or the better one is kept.
func TestDisconnectPolicies(t *testing.T) {
	site := cluster.NewSite(t)
	c := cluster.NewServersOn(t, 1, site.Host())
	m := site.NewMachine()
	n1, n2 := cluster.NewAgent(t, "n1", m), cluster.NewAgent(t, "n2", site.NewMachine())
	join := func(a *cluster.Agent) {
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
		c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(0, a.Name) })
	}
	join(n1)
	const stop = `dunlin.dev/stop-deadline: "12s"`
	all := annotated("Deployment", "original") +
		annotated("Deployment", "replacement", "dunlin.dev/on-return: replacement") +
		annotated("Deployment", "better", "dunlin.dev/on-return: better") +
		annotated("Deployment", "waits", "dunlin.dev/replace-after: never") +
		annotated("Deployment", "stops", stop) +
		annotated("StatefulSet", "once", stop)
	if _, err := c.TryIn(0, all, "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	apps := []string{"original", "replacement", "better", "waits", "stops", "once"}
	before := map[string]corev1.Pod{}
	for _, app := range apps {
		c.Eventually(time.Minute, app+" runs", func() error {
			p, err := onePod(c, app)
			before[app] = p
			return err
		})
	}
	guest := func(a *cluster.Agent, p corev1.Pod) int {
		for id, pid := range a.HostPIDs() {
			if strings.Contains(id, string(p.UID)) {
				return pid
			}
		}
		return 0
	}
	pids := map[string]int{}
	for _, app := range apps {
		if pids[app] = guest(n1, before[app]); pids[app] == 0 {
			t.Fatalf("no guest of %s: %v", app, n1.HostPIDs())
		}
	}
	join(n2)
	pause(t, 15*time.Second) // connected for longer than the deadline
	for _, app := range apps {
		if now := guest(n1, before[app]); now != pids[app] {
			t.Errorf("%s: connected, and the guest is %d, was %d", app, now, pids[app])
		}
	}

	m.Cut()
	n1.Stop(syscall.SIGKILL)
	for _, app := range []string{"original", "replacement", "better"} {
		c.Eventually(time.Minute, app+" runs elsewhere", func() error { return elsewhere(c, app, "n1") })
	}
	for _, app := range []string{"stops", "once"} {
		c.Eventually(90*time.Second, app+" runs elsewhere", func() error {
			err := elsewhere(c, app, "n1")
			if err == nil && guest(n1, before[app]) != 0 {
				t.Errorf("%s runs twice", app)
			}
			return err
		})
		if guest(n1, before[app]) != 0 {
			t.Errorf("%s did not stop", app)
		}
	}
	running := func(what string, apps ...string) {
		t.Helper()
		for _, app := range apps {
			if now := guest(n1, before[app]); now != pids[app] {
				t.Errorf("%s: guest of %s is %d, was %d", what, app, now, pids[app])
			}
		}
	}
	running("cut off", "original", "replacement", "better", "waits")
	if list, err := podsOf(c, 0, "app=waits"); err != nil || len(list) != 1 || list[0].UID != before["waits"].UID {
		t.Errorf("what shall never be replaced was: %d pods, %v", len(list), err)
	}

	// Its agent is back before its link: what stopped is not started.
	n1.Start()
	c.Eventually(time.Minute, "it says why it does not start them", func() error {
		out, err := n1.Command("get", "pods", "-A", "--local")
		if err != nil || strings.Count(out, "Disconnected") != 2 {
			return fmt.Errorf("%s, %v", out, err)
		}
		return nil
	})
	running("agent restarted", "original", "replacement", "better", "waits")
	if n := len(n1.HostPIDs()); n != 4 {
		t.Errorf("%d guests offline: %v", n, n1.HostPIDs())
	}

	m.Heal()
	c.Eventually(time.Minute, "n1 is Ready", func() error { return c.NodeReady(0, "n1") })
	after := map[string]corev1.Pod{}
	for _, app := range apps {
		c.Eventually(time.Minute, app+" has one pod again", func() error {
			p, err := onePod(c, app)
			if err == nil && guest(n1, p) == 0 && guest(n2, p) == 0 {
				err = errors.New("it has no guest")
			}
			after[app] = p
			return err
		})
	}
	running("back", "original", "waits")
	for _, app := range []string{"original", "waits"} {
		if after[app].UID != before[app].UID {
			t.Errorf("%s: the original was not kept", app)
		}
	}
	log, err := os.ReadFile(filepath.Join(n1.Dir, "log"))
	check(t, err)
	for _, app := range []string{"stops", "once"} {
		n := 0
		for line := range strings.Lines(string(log)) {
			if strings.Contains(line, "reason=Started") && strings.Contains(line, string(before[app].UID)) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%s was started %d times, also beside its replacement", app, n)
		}
	}
	for _, app := range []string{"replacement", "better", "stops", "once"} {
		if after[app].UID == before[app].UID || after[app].Spec.NodeName != "n2" {
			t.Errorf("%s: the replacement was not kept: %s on %s", app, after[app].Name, after[app].Spec.NodeName)
		}
	}
	c.Eventually(time.Minute, "nothing is left of the others", func() error {
		if n := len(n1.HostPIDs()) + len(n2.HostPIDs()); n != len(apps) {
			return fmt.Errorf("%d guests: %v, %v", n, n1.HostPIDs(), n2.HostPIDs())
		}
		return nil
	})
}

// elsewhere says whether the app has a Ready pod on another node.
func elsewhere(c *cluster.Servers, app, node string) error {
	list, err := podsOf(c, 0, "app="+app)
	for i := range list {
		if list[i].Spec.NodeName != node && cluster.Ready(&list[i]) {
			return nil
		}
	}
	return fmt.Errorf("%d pods, %v", len(list), err)
}

// TestDisconnectPolicyIsChecked: a policy that cannot be is refused with the
// reason.
func TestDisconnectPolicyIsChecked(t *testing.T) {
	c := cluster.NewControlPlane(t)
	for manifest, want := range map[string]string{
		annotated("Deployment", "a", `dunlin.dev/stop-deadline: "3s"`):  "must be a duration from 10s on",
		annotated("Deployment", "a", "dunlin.dev/replace-after: later"): "must be a duration, as 0s, 90s or 15m, or never",
		annotated("Deployment", "a", "dunlin.dev/on-return: best"):      `supported values: "original", "replacement", "better"`,
		annotated("StatefulSet", "a", "dunlin.dev/replace-after: 5m"):   "dunlin node declare-dead",
		annotated("DaemonSet", "a", "dunlin.dev/replace-after: 5m"):     "belongs to its node",
	} {
		if out, err := c.TryIn(manifest, "apply", "-f", "-"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s, %v; want %s", out, err, want)
		}
	}
}
