//go:build bench

package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/test/cluster"
)

// agents is the process of runHollow, seen from the test.
type agents struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.Writer
	mu  sync.Mutex
	now hollowCounts
}

func startAgents(t *testing.T, away, stay int, line string) *agents {
	t.Helper()
	a := &agents{t: t, cmd: exec.Command(os.Args[0])}
	a.cmd.Env = append(os.Environ(), fmt.Sprint(returnAway, "=", away), fmt.Sprint(returnStay, "=", stay), returnLine+"="+line)
	a.cmd.Stderr = os.Stderr
	in, err := a.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := a.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	a.in = in
	done := make(chan struct{})
	go func() {
		defer close(done)
		for sc := bufio.NewScanner(out); sc.Scan(); {
			var c hollowCounts
			if json.Unmarshal(sc.Bytes(), &c) == nil {
				a.mu.Lock()
				a.now = c
				a.mu.Unlock()
			}
		}
	}()
	t.Cleanup(func() {
		_ = in.Close()
		<-done
		_ = a.cmd.Wait()
	})
	return a
}

func (a *agents) counts() hollowCounts {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.now
}

func (a *agents) tell(what string) {
	a.t.Helper()
	if _, err := io.WriteString(a.in, what+"\n"); err != nil {
		a.t.Fatal(err)
	}
}

// slowly polls for what takes minutes on a busy machine, and prints progress.
func slowly(t *testing.T, what string, ok func() (bool, string)) {
	t.Helper()
	start, said := time.Now(), time.Now()
	for {
		done, state := ok()
		if done {
			return
		}
		if time.Since(said) > 10*time.Second {
			said = time.Now()
			t.Logf("%s: %s after %s", what, state, time.Since(start).Round(time.Second))
		}
		if time.Since(start) > 10*time.Minute {
			t.Fatalf("%s: %s", what, state)
		}
		wait(t, 100*time.Millisecond)
	}
}

// mirror follows a resource by list and watch, as an informer does.
type mirror[T any] struct {
	mu   sync.Mutex
	objs map[string]T
}

// follow keeps a mirror until the test ends; key names an object.
func follow[T any](t *testing.T, cl *client.Client, path string, key func(*T) string) *mirror[T] {
	t.Helper()
	m := &mirror[T]{objs: map[string]T{}}
	ctx, cancel := context.WithCancel(context.Background())
	var list struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
		Items []T `json:"items"`
	}
	if err := cl.JSON(ctx, client.Request{Method: http.MethodGet, Path: path}, &list); err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		m.objs[key(&list.Items[i])] = list.Items[i]
	}
	body, err := cl.Do(ctx, client.Request{Method: http.MethodGet, Path: path + "?watch=1&resourceVersion=" + list.Metadata.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for dec := json.NewDecoder(body); ; {
			var e struct {
				Type   string `json:"type"`
				Object T      `json:"object"`
			}
			if err := dec.Decode(&e); err != nil {
				if ctx.Err() == nil {
					t.Errorf("watch of %s: %v", path, err)
				}
				return
			}
			m.mu.Lock()
			if k := key(&e.Object); e.Type == "DELETED" {
				delete(m.objs, k)
			} else {
				m.objs[k] = e.Object
			}
			m.mu.Unlock()
		}
	}()
	t.Cleanup(func() { cancel(); _ = body.Close(); <-done })
	return m
}

func (m *mirror[T]) count(f func(*T) bool) (n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.objs {
		if f(&o) {
			n++
		}
	}
	return n
}

func nodeReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func restarts(p *corev1.Pod) (n int32) {
	for _, s := range p.Status.ContainerStatuses {
		n += s.RestartCount
	}
	return n
}

// client p99 of reads and writes, one of each every 10 ms, until stop.
func pace(t *testing.T, cl *client.Client, stop <-chan struct{}) (reads, writes time.Duration, n int) {
	var all [2][]time.Duration
	do := func(i int, r client.Request) {
		start := time.Now()
		body, err := cl.Do(context.Background(), r)
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = io.Copy(io.Discard, body)
		_ = body.Close()
		all[i] = append(all[i], time.Since(start))
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			for i := range all {
				slices.Sort(all[i])
			}
			n = len(all[0])
			return all[0][n*99/100], all[1][n*99/100], n
		case <-tick.C:
		}
		do(0, client.Request{Method: http.MethodGet, Path: "/api/v1/namespaces/default/configmaps/beside"})
		do(1, client.Request{Method: http.MethodPatch, Path: "/api/v1/namespaces/default/configmaps/beside", ContentType: "application/merge-patch+json",
			Body: fmt.Appendf(nil, `{"data":{"n":"%d"}}`, len(all[1]))})
	}
}

