//go:build bench

package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// figures scrapes the server; series with labels are summed by name.
func figures(t *testing.T, cl *client.Client) map[string]float64 {
	t.Helper()
	body, err := cl.Do(t.Context(), client.Request{Method: http.MethodGet, Path: "/metrics", Accept: "text/plain"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = body.Close() }()
	b, err := io.ReadAll(body)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, value, ok := strings.Cut(strings.TrimSpace(line[max(strings.LastIndexByte(line, '}'), 0):]), " ")
		if i := strings.IndexByte(line, '{'); i >= 0 {
			name = line[:i]
		}
		if v, err := strconv.ParseFloat(value, 64); ok && err == nil {
			out[name] += v
		}
	}
	return out
}

func admin(t *testing.T, kubeconfig string) *client.Client {
	t.Helper()
	cl, err := client.New(kubeconfig, "bench")
	if err != nil {
		t.Fatal(err)
	}
	return cl
}

// version is the store's newest version: it counts every write.
func version(t *testing.T, cl *client.Client) int {
	t.Helper()
	var list struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if err := cl.JSON(t.Context(), client.Request{Method: http.MethodGet, Path: "/api/v1/namespaces"}, &list); err != nil {
		t.Fatal(err)
	}
	n, err := strconv.Atoi(list.Metadata.ResourceVersion)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func deployment(name, image string, replicas int) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: Deployment
metadata: {name: %s, labels: {app: %s}}
spec:
  replicas: %d
  selector: {matchLabels: {app: %s}}
  template:
    metadata: {labels: {app: %s}, annotations: {dunlin.dev/placement: spread}}
    spec:
      runtimeClassName: wasm
      containers: [{name: main, image: %s, resources: {requests: {cpu: 50m, memory: 32Mi}}}]
`, name, name, replicas, name, name, image)
}

// TestRollout counts what a rolling update of 200 pods writes, and how long a
// server that was killed needs until every controller has looked at 10,000
// objects.
func TestRollout(t *testing.T) {
	const nodes, pods, apps, each = 150, 200, 49, 200
	c := cluster.NewControlPlane(t, "--pod-cidr", "10.128.0.0/9")
	cl := admin(t, c.Kubeconfig())
	f := startFleet(t, nodes, strings.TrimSpace(c.Run("token", "create", "--uses", strconv.Itoa(nodes))))
	await(t, c, f, "all nodes connected", func(n counts) bool { return n.Connected == nodes })
	c.Apply(deployment("app", "one.wasm", pods))
	await(t, c, f, "pods running", func(n counts) bool { return n.Running == pods })
	wait(t, 5*time.Second)
	was, from, cpu := figures(t, cl), version(t, cl), cpuSeconds(t, c.Cmd.Process.Pid)
	c.Apply(deployment("app", "two.wasm", pods))
	c.Run("rollout", "status", "deploy/app", "--timeout", "5m")
	await(t, c, f, "old pods gone", func(n counts) bool { return n.Running == pods })
	wait(t, 5*time.Second)
	is, writes := figures(t, cl), version(t, cl)-from
	entries := is["dunlin_raft_entries_total"] - was["dunlin_raft_entries_total"]
	row(fmt.Sprintf("rolling update of %d pods: writes and Raft entries", pods), "(none)",
		fmt.Sprintf("%d writes (%.1f a pod), %.0f entries (%.1f a pod)", writes, float64(writes)/pods, entries, entries/pods), noTarget,
		fmt.Sprintf("%.0f fsyncs, %.0f KiB to disk, %.2f CPU-seconds", is["dunlin_disk_syncs_total"]-was["dunlin_disk_syncs_total"],
			(is["dunlin_disk_written_bytes_total"]-was["dunlin_disk_written_bytes_total"])/1024, cpuSeconds(t, c.Cmd.Process.Pid)-cpu))

	for i := range apps {
		c.Apply(deployment(fmt.Sprintf("more-%d", i), "one.wasm", each))
	}
	await(t, c, f, "more pods running", func(n counts) bool { return n.Running == pods+apps*each })
	c.Kill()
	start := time.Now()
	c.Start()
	answers := time.Since(start)
	cpu = cpuSeconds(t, c.Cmd.Process.Pid)
	var rec float64
	calm := 0
	for took := time.Duration(0); ; took = time.Since(start) {
		is = figures(t, cl)
		now := is["dunlin_controller_reconcile_total"]
		if now > 0 && now == rec && is["dunlin_controller_queue_depth"] == 0 {
			calm++
		} else {
			calm = 0
		}
		rec = now
		if calm == 2 {
			row(fmt.Sprintf("server killed with %d pods, started: all controllers have looked at everything", pods+apps*each), "(none)",
				fmt.Sprintf("%.1f s, the API after %.1f s", took.Seconds(), answers.Seconds()), noTarget,
				fmt.Sprintf("%.0f reconciles, %.1f CPU-seconds since the API; seen by polling every 500 ms, the last two polls are of calm", rec, cpuSeconds(t, c.Cmd.Process.Pid)-cpu))
			break
		}
		if took > 5*time.Minute {
			t.Fatalf("not calm: %v", is)
		}
		wait(t, 500*time.Millisecond)
	}
	if n := figures(t, cl)["dunlin_raft_entries_total"]; n > 1000 {
		t.Errorf("a restart with nothing to do wrote %.0f entries", n)
	}
}

// TestLeaderKilled kills the leading one of three servers: how long until a
// pod that is created then is bound.
func TestLeaderKilled(t *testing.T) {
	c := cluster.NewServers(t, 3)
	a := cluster.NewAgent(t, "worker", nil)
	a.Start("--join", strings.TrimSpace(c.Run(c.Leader(), "token", "create")))
	c.Eventually(time.Minute, "the node is Ready", func() error {
		out, err := c.Try(0, "get", "node", "worker", "-o", "jsonpath={.status.conditions[?(@.type==\"Ready\")].status}")
		if err == nil && out != "True" {
			err = fmt.Errorf("Ready is %q", out)
		}
		return err
	})
	var all []time.Duration
	for i := range 5 {
		old := c.Leader()
		other := (old + 1) % 3
		cl := admin(t, c.Kubeconfig(other))
		pod, err := json.Marshal(map[string]any{
			"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": fmt.Sprintf("p%d", i)},
			"spec": map[string]any{"runtimeClassName": "wasm", "containers": []any{map[string]any{"name": "c", "image": "none.wasm", "imagePullPolicy": "Never"}}},
		})
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		c.List[old].Stop(syscall.SIGKILL)
		made := false
		c.Eventually(time.Minute, "the pod is bound", func() error {
			if !made {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				var p corev1.Pod
				if err := cl.JSON(ctx, client.Request{Method: http.MethodPost, Path: "/api/v1/namespaces/default/pods", ContentType: client.JSON, Body: pod}, &p); err != nil {
					return err
				}
				made = true
			}
			var p corev1.Pod
			if err := cl.JSON(t.Context(), client.Request{Method: http.MethodGet, Path: fmt.Sprintf("/api/v1/namespaces/default/pods/p%d", i)}, &p); err != nil {
				return err
			}
			if p.Spec.NodeName == "" {
				return fmt.Errorf("not bound")
			}
			return nil
		})
		all = append(all, time.Since(start))
		c.List[old].Start()
		c.Eventually(time.Minute, "the server is back", func() error {
			_, err := c.Try(old, "get", "namespace", "kube-system")
			return err
		})
		c.Roles(3, 3)
	}
	slices.Sort(all)
	row("leader of 3 servers killed → the next pod is created and bound", "≤ 3 s", fmt.Sprintf("p50 %.1f s, slowest of %d %.1f s", all[len(all)/2].Seconds(), len(all), all[len(all)-1].Seconds()),
		held(all[len(all)/2] <= 3*time.Second), "election time-out of 1 s or more, by the disk's fsync p99")
}

// lists measures clients that list and watch a full control plane.
func lists(t *testing.T, c *cluster.Cluster, f *fleet, nodes, pods int) {
	t.Helper()
	cl := admin(t, c.Kubeconfig())
	pid := c.Cmd.Process.Pid
	one := func(path string, q url.Values) (bytes int64, took time.Duration) {
		start := time.Now()
		body, err := cl.Do(t.Context(), client.Request{Method: http.MethodGet, Path: path, Query: q})
		if err != nil {
			t.Error(err)
			return 0, 0
		}
		defer func() { _ = body.Close() }()
		bytes, err = io.Copy(io.Discard, body)
		if err != nil {
			t.Error(err)
		}
		return bytes, time.Since(start)
	}
	for _, q := range []struct {
		what string
		url.Values
	}{{"whole", nil}, {"first 500", url.Values{"limit": {"500"}}}} {
		var all []time.Duration
		var size int64
		cpu := cpuSeconds(t, pid)
		for range 7 {
			n, took := one("/api/v1/nodes", q.Values)
			size, all = n, append(all, took)
		}
		slices.Sort(all)
		row(fmt.Sprintf("list of %d nodes (%s), JSON", nodes, q.what), "(none)", fmt.Sprintf("p50 %d ms, %.1f MB, %.2f CPU-seconds each", all[3].Milliseconds(), float64(size)/1e6, (cpuSeconds(t, pid)-cpu)/7), noTarget, "the fleet's leases go on beside it")
	}
	watches(t, cl, nodes)
	storm(t, cl, f, pid, pods)
}

// watches measures from a write to its event.
func watches(t *testing.T, cl *client.Client, nodes int) {
	t.Helper()
	const writes = 20
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events := make(chan string, 100)
	var wg sync.WaitGroup
	wg.Go(func() {
		_ = cl.Watch(ctx, "/api/v1/nodes", url.Values{"resourceVersion": {strconv.Itoa(version(t, cl))}}, client.JSON, func(_ string, o json.RawMessage) (bool, error) {
			var n corev1.Node
			if err := json.Unmarshal(o, &n); err != nil {
				return false, err
			}
			if v := n.Annotations["bench"]; v != "" {
				events <- v
			}
			return true, nil
		})
	})
	wait(t, time.Second)
	var all []time.Duration
	for i := range writes {
		v := strconv.Itoa(i)
		start := time.Now()
		if err := cl.JSON(ctx, client.Request{Method: http.MethodPatch, Path: "/api/v1/nodes/node-00001", ContentType: "application/merge-patch+json",
			Body: []byte(`{"metadata":{"annotations":{"bench":"` + v + `"}}}`)}, &corev1.Node{}); err != nil {
			t.Fatal(err)
		}
		for got := ""; got != v; {
			select {
			case got = <-events:
			case <-time.After(30 * time.Second):
				t.Fatal("no event within 30 s")
			}
		}
		all = append(all, time.Since(start))
	}
	cancel()
	wg.Wait()
	slices.Sort(all)
	row(fmt.Sprintf("patch of one of %d nodes → its event at a watch", nodes), "(none)", fmt.Sprintf("p50 %d ms, slowest of %d %d ms", all[writes/2].Milliseconds(), writes, all[writes-1].Milliseconds()), noTarget, "one fsync in it")
}

// storm is what happens when all informers of a cluster lost their watches:
// each lists all pods, in pages.
func storm(t *testing.T, cl *client.Client, f *fleet, pid, pods int) {
	t.Helper()
	const clients = 10
	before, cpu, start := f.counts(), cpuSeconds(t, pid), time.Now()
	var bytes, refused atomic.Int64
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			n := 0
			for token := ""; ; {
				var list struct {
					Metadata struct {
						Continue string `json:"continue"`
					} `json:"metadata"`
					Items []json.RawMessage `json:"items"`
				}
				q := url.Values{"limit": {"500"}, "resourceVersion": {"0"}}
				if token != "" {
					q = url.Values{"limit": {"500"}, "continue": {token}}
				}
				err := cl.JSON(t.Context(), client.Request{Method: http.MethodGet, Path: "/api/v1/pods", Query: q}, &list)
				if se := (*client.StatusError)(nil); errors.As(err, &se) && se.Status.Code == http.StatusTooManyRequests {
					refused.Add(1)
					wait(t, time.Second)
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				for _, i := range list.Items {
					bytes.Add(int64(len(i)))
				}
				n += len(list.Items)
				if token = list.Metadata.Continue; token == "" {
					break
				}
			}
			if n < pods {
				t.Errorf("a client listed %d pods", n)
			}
		})
	}
	wg.Wait()
	took, after := time.Since(start).Seconds(), f.counts()
	row(fmt.Sprintf("%d clients at once list all %d pods in pages of 500 (relist storm)", clients, pods), "(none)",
		fmt.Sprintf("%.0f s, %.1f CPU-seconds, RSS after it %d MiB", took, cpuSeconds(t, pid)-cpu, statusKB(t, pid, "VmRSS")/1024), noTarget,
		fmt.Sprintf("%.0f MB of JSON, %d times 429; %d leases, %d late, %d connections lost meanwhile", float64(bytes.Load())/1e6, refused.Load(), after.Leases-before.Leases, after.Late-before.Late, after.Lost-before.Lost))
}
