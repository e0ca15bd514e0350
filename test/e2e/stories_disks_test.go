//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// changes creates and deletes ConfigMaps through all servers, and notes what
// was acknowledged: true is one that is there, false one that is gone. What is
// under way is in neither state.
type changes struct {
	c     *cluster.Servers
	mu    sync.Mutex
	acked map[string]bool
	wg    sync.WaitGroup
}

func (w *changes) run(ctx context.Context, prefix string, writers int) {
	for id := range writers {
		w.wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				key, at := fmt.Sprintf("%s-%d-%d", prefix, id, n), (id+n)%len(w.c.List)
				if _, err := w.c.TryIn(at, configMap(key), "apply", "-f", "-"); err == nil {
					w.set(key, true)
				}
				if n%3 == 2 {
					key = fmt.Sprintf("%s-%d-%d", prefix, id, n-1)
					w.mu.Lock()
					delete(w.acked, key)
					w.mu.Unlock()
					if _, err := w.c.Try(at, "delete", "configmap", key); err == nil {
						w.set(key, false)
					}
				}
			}
		})
	}
}

func configMap(name string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %[1]s, labels: {load: \"yes\"}}\ndata: {key: %[1]s}\n", name)
}

func (w *changes) set(key string, there bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.acked[key] = there
}

// check wants all that was acknowledged at server i.
func (w *changes) check(i int, acked map[string]bool) error {
	out, err := w.c.Try(i, "get", "configmaps", "-l", "load=yes", "-o", "json")
	if err != nil {
		return err
	}
	var l corev1.ConfigMapList
	if err := json.Unmarshal([]byte(out), &l); err != nil {
		return err
	}
	there := map[string]string{}
	for _, c := range l.Items {
		there[c.Name] = c.Data["key"]
	}
	var errs []error
	for key, want := range acked {
		got, ok := there[key]
		if ok != want || ok && got != key {
			errs = append(errs, fmt.Errorf("%s: acknowledged as there: %v, is there: %v (%q)", key, want, ok, got))
		}
	}
	return errors.Join(errs...)
}

// TestStory12PowerCut: the power of a whole site is cut in the midst of writes,
// three servers, three nodes and their disk at one moment. Everything starts
// again: nothing that was acknowledged is lost, nothing that was deleted is
// back, and the same pods run, each once.
func TestStory12PowerCut(t *testing.T) {
	for _, i := range cycles(t) {
		t.Run(fmt.Sprint("cycle ", i+1), func(t *testing.T) {
			d := newDisk(t, 1<<30)
			t.Run("s", func(t *testing.T) {
				t.Setenv("TMPDIR", d.dir) // of all folders that are made from here on
				c := newCrew(t, 6)
				w := &changes{c: c.Servers, acked: map[string]bool{}}
				cuts := 1
				if atLength() {
					cuts = 3
				}
				for n := range cuts {
					c.powerCut(d, w, fmt.Sprintf("boot%d-%d", i, n))
				}
			})
		})
	}
}

func (c *crew) powerCut(d *disk, w *changes, boot string) {
	c.t.Helper()
	ctx, cancel := context.WithCancel(c.t.Context())
	defer cancel()
	began := len(w.acked)
	w.run(ctx, boot, 3)
	c.Eventually(time.Minute, "writes are acknowledged", func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if n := len(w.acked) - began; n < 5 {
			return fmt.Errorf("%d", n)
		}
		return nil
	})
	pause(c.t, rand.N(2*time.Second))
	// What was acknowledged before the cut must be there. This machine goes on
	// though its disk does not: what it says from here on does not count.
	w.mu.Lock()
	acked := maps.Clone(w.acked)
	d.cut()
	w.mu.Unlock()
	cancel()
	for _, a := range c.agents {
		a.Kill()
	}
	for _, s := range c.List {
		s.Stop(syscall.SIGKILL)
	}
	w.wg.Wait()
	d.die()
	d.powerOn()
	for _, a := range c.agents {
		_ = exec.Command("ip", "netns", "del", a.NetNS).Run() // as a boot begins
		if err := os.RemoveAll(filepath.Join(a.Dir, "run")); err != nil {
			c.t.Fatal(err)
		}
	}
	start := time.Now()
	for _, s := range c.List {
		if err := os.RemoveAll(filepath.Join(s.Dir, "run")); err != nil {
			c.t.Fatal(err)
		}
		s.Start()
	}
	for _, a := range c.agents {
		a.Start("--machine-boot", boot)
	}
	c.Roles(3, 3)
	for i := range c.List {
		c.Eventually(time.Minute, "what was acknowledged is there", func() error { return w.check(i, acked) })
	}
	w.acked = acked
	c.restAfterBoot()
	uids := map[string]bool{}
	list, err := podsOf(c.Servers, 0, "app=app")
	for _, p := range list {
		uids[string(p.UID)] = true
	}
	if err != nil || !maps.Equal(uids, c.uids) {
		c.t.Errorf("pods %v, were %v (%v)", uids, c.uids, err)
	}
	c.t.Logf("power cut after %d acknowledged changes; all is well %.1f s after the boot", len(acked), time.Since(start).Seconds())
}