// paced runs pace beside f.
func paced(t *testing.T, cl *client.Client, f func()) (reads, writes time.Duration, n int) {
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		reads, writes, n = pace(t, cl, stop)
	}()
	f()
	close(stop)
	<-done
	return reads, writes, n
}

// fleetReturn is the fleet of TestReturn, its pods Ready, with what was true
// before the cut.
type fleetReturn struct {
	t          *testing.T
	c          *cluster.Cluster
	cl         *client.Client
	a          *agents
	away, stay int
	nodes      *mirror[corev1.Node]
	pods       *mirror[corev1.Pod]
	all, gone  int // pods, and those of them on nodes that are to be cut off

	stays  map[string]bool   // nodes that are not cut off
	places map[string]string // a pod's node, by UID

	quietReads, quietWrites time.Duration
	quietLate               int
}

func newFleetReturn(t *testing.T, away, stay, each int) *fleetReturn {
	t.Helper()
	r := &fleetReturn{t: t, away: away, stay: stay, all: (away + stay) * each, stays: map[string]bool{}, places: map[string]string{}}
	nodes := away + stay
	r.c = cluster.NewControlPlane(t, "--pod-cidr", "10.128.0.0/9", "--pprof")
	r.cl = admin(t, r.c.Kubeconfig())
	r.a = startAgents(t, away, stay, strings.TrimSpace(r.c.Run("token", "create", "--uses", strconv.Itoa(nodes))))
	slowly(t, "agents join", func() (bool, string) { n := r.a.counts(); return n.Joined == nodes, fmt.Sprintf("%+v", n) })
	r.nodes = follow(t, r.cl, "/api/v1/nodes", func(n *corev1.Node) string { return n.Name })
	slowly(t, "nodes are Ready", func() (bool, string) { n := r.nodes.count(nodeReady); return n == nodes, fmt.Sprint(n) })
	r.c.Apply("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: beside}\n---\n" + spread(sleepers(r.all)))
	r.pods = follow(t, r.cl, "/api/v1/namespaces/default/pods", func(p *corev1.Pod) string { return string(p.UID) })
	slowly(t, "pods are Ready", func() (bool, string) { n := r.pods.count(cluster.Ready); return n == r.all, fmt.Sprint(n) })

	r.nodes.count(func(n *corev1.Node) bool { r.stays[n.Name] = n.Labels["bench/stays"] == "true"; return false })
	r.gone = r.pods.count(func(p *corev1.Pod) bool {
		r.places[string(p.UID)] = p.Spec.NodeName
		return !r.stays[p.Spec.NodeName]
	})
	wait(t, 30*time.Second) // the load of all that is over
	from := r.a.counts()
	r.quietReads, r.quietWrites, _ = paced(t, r.cl, func() { wait(t, 20*time.Second) })
	r.quietLate = r.a.counts().Late - from.Late
	return r
}

// cut cuts the agents off until each of their pods has ended twice and runs
// again, and the cluster knows that they are away.
func (r *fleetReturn) cut() {
	r.t.Helper()
	r.a.tell("cut")
	for i, pause := range []time.Duration{10 * time.Second, 15 * time.Second} {
		wait(r.t, pause)
		r.a.tell("end")
		want := r.all + (i+1)*r.gone
		slowly(r.t, "what ended runs again", func() (bool, string) { n := r.a.counts(); return n.Starts == want, fmt.Sprintf("%+v", n) })
	}
	slowly(r.t, "the cluster has noticed", func() (bool, string) { n := r.nodes.count(nodeReady); return n == r.stay, fmt.Sprint(n) })
	wait(r.t, 10*time.Second)
}

// backIn is how long after the return every node was Ready, every status told,
// and every event that waited said.
type backIn struct{ ready, told, said time.Duration }

func (r *fleetReturn) back() (b backIn) {
	r.t.Helper()
	start := time.Now()
	r.a.tell("return")
	profiled(r.t, r.cl)
	slowly(r.t, "everything is back", func() (bool, string) {
		nodes := r.nodes.count(nodeReady)
		pods := r.pods.count(func(p *corev1.Pod) bool {
			return cluster.Ready(p) && (r.stays[p.Spec.NodeName] || restarts(p) == 2)
		})
		now := r.a.counts()
		if b.ready == 0 && nodes == r.away+r.stay {
			b.ready = time.Since(start)
		}
		if b.told == 0 && pods == r.all {
			b.told = time.Since(start)
		}
		if b.ready > 0 && b.told > 0 && now.Connected == r.away && now.Events == 0 {
			b.said = time.Since(start)
		}
		return b.said > 0, fmt.Sprintf("%d nodes, %d pods, %+v", nodes, pods, now)
	})
	wait(r.t, max(10*time.Second-time.Since(start), 0))
	return b
}

