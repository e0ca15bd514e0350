//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// zonePods are the pods of a zone, as many on each node of it.
const zonePods = `apiVersion: apps/v1
kind: Deployment
metadata: {name: in-ZONE}
spec:
  replicas: COUNT
  selector: {matchLabels: {app: zoned, zone: ZONE}}
  template:
    metadata: {labels: {app: zoned, zone: ZONE}, annotations: {dunlin.dev/placement: spread}}
    spec:
      runtimeClassName: wasm
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 1
      nodeSelector: {topology.kubernetes.io/zone: ZONE}
      containers: [{name: main, image: sleep.wasm}]
`

// givenUp is when a node's pods were given up: when it got the taint.
func givenUp(n *corev1.Node) (at time.Time, ok bool) {
	for _, t := range n.Spec.Taints {
		if t.Key == corev1.TaintNodeUnreachable && t.Effect == corev1.TaintEffectNoExecute {
			if t.TimeAdded != nil {
				at = t.TimeAdded.Time
			}
			return at, true
		}
	}
	return at, false
}

// heldBecause is the reason of a node's condition EvictionHeld; "" where it
// does not hold.
func heldBecause(n *corev1.Node) (reason, message string) {
	for _, c := range n.Status.Conditions {
		if c.Type == "EvictionHeld" && c.Status == corev1.ConditionTrue {
			return c.Reason, c.Message
		}
	}
	return "", ""
}

// TestSilentZones: a zone that is silent as a whole is frozen, and says so:
// nothing of it is given up. Of another one two nodes of three are silent:
// they are given up one after the other, not at once, and the second says
// meanwhile what it waits for. All return, and nothing that ran in the frozen
// zone was touched.
func TestSilentZones(t *testing.T) {
	site := cluster.NewSite(t)
	address := fmt.Sprintf("%s:%d", site.Host(), 26000+os.Getpid()%5000)
	c := cluster.NewControlPlane(t, "--listen", address, "--advertise", address)
	machines := map[string]*cluster.Machine{}
	var agents []*cluster.Agent
	for i, zone := range []string{"a", "a", "b", "b", "b"} {
		m := site.NewMachine()
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), m)
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		a.Start("--join", strings.TrimSpace(c.Run("token", "create")), "--node-labels", "topology.kubernetes.io/zone="+zone)
		agents, machines[a.Name] = append(agents, a), m
	}
	for _, a := range agents {
		c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(a.Name) })
	}
	for zone, count := range map[string]string{"a": "4", "b": "6"} {
		c.Apply(strings.NewReplacer("ZONE", zone, "COUNT", count).Replace(zonePods))
	}
	c.WaitReady("app=zoned", 10)
	guests := map[string]map[string]int{}
	for _, a := range agents {
		guests[a.Name] = a.HostPIDs()
	}
	nodes := func() map[string]*corev1.Node {
		t.Helper()
		out := map[string]*corev1.Node{}
		for _, a := range agents {
			n := &corev1.Node{}
			if err := c.Get("node/"+a.Name, n); err != nil {
				t.Fatal(err)
			}
			out[a.Name] = n
		}
		return out
	}
	uids := func() (out []string) { // pods of zone a, and what the cluster thinks of them
		for _, p := range c.Pods("app=zoned,zone=a") {
			out = append(out, fmt.Sprintf("%s %s on %s, Ready %t, deleted %t", p.UID, p.Name, p.Spec.NodeName, cluster.Ready(&p), p.DeletionTimestamp != nil))
		}
		slices.Sort(out)
		return out
	}
	before := uids()

	for _, name := range []string{"n1", "n2", "n3", "n4"} {
		machines[name].Cut()
	}
	limited := map[string]string{}
	c.Eventually(time.Minute, "zone a is frozen, and both of zone b are given up", func() error {
		now := nodes()
		up := 0
		for _, name := range []string{"n3", "n4"} {
			if reason, message := heldBecause(now[name]); reason == "RateLimited" {
				limited[name] = message
			}
			if _, ok := givenUp(now[name]); ok {
				up++
			}
		}
		var said []string
		for _, name := range []string{"n1", "n2"} {
			if _, ok := givenUp(now[name]); ok {
				t.Fatalf("%s is given up", name)
			}
			if reason, _ := heldBecause(now[name]); reason == "ZoneFrozen" {
				said = append(said, name)
			}
		}
		if up != 2 || len(said) != 2 {
			return fmt.Errorf("%d given up, frozen %v, limited %v", up, said, limited)
		}
		return nil
	})
	now := nodes()
	if _, ok := givenUp(now["n5"]); ok || c.NodeReady("n5") != nil {
		t.Error("n5, which answers, is given up or not Ready")
	}
	first, _ := givenUp(now["n3"])
	second, _ := givenUp(now["n4"])
	if apart := second.Sub(first).Abs(); apart < 9*time.Second { // the taints show seconds
		t.Errorf("zone b: given up at %s and %s, %s apart", first, second, apart)
	}
	if len(limited) != 1 || !strings.Contains(fmt.Sprint(limited), `nodes of zone "b" that are silent are given up one after the other, one each 10s`) {
		t.Errorf("limited: %v", limited)
	}
	for _, name := range []string{"n1", "n2"} {
		if out := c.Run("describe", "node", name); !strings.Contains(out, "ZoneFrozen") || !strings.Contains(out, `So many nodes of zone "a" are silent together that the link is taken for broken`) {
			t.Errorf("describe node %s: %s", name, out)
		}
	}
	c.Eventually(20*time.Second, "what was on two nodes of zone b runs on the third", func() error {
		there := 0
		for _, p := range c.Pods("app=zoned,zone=b") {
			if p.Spec.NodeName == "n5" && cluster.Ready(&p) {
				there++
			}
		}
		if there != 6 {
			return fmt.Errorf("%d", there)
		}
		return nil
	})
	if after := uids(); !slices.Equal(after, before) {
		t.Errorf("zone a has %v, had %v", after, before)
	}

	for _, name := range []string{"n1", "n2", "n3", "n4"} {
		machines[name].Heal()
	}
	for _, a := range agents {
		c.Eventually(time.Minute, a.Name+" is back", func() error {
			if err := c.NodeReady(a.Name); err != nil {
				return err
			}
			if n := nodes()[a.Name]; len(n.Spec.Taints) > 0 {
				return fmt.Errorf("taints %v", n.Spec.Taints)
			}
			return nil
		})
	}
	for name, n := range nodes() {
		if reason, _ := heldBecause(n); reason != "" {
			t.Errorf("%s is back and still held: %s", name, reason)
		}
	}
	if after := uids(); !slices.Equal(after, before) {
		t.Errorf("all are back: zone a has %v, had %v", after, before)
	}
	for _, a := range agents[:2] {
		if now := a.HostPIDs(); !maps.Equal(now, guests[a.Name]) {
			t.Errorf("guests of %s: %v, were %v", a.Name, now, guests[a.Name])
		}
	}
}
