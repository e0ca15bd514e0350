//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// writer creates ConfigMaps with generated names through a server each, and
// notes what it was told.
type writer struct {
	c  *cluster.Servers
	mu sync.Mutex
	// names by key: what was acknowledged, with the name that it got.
	acked map[string]string
	tried int
}

func (w *writer) run(ctx context.Context, id int) {
	for n := 0; ctx.Err() == nil; n++ {
		key := fmt.Sprintf("w%d-%d", id, n)
		w.mu.Lock()
		w.tried++
		w.mu.Unlock()
		out, err := w.c.TryIn((id+n)%len(w.c.List), fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s, labels: {load: \"yes\"}}\ndata: {key: %s}\n", key, key), "apply", "-f", "-")
		if err == nil && strings.Contains(out, "created") {
			w.mu.Lock()
			w.acked[key] = out
			w.mu.Unlock()
		}
	}
}

// TestLeadersAreKilled: three servers, and a node with pods of a Deployment.
// The leader is killed again and again under writes through all servers: no
// acknowledged write is lost, nothing is made twice, no pod is restarted.
func TestLeadersAreKilled(t *testing.T) {
	rounds := 10
	if testing.Short() {
		rounds = 2
	}
	const pods = 3
	c := cluster.NewServers(t, 3)
	a := cluster.NewAgent(t, "n1", nil)
	a.Import("sleep.wasm", cluster.Module(t, "sleep"))
	a.Start("--join", strings.TrimSpace(c.Run(1, "token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady(2, "n1") })
	if _, err := c.TryIn(2, deployment("app", "sleep.wasm", pods, ""), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	ready := func(i int) error {
		list, err := podsOf(c, i, "app=app")
		good := 0
		for _, p := range list {
			if cluster.Ready(&p) {
				good++
			}
			for _, s := range p.Status.ContainerStatuses {
				if s.RestartCount > 0 {
					t.Fatalf("pod %s was restarted", p.Name)
				}
			}
		}
		if err != nil || good != pods || len(list) != pods {
			return fmt.Errorf("%d of %d pods are Ready, %v", good, len(list), err)
		}
		return nil
	}
	c.Eventually(time.Minute, "the pods are Ready", func() error { return ready(0) })
	guests := a.HostPIDs()

	w := &writer{c: c, acked: map[string]string{}}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for id := range 3 {
		wg.Go(func() { w.run(ctx, id) })
	}
	defer wg.Wait()
	defer cancel()
	var worst time.Duration
	made := map[string]map[types.UID]bool{} // pods that were ever seen, by Deployment
	look := func(i int) {
		list, err := podsOf(c, i, "batch=yes")
		if err != nil {
			return // looked at again
		}
		for _, p := range list {
			app := p.Labels["app"]
			if made[app] == nil {
				made[app] = map[types.UID]bool{}
			}
			made[app][p.UID] = true
		}
	}
	for round := range rounds {
		leader := c.Leader()
		// Its pods are being made while the leader dies.
		d := strings.Replace(deployment(fmt.Sprintf("r%d", round), "sleep.wasm", 2, ""), fmt.Sprintf("labels: {app: r%d}", round), fmt.Sprintf("labels: {app: r%d, batch: \"yes\"}", round), 1)
		if _, err := c.TryIn((leader+1)%3, d, "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
		c.List[leader].Stop(syscall.SIGKILL)
		start := time.Now()
		next := c.Leader()
		// The write that a user would make now.
		c.Eventually(30*time.Second, "a write goes through", func() error {
			_, err := c.TryIn(next, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: round-%d}\n", round), "apply", "-f", "-")
			return err
		})
		worst = max(worst, time.Since(start))
		look(next)
		c.List[leader].Start()
		c.Roles(3, 3)
		if err := c.NodeReady(next, "n1"); err != nil {
			t.Errorf("round %d: the node: %v", round, err)
		}
	}
	cancel()
	wg.Wait()
	c.Eventually(time.Minute, "every Deployment has its pods", func() error {
		list, err := podsOf(c, 0, "batch=yes")
		if err != nil || len(list) != 2*rounds {
			return fmt.Errorf("%d pods, %v", len(list), err)
		}
		return nil
	})
	look(0)
	for app, uids := range made {
		if len(uids) != 2 {
			t.Errorf("Deployment %s had %d pods in all, and wants 2", app, len(uids))
		}
	}
	if len(made) != rounds {
		t.Errorf("pods of %d Deployments, of %d", len(made), rounds)
	}
	now := a.HostPIDs()
	for id, pid := range guests {
		if now[id] != pid {
			t.Errorf("guests %v, were %v", now, guests)
		}
	}
	for i := range c.List {
		out := c.Run(i, "get", "configmaps", "-l", "load=yes", "-o", "json")
		var list corev1.ConfigMapList
		if err := json.Unmarshal([]byte(out), &list); err != nil {
			t.Fatal(err)
		}
		have := map[string]int{}
		for _, cm := range list.Items {
			have[cm.Data["key"]]++
		}
		for key := range w.acked {
			if have[key] != 1 {
				t.Errorf("server %d: %s was acknowledged and is there %d times", i, key, have[key])
			}
		}
		c.Eventually(time.Minute, "the pods are Ready", func() error { return ready(i) })
	}
	t.Logf("%d of %d writes acknowledged, killed %d leaders; leader killed → next write made: %.1f s at worst", len(w.acked), w.tried, rounds, worst.Seconds())
	if len(w.acked) < 3*rounds {
		t.Errorf("only %d writes were acknowledged", len(w.acked))
	}
}

func podsOf(c *cluster.Servers, i int, selector string) ([]corev1.Pod, error) {
	var l corev1.PodList
	err := c.Get(i, "/api/v1/namespaces/default/pods?labelSelector="+url.QueryEscape(selector), &l)
	return l.Items, err
}

// TestQuorumLost: two of three servers stop. Writes are refused with the
// reason, reads go on with a warning, guests run on; the two come back, and
// all is as before.
func TestQuorumLost(t *testing.T) {
	c := cluster.NewServers(t, 3)
	a := cluster.NewAgent(t, "n1", nil)
	a.Import("sleep.wasm", cluster.Module(t, "sleep"))
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady(0, "n1") })
	if _, err := c.TryIn(0, deployment("app", "sleep.wasm", 2, ""), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	running := func() error {
		if list, err := podsOf(c, 0, "app=app"); err != nil || len(list) != 2 || !cluster.Ready(&list[0]) || !cluster.Ready(&list[1]) {
			return fmt.Errorf("%d pods, %v", len(list), err)
		}
		return nil
	}
	c.Eventually(time.Minute, "the pods are Ready", running)
	guests := a.HostPIDs()
	c.List[1].Stop(syscall.SIGKILL)
	c.List[2].Stop(syscall.SIGKILL)
	c.Eventually(30*time.Second, "reads come with a warning", func() error {
		out, err := c.Warnings(0, "get", "pods")
		if err != nil {
			return err
		}
		if !strings.Contains(out, "Warning:") || !strings.Contains(out, "may be out of date") {
			return fmt.Errorf("%q", out)
		}
		return nil
	})
	_, err := c.TryIn(0, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: never}\n", "apply", "-f", "-")
	if err == nil || !strings.Contains(err.Error(), "quorum") {
		t.Errorf("a write without a quorum: %v", err)
	}
	if out, err := c.Warnings(0, "server", "list"); err != nil || !strings.Contains(out, "no server leads") {
		t.Errorf("the list does not say it: %q, %v", out, err)
	}
	pause(t, 7*time.Second) // longer than a lease
	if now := a.HostPIDs(); !maps.Equal(now, guests) || len(now) != 2 {
		t.Errorf("guests %v, were %v", now, guests)
	}
	c.List[1].Start()
	c.List[2].Start()
	c.Roles(3, 3)
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady(0, "n1") })
	c.Eventually(time.Minute, "the pods are Ready", running)
	if now := a.HostPIDs(); !maps.Equal(now, guests) {
		t.Errorf("guests %v, were %v", now, guests)
	}
	if _, err := c.Try(0, "get", "configmap", "never"); err == nil {
		t.Error("a refused write was made after all")
	}
}

// TestStory15MostServersLost: two of three servers are lost for good; the third
// goes on alone with state and trust, nodes come back and their guests run on;
// the lost ones are shut out when they return, and join anew. Then a snapshot
// takes the state back.
func TestStory15MostServersLost(t *testing.T) {
	c := cluster.NewServers(t, 3)
	a := cluster.NewAgent(t, "n1", nil)
	a.Import("sleep.wasm", cluster.Module(t, "sleep"))
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady(0, "n1") })
	if _, err := c.TryIn(0, deployment("app", "sleep.wasm", 2, "")+"---\napiVersion: v1\nkind: Secret\nmetadata: {name: s}\nstringData: {k: hunter2}\n", "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	running := func() error {
		list, err := podsOf(c, 0, "app=app")
		if err != nil || len(list) != 2 || !cluster.Ready(&list[0]) || !cluster.Ready(&list[1]) {
			return fmt.Errorf("%d pods, %v", len(list), err)
		}
		return nil
	}
	c.Eventually(time.Minute, "the pods are Ready", running)
	guests := a.HostPIDs()
	file := filepath.Join(t.TempDir(), "saved")
	c.Run(0, "snapshot", "save", file)
	if out := c.Run(0, "snapshot", "verify", file); !strings.Contains(out, "good: cluster") {
		t.Errorf("verify: %s", out)
	}
	state := []string{"--state-dir", filepath.Join(c.List[0].Dir, "state")}
	if _, err := c.Try(0, append([]string{"server", "recover", "--yes"}, state...)...); err == nil || !strings.Contains(err.Error(), "the server is running") {
		t.Errorf("recover a server that runs: %v", err)
	}
	for _, s := range c.List {
		s.Stop(syscall.SIGKILL)
	}
	if _, err := c.Try(0, append([]string{"server", "recover"}, state...)...); err == nil || !strings.Contains(err.Error(), "--yes") {
		t.Errorf("recover without --yes: %v", err)
	}
	c.Run(0, append([]string{"server", "recover", "--yes"}, state...)...)
	c.List[0].Start()
	c.Roles(1, 1)
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady(0, "n1") })
	c.Eventually(time.Minute, "the pods are Ready", running)
	same := func(what string) {
		t.Helper()
		if now := a.HostPIDs(); !maps.Equal(now, guests) {
			t.Errorf("%s: guests %v, were %v", what, now, guests)
		}
	}
	same("recovered")
	if out := c.Run(0, "get", "secret", "s", "-o", "json"); !strings.Contains(out, "aHVudGVyMg==") {
		t.Errorf("a Secret cannot be read: %s", out)
	}
	for _, s := range c.List[1:] { // both: they would be a quorum of their own
		s.Start()
	}
	for _, s := range c.List[1:] {
		if err := s.Cmd.Wait(); err == nil {
			t.Errorf("%s ended well", s.Name)
		}
		if !strings.Contains(s.Log(), "from before a recovery of the cluster") {
			t.Errorf("%s does not say why it ended", s.Name)
		}
	}
	c.Roles(1, 1)
	for _, s := range c.List[1:] {
		if err := os.RemoveAll(filepath.Join(s.Dir, "state")); err != nil {
			t.Fatal(err)
		}
		s.Rejoin(strings.TrimSpace(c.Run(0, "token", "create", "--server")))
	}
	c.Roles(3, 3)

	if _, err := c.TryIn(1, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: late}\n", "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	for _, s := range c.List {
		s.Stop(syscall.SIGTERM)
	}
	c.Run(0, append([]string{"snapshot", "restore", file, "--yes"}, state...)...)
	c.List[0].Start()
	c.Roles(1, 1)
	if _, err := c.Try(0, "get", "configmap", "late"); err == nil {
		t.Error("what was made after the snapshot is there")
	}
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady(0, "n1") })
	c.Eventually(time.Minute, "the pods are Ready", running)
	same("restored")
}