func (r *fleetReturn) moved() int {
	return len(r.places) - r.pods.count(func(p *corev1.Pod) bool { return r.places[string(p.UID)] == p.Spec.NodeName })
}

// TestReturn cuts 300 agents off for a while, in which each of their pods ends
// twice and is started again, and lets all of them return within one second:
// what does that cost them and the others?
func TestReturn(t *testing.T) {
	r := newFleetReturn(t, size("DUNLIN_BENCH_RETURN", 300), 20, size("DUNLIN_BENCH_RETURN_PODS", 10))
	cut := time.Now()
	r.cut()
	pid, agentsPID := r.c.Cmd.Process.Pid, r.a.cmd.Process.Pid
	before, fig, cpu, theirs := r.a.counts(), figures(t, r.cl), cpuSeconds(t, pid), cpuSeconds(t, agentsPID)
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0) // the highest RSS counts from now
	rss := statusKB(t, pid, "VmRSS")
	length := time.Since(cut)

	var b backIn
	start := time.Now()
	reads, writes, n := paced(t, r.cl, func() { b = r.back() })
	took := time.Since(start)

	after, end := r.a.counts(), figures(t, r.cl)
	cpu, theirs = cpuSeconds(t, pid)-cpu, cpuSeconds(t, agentsPID)-theirs
	grown := func(name string) float64 { return end[name] - fig[name] }
	commit := grown("dunlin_raft_commit_seconds_sum") / max(grown("dunlin_raft_commit_seconds_count"), 1) * 1000
	ms := func(d time.Duration) float64 { return d.Seconds() * 1000 }
	moved, started := r.moved(), after.Starts-before.Starts

	what := fmt.Sprintf("%d agents, cut off for %.0f s, return within 1 s, %d pods with two restarts each", r.away, length.Seconds(), r.gone)
	row(what, "(none)", fmt.Sprintf("Ready %.1f s, statuses %.1f s, events %.1f s", b.ready.Seconds(), b.told.Seconds(), b.said.Seconds()), noTarget,
		fmt.Sprintf("%.0f Raft entries for %.0f proposals (%d are the client's), %.0f ms each, fsync p99 %.0f ms; %.1f CPU-seconds in %.0f s, the agents %.1f; RSS %d MiB before, highest %d",
			grown("dunlin_raft_entries_total"), grown("dunlin_raft_proposals_total"), n, commit, end["dunlin_disk_sync_p99_seconds"]*1000,
			cpu, took.Seconds(), theirs, rss/1024, statusKB(t, pid, "VmHWM")/1024))
	row("the same: pods moved or started again", "0", fmt.Sprintf("%d moved, %d started", moved, started), held(moved == 0 && started == 0),
		fmt.Sprintf("events that waited: %d; started last: %s", before.Events, after.Last))
	row(fmt.Sprintf("the same: %d agents that stayed", r.stay), "no lease lost", fmt.Sprintf("%d renewals late, %d leases lost", after.Late-before.Late, after.Silent),
		held(after.Silent == 0), fmt.Sprintf("late in 20 quiet seconds: %d", r.quietLate))
	row("the same: p99 of another client's reads and writes", "(none)", fmt.Sprintf("%.1f and %.1f ms, quiet %.1f and %.1f", ms(reads), ms(writes), ms(r.quietReads), ms(r.quietWrites)),
		noTarget, fmt.Sprintf("%d of each; the agents share the cores", n))
}

// profiled keeps profiles of the server from now on, where a folder is named.
func profiled(t *testing.T, cl *client.Client) {
	dir := os.Getenv("DUNLIN_BENCH_PROFILES")
	if dir == "" {
		return
	}
	for name, after := range map[string]time.Duration{"profile?seconds=8": 0, "goroutine?debug=2": 2 * time.Second, "goroutine?debug=1": 4 * time.Second} {
		go func() {
			wait(t, after)
			body, err := cl.Do(context.Background(), client.Request{Method: http.MethodGet, Path: "/debug/pprof/" + name, Accept: "*/*"})
			if err != nil {
				t.Log(err)
				return
			}
			defer func() { _ = body.Close() }()
			b, _ := io.ReadAll(body)
			_ = os.WriteFile(filepath.Join(dir, strings.NewReplacer("?", "-", "=", "").Replace(name)), b, 0o600)
		}()
	}
}
