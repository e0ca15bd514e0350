//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// fleet is a server on this host and agents on machines of their own.
type fleet struct {
	*cluster.Cluster
	t        *testing.T
	machines []*cluster.Machine
	agents   []*cluster.Agent
}

func newFleet(t *testing.T, n int) *fleet {
	t.Helper()
	s := cluster.NewSite(t)
	f := &fleet{t: t}
	for range n {
		f.machines = append(f.machines, s.NewMachine())
	}
	f.Cluster = cluster.New(t, "--node-address", s.Host(), "--listen", s.Host()+":"+strconv.Itoa(20000+rand.IntN(9999)))
	f.Import("sleep.wasm", cluster.Module(t, "sleep"))
	for i, m := range f.machines {
		a := cluster.NewAgent(t, fmt.Sprintf("n%d", i+1), m)
		a.Import("sleep.wasm", cluster.Module(t, "sleep"))
		a.Start("--join", strings.TrimSpace(f.Run("token", "create")))
		f.agents = append(f.agents, a)
	}
	f.ready()
	return f
}

func (f *fleet) ready() {
	f.t.Helper()
	for _, a := range f.agents {
		f.Eventually(time.Minute, a.Name+" is Ready", func() error { return f.NodeReady(a.Name) })
	}
}

// guests are all host processes, by node.
func (f *fleet) guests() map[string]map[string]int {
	out := map[string]map[string]int{"e2e": f.HostPIDs()}
	for _, a := range f.agents {
		out[a.Name] = a.HostPIDs()
	}
	return out
}

func total(g map[string]map[string]int) (n int) {
	for _, m := range g {
		n += len(m)
	}
	return n
}

// restarts of the pods that have one of the uids.
func (f *fleet) restarts(selector string) (n int32) {
	f.t.Helper()
	for _, p := range f.Pods(selector) {
		for _, s := range p.Status.ContainerStatuses {
			n += s.RestartCount
		}
	}
	return n
}

func pause(t *testing.T, d time.Duration) {
	t.Helper()
	select {
	case <-time.After(d):
	case <-t.Context().Done():
	}
}