// TestServersIdleAndMove: three idle servers write nothing to their disks;
// then all change their addresses at once, each told of one other.
func TestServersIdleAndMove(t *testing.T) {
	c := cluster.NewServers(t, 3)
	pause(t, 6*time.Second) // until the last vote and seed is written
	written := func() (n uint64) {
		for _, s := range c.List {
			n += s.IO(t)
		}
		return n
	}
	idle := 20 * time.Second
	if testing.Short() {
		idle = 5 * time.Second
	}
	before, cpu := written(), c.CPU(t)
	pause(t, idle)
	if n := written() - before; n != 0 {
		t.Errorf("three idle servers wrote %d bytes in %s", n, idle)
	}
	t.Logf("three idle servers: %.2f %% of a core each", (c.CPU(t)-cpu).Seconds()/idle.Seconds()/3*100)

	for _, s := range c.List {
		s.Stop(syscall.SIGKILL)
		host, port, err := net.SplitHostPort(s.Address)
		if err != nil {
			t.Fatal(err)
		}
		n, _ := strconv.Atoi(port)
		s.Address = net.JoinHostPort(host, strconv.Itoa(n+100))
	}
	for i, s := range c.List {
		s.Start("--peers", c.List[(i+1)%3].Address)
	}
	c.Roles(3, 3)
	for i := range c.List {
		if _, err := c.TryIn(i, fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: moved-%d}\n", i), "apply", "-f", "-"); err != nil {
			t.Error(err)
		}
	}
	c.Eventually(30*time.Second, "the list has the new addresses", func() error {
		out, err := c.Try(1, "server", "list")
		for _, s := range c.List {
			if !strings.Contains(out, s.Address) {
				return fmt.Errorf("%s is not in %s, %v", s.Address, out, err)
			}
		}
		return err
	})
	if testing.Short() {
		return // the addresses are in the list; that they are used again takes another 10 s
	}
	for _, s := range c.List {
		s.Stop(syscall.SIGTERM)
	}
	for _, s := range c.List {
		s.Start()
	}
	c.Roles(3, 3)
}