// TestStory13FullDisk: a disk is full to its last byte: of a whole node, of a
// follower, of the leader; then it is freed.
func TestStory13FullDisk(t *testing.T) {
	for _, i := range cycles(t) {
		t.Run(fmt.Sprintf("cycle %d, one machine", i+1), fullDisk)
		t.Run(fmt.Sprintf("cycle %d, three servers", i+1), fullDiskOfAServer)
	}
}

// fullDisk: reads, deletions, logs and the collection of garbage go on; a write
// is refused in one line; guests are not disturbed; freed, all heals by itself.
func fullDisk(t *testing.T) {
	d := newDisk(t, 96<<20)
	// A look at the disk while it is full must not hold back pods long after.
	c := cluster.NewAt(t, d.dir, "--eviction-pressure-transition-period", "1s")
	c.Import("sleep.wasm", cluster.Module(t, "sleep"))
	c.Apply(deployment("stays", "sleep.wasm", 3, ""))
	c.Apply(barePod("half-0") + "---\n" + barePod("half-1"))
	for _, name := range []string{"background", "foreground", "orphan"} {
		c.Apply(strings.Replace(deployment(name, "sleep.wasm", 1, ""), "      containers:", "      terminationGracePeriodSeconds: 1\n      containers:", 1))
		c.WaitReady("app="+name, 1)
	}
	c.Apply("{apiVersion: v1, kind: Namespace, metadata: {name: leaves}}")
	c.Apply(strings.Replace(deployment("loses", "sleep.wasm", 2, ""), "      containers:", "      terminationGracePeriodSeconds: 1\n      containers:", 1))
	c.WaitReady("app=stays", 3)
	c.WaitReady("app=half", 2)
	c.WaitReady("app=loses", 2)
	before := c.Pods("app=stays")
	guests := c.HostPIDs()
	free := d.fill()

	c.Run("get", "pods") // reads go on
	c.Run("logs", "deploy/stays")
	late := filepath.Join(t.TempDir(), "late.yaml")
	if err := os.WriteFile(late, []byte(deployment("late", "sleep.wasm", 1, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := c.Try("apply", "-f", late)
	if err == nil || strings.Count(err.Error(), "\n") > 0 || !strings.Contains(err.Error(), "is full") {
		t.Errorf("a write on a full disk says %v", err)
	}
	if out := c.Run("server", "list"); !strings.Contains(out, "False") || !strings.Contains(out, "is full") {
		t.Errorf("servers on a full disk:\n%s", out)
	}
	c.Run("snapshot", "save", filepath.Join(t.TempDir(), "saved"))
	for _, args := range [][]string{
		{"pod", "half-0"}, {"namespace", "leaves"},
		{"deploy", "background", "--cascade=background"}, {"deploy", "foreground", "--cascade=foreground"}, {"deploy", "orphan", "--cascade=orphan"},
	} {
		if out, err := c.Try(append([]string{"delete", "--timeout", "30s"}, args...)...); err != nil {
			t.Errorf("delete on a full disk: %s, %v", out, err)
		}
	}
	// What is left of it is told as it is, though no other pods can be made.
	c.Run("delete", "pod", "-l", "app=loses", "--timeout", "30s")
	c.Eventually(time.Minute, "a Deployment without pods says so", func() error {
		out, err := c.Try("get", "deploy", "loses", "-o", "jsonpath={.status.readyReplicas}/{.status.conditions[?(@.type=='Available')].status}")
		if err != nil || out != "/False" {
			return fmt.Errorf("%q, %v", out, err)
		}
		return nil
	})
	log := func() string {
		b, _ := os.ReadFile(filepath.Join(d.dir, "server.log"))
		return string(b)
	}
	c.Eventually(time.Minute, "the node looks for images that it can do without", func() error {
		if !strings.Contains(log(), "images collected") {
			return errors.New("not yet")
		}
		return nil
	})
	if strings.Contains(log(), "images cannot be collected") {
		t.Errorf("it cannot: %s", log())
	}
	for _, p := range before {
		uid := string(p.UID)
		for id, pid := range guests {
			if strings.HasPrefix(id, uid) && c.HostPIDs()[id] != pid {
				t.Errorf("guest %s of a pod that nobody touched was disturbed", id)
			}
		}
	}
	free()
	c.Eventually(far, "writes are taken again", func() error { _, err := c.Try("apply", "-f", late); return err })
	// The first one may come while the disk still counts as full: it is evicted,
	// and another takes its place.
	c.Run("rollout", "status", "deploy/late", "--timeout", "2m")
	c.Run("delete", "pod", "half-1", "--timeout", "30s")
	for _, p := range c.WaitReady("app=stays", 3) {
		if p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("pod %s was restarted", p.Name)
		}
	}
	if c.Cmd.ProcessState != nil {
		t.Error("the server died")
	}
}

// fullDiskOfAServer: the disk of a follower is full, then that of the leader.
// Reads and deletions go on through every server, and none of them ends; a
// write is taken, or refused with the reason; freed, all heals by itself.
func fullDiskOfAServer(t *testing.T) {
	c := cluster.NewServers(t, 3)
	for _, s := range c.List {
		s.Stop(syscall.SIGTERM)
	}
	disks := make([]*disk, len(c.List))
	for i, s := range c.List {
		disks[i] = newDisk(t, 64<<20)
		disks[i].under(s.Dir)
		s.Start()
	}
	c.Roles(3, 3)
	leader := c.Leader()
	for n, i := range []int{(leader + 1) % 3, leader} {
		for k := range c.List {
			if _, err := c.TryIn(k, configMap(fmt.Sprintf("goes-%d-%d", n, k)), "apply", "-f", "-"); err != nil {
				t.Fatal(err)
			}
		}
		free := disks[i].fill()
		taken := 0
		for k := range c.List {
			_, err := c.TryIn(k, configMap(fmt.Sprintf("late-%d-%d", n, k)), "apply", "-f", "-")
			if err == nil {
				taken++
			} else if !strings.Contains(err.Error(), "is full") {
				t.Errorf("disk of %s is full; a write through %s: %v", c.List[i].Name, c.List[k].Name, err)
			}
			if out, err := c.Try(k, "get", "configmaps", "-l", "load=yes"); err != nil {
				t.Errorf("disk of %s is full; a read through %s: %s, %v", c.List[i].Name, c.List[k].Name, out, err)
			}
			if out, err := c.Try(k, "delete", "configmap", fmt.Sprintf("goes-%d-%d", n, k)); err != nil {
				t.Errorf("disk of %s is full; a deletion through %s: %s, %v", c.List[i].Name, c.List[k].Name, out, err)
			}
		}
		t.Logf("the disk of %s (leader: %v) is full: %d of 3 writes were taken", c.List[i].Name, n == 1, taken)
		if n == 0 && taken != 3 {
			t.Error("the full disk of a follower keeps others from writing")
		}
		free()
		for k := range c.List {
			c.Eventually(far, "writes are taken again", func() error {
				_, err := c.TryIn(k, configMap(fmt.Sprintf("late-%d-%d", n, k)), "apply", "-f", "-")
				return err
			})
		}
		c.Roles(3, 3)
		for k := range c.List {
			c.Eventually(far, "every server has it all", func() error {
				for j := range c.List {
					if _, err := c.Try(k, "get", "configmap", fmt.Sprintf("late-%d-%d", n, j)); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
}