// TestFleet is one site through its bad days: blocked UDP, a cut link, short
// and long, and a machine that dies.
func TestFleet(t *testing.T) {
	const pods = 8
	f := newFleet(t, 3)
	f.Eventually(time.Minute, "everybody knows everybody by gossip", func() error {
		for _, get := range []func() (cluster.AgentStatus, error){f.Status, f.agents[0].Status, f.agents[1].Status, f.agents[2].Status} {
			if s, err := get(); err != nil || len(s.Gossip.Members) != 4 {
				return fmt.Errorf("%+v, %v", s, err)
			}
		}
		return nil
	})
	f.Apply(strings.Replace(deployment("many", "sleep.wasm", pods, ""), "{app: many}}\n    spec:", "{app: many}, annotations: {dunlin.dev/placement: spread}}\n    spec:\n      terminationGracePeriodSeconds: 1", 1))
	f.WaitReady("app=many", pods)
	before := f.guests()
	for n, g := range before {
		if len(g) == 0 {
			t.Errorf("no pod on %s: %v", n, before)
		}
	}
	f.Eventually(time.Minute, "leases go by UDP", func() error {
		if s, err := f.agents[0].Status(); err != nil || s.Gossip.LeasesByUDP < 3 {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})

	t.Run("UDP is blocked", func(t *testing.T) {
		f.machines[1].BlockUDP()
		for range 20 {
			pause(t, time.Second)
			if err := f.NodeReady("n2"); err != nil {
				t.Fatal(err)
			}
			if s, err := f.agents[1].Status(); err != nil || !s.Connected {
				t.Fatalf("%+v, %v", s, err)
			}
		}
	})
	same := func(t *testing.T) {
		t.Helper()
		if now := f.guests(); !maps.EqualFunc(now, before, maps.Equal) {
			t.Fatalf("guests %v, were %v", now, before)
		}
		if n := f.restarts("app=many"); n != 0 {
			t.Fatalf("%d restarts", n)
		}
	}
	same(t)

	t.Run("a link is cut for 5 s", func(t *testing.T) {
		f.machines[0].Cut()
		pause(t, 5*time.Second)
		f.machines[0].Heal()
		f.ready()
		f.Eventually(30*time.Second, "n1 is connected", func() error {
			if s, err := f.agents[0].Status(); err != nil || !s.Connected {
				return fmt.Errorf("%+v, %v", s, err)
			}
			return nil
		})
		// It may have been taken for lost in the last moment; then the
		// replacements go again.
		f.Eventually(time.Minute, "as before", func() error {
			if now := f.guests(); !maps.EqualFunc(now, before, maps.Equal) {
				return fmt.Errorf("guests %v, were %v", now, before)
			}
			return nil
		})
		f.WaitReady("app=many", pods)
		same(t)
	})

	t.Run("a link is cut for 60 s", func(t *testing.T) {
		start := time.Now()
		f.machines[0].Cut()
		f.Eventually(time.Minute, "all pods run without n1", func() error { return f.elsewhere("app=many", "n1", pods) })
		t.Logf("link cut → its pods Ready elsewhere: %.1f s", time.Since(start).Seconds())
		pause(t, time.Until(start.Add(time.Minute)))
		if now := f.agents[0].HostPIDs(); !maps.Equal(now, before["n1"]) {
			t.Fatalf("cut off, n1 has guests %v, had %v", now, before["n1"])
		}
		f.machines[0].Heal()
		f.ready()
		f.Eventually(90*time.Second, "no pod is doubled", func() error {
			if n := total(f.guests()); n != pods {
				return fmt.Errorf("%d guests: %v", n, f.guests())
			}
			return nil
		})
		f.WaitReady("app=many", pods)
		same(t)
	})

	t.Run("a machine dies", func(t *testing.T) {
		start := time.Now()
		f.agents[2].Kill()
		f.Eventually(2*time.Minute, "all pods run without n3", func() error { return f.elsewhere("app=many", "n3", pods) })
		t.Logf("node killed → its pods Ready elsewhere: %.1f s", time.Since(start).Seconds())
		now := f.guests()
		for _, n := range []string{"e2e", "n1", "n2"} {
			for id, pid := range before[n] {
				if now[n][id] != pid {
					t.Errorf("a healthy guest on %s was disturbed: %v, were %v", n, now[n], before[n])
				}
			}
		}
	})
}

// elsewhere says whether n Ready pods are on other nodes.
func (f *fleet) elsewhere(selector, node string, n int) error {
	good := 0
	for _, p := range f.Pods(selector) {
		if p.Spec.NodeName != node && cluster.Ready(&p) {
			good++
		}
	}
	if good < n {
		return fmt.Errorf("%d are Ready elsewhere", good)
	}
	return nil
}

// TestRevokedNodeCannotComeBack: not by itself, not with its disk in another
// machine, not with a new join line.
func TestRevokedNodeCannotComeBack(t *testing.T) {
	c := cluster.New(t)
	a := cluster.NewAgent(t, "stolen", nil)
	a.Import("sleep.wasm", cluster.Module(t, "sleep"))
	a.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	c.Eventually(time.Minute, "it is Ready", func() error { return c.NodeReady("stolen") })
	c.Apply(`apiVersion: v1
kind: Secret
metadata: {name: password}
stringData: {password: hunter2}
---
apiVersion: v1
kind: Pod
metadata: {name: user, labels: {app: user}}
spec:
  runtimeClassName: wasm
  nodeName: stolen
  containers:
  - name: main
    image: sleep.wasm
    env: [{name: PASSWORD, valueFrom: {secretKeyRef: {name: password, key: password}}}]
`)
	c.WaitReady("app=user", 1)
	if out := c.Run("node", "revoke", "stolen"); !slices.Contains(strings.Fields(out), "default/password") {
		t.Fatalf("revoke does not name the Secret: %q", out)
	}
	gone := func(what string) {
		t.Helper()
		c.Eventually(time.Minute, what+": not Ready", func() error {
			if c.NodeReady("stolen") == nil {
				return fmt.Errorf("it is Ready")
			}
			return nil
		})
	}
	refused := func(a *cluster.Agent, what, word string) {
		t.Helper()
		c.Eventually(time.Minute, what+": refused", func() error {
			if l := a.Log(); !strings.Contains(l, word) {
				return fmt.Errorf("log %s", l)
			}
			return nil
		})
		if c.NodeReady("stolen") == nil || c.NodeReady("other") == nil {
			t.Fatalf("%s: it is back", what)
		}
	}
	gone("cut off")
	refused(a, "cut off", "bad certificate")
	refused(a, "cut off, in words", "the node was revoked")
	a.Stop(syscall.SIGTERM)
	a.Start()
	c.Eventually(time.Minute, "it starts", func() error { _, err := a.Status(); return err })
	gone("started again")
	if s, err := a.Status(); err != nil || s.Connected {
		t.Fatalf("%+v, %v", s, err)
	}
	a.Stop(syscall.SIGTERM)

	b := cluster.NewAgent(t, "other", nil)
	if out, err := exec.Command("cp", "-a", filepath.Join(a.Dir, "state"), b.Dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	refused(b, "copied disk", "bad certificate")
	b.Stop(syscall.SIGTERM)
	// The key alone, as a new machine would join.
	grants, err := filepath.Glob(filepath.Join(b.Dir, "state", "node", "identity", "grant*"))
	if err != nil || len(grants) == 0 {
		t.Fatal(grants, err)
	}
	for _, g := range grants {
		if err := os.Remove(g); err != nil {
			t.Fatal(err)
		}
	}
	b.Start("--join", strings.TrimSpace(c.Run("token", "create")))
	refused(b, "joins again", "banned")
}