// TestEveryServerIsReplaced: a node joined by way of the first server; then
// all three are removed, one after the other, and others take their places.
// The node follows, also after a restart, and its guest runs on.
func TestEveryServerIsReplaced(t *testing.T) {
	c := cluster.NewServers(t, 3)
	a := cluster.NewAgent(t, "n1", nil)
	a.Import("sleep.wasm", cluster.Module(t, "sleep"))
	a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error { return c.NodeReady(0, "n1") })
	if _, err := c.TryIn(0, deployment("app", "sleep.wasm", 1, ""), "apply", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	c.Eventually(time.Minute, "the pod runs", func() error {
		if n := len(a.HostPIDs()); n != 1 {
			return fmt.Errorf("%d guests", n)
		}
		return nil
	})
	guests := a.HostPIDs()
	for i := range 3 {
		c.Add(i)
		c.Roles(3, 4) // a fourth has no vote
		// The last one is dead when it is removed.
		if i == 2 {
			c.List[i].Stop(syscall.SIGKILL)
		}
		c.Run(i+1, "server", "remove", c.List[i].Name)
		if i != 2 {
			if err := c.List[i].Cmd.Wait(); err == nil || !strings.Contains(c.List[i].Log(), "was removed from the cluster") {
				t.Errorf("%s ended with %v and does not say why", c.List[i].Name, err)
			}
		}
		c.Roles(3, 3)
		c.Eventually(30*time.Second, "the node is Ready", func() error { return c.NodeReady(i+1, "n1") })
		c.Eventually(30*time.Second, "the node knows the servers that there are", func() error {
			s, err := a.Status()
			if err != nil || !s.Connected || len(s.Servers) != 3 || !slices.Contains(s.Servers, c.List[i+3].Address) {
				return fmt.Errorf("%+v, %v", s, err)
			}
			return nil
		})
	}
	c.Eventually(time.Minute, "nobody looks for those that were removed", func() error {
		out, err := c.Try(3, "net", "check")
		for _, old := range c.List[:3] {
			if strings.Contains(out, old.Address) {
				return fmt.Errorf("%s, %w", out, err)
			}
		}
		return nil
	})
	a.Stop(syscall.SIGKILL)
	a.Start()
	c.Eventually(time.Minute, "the node is connected", func() error {
		if s, err := a.Status(); err != nil || !s.Connected {
			return fmt.Errorf("%+v, %v", s, err)
		}
		return nil
	})
	if now := a.HostPIDs(); !maps.Equal(now, guests) {
		t.Errorf("guests %v, were %v", now, guests)
	}
}
