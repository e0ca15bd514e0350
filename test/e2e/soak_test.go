//go:build e2e

package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/node/proxy"
	"github.com/dunlin-project/dunlin/test/cluster"
)

const (
	soakClients = 200
	soakPace    = 500 * time.Millisecond // between two requests of one client
)

// soakJob is what a soak has done; with a file it outlives the process, and
// the next one of the same build goes on from there.
type soakJob struct {
	Build    string
	Spent    time.Duration
	Rollouts int
	Requests int64
	Failed   []string
	path     string
	wanted   time.Duration
}

// openSoak reads how long the soak shall be (DUNLIN_SOAK, a minute otherwise)
// and what of it was done (the file of DUNLIN_SOAK_JOB).
func openSoak(t *testing.T) *soakJob {
	t.Helper()
	j := &soakJob{path: os.Getenv("DUNLIN_SOAK_JOB"), wanted: time.Minute}
	if s := os.Getenv("DUNLIN_SOAK"); s != "" {
		d, err := time.ParseDuration(s)
		if err != nil {
			t.Fatal(err)
		}
		j.wanted = d
	} else if testing.Short() {
		t.Skip("SKIPPED: long; make soak")
	}
	h := sha256.New()
	for _, name := range []string{"dunlin", "dunlin-proxy"} {
		f, err := os.Open(filepath.Join(filepath.Dir(cluster.Binary(t)), name))
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.Copy(h, f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	j.Build = hex.EncodeToString(h.Sum(nil)[:16])
	if b, err := os.ReadFile(j.path); err == nil {
		var old soakJob
		if json.Unmarshal(b, &old) == nil && old.Build == j.Build && old.Spent < j.wanted {
			old.path, old.wanted = j.path, j.wanted
			*j = old
			t.Logf("%s of %s are done: %d rollouts, %d requests, %d failed", j.Spent.Round(time.Second), j.wanted, j.Rollouts, j.Requests, len(j.Failed))
		}
	}
	return j
}

func (j *soakJob) save(t *testing.T) {
	t.Helper()
	if j.path == "" {
		return
	}
	b, err := json.Marshal(j)
	if err == nil {
		err = os.WriteFile(j.path, b, 0o600)
	}
	if err != nil {
		t.Error(err)
	}
}

// held is what one process holds: what a leak would make more of.
type held struct{ Files, Goroutines, Addresses, KiB int }

// TestSoak rolls a Deployment over and over under constant load on connections
// that are kept, through a node port of one node, to pods of all: no request
// may fail, and at the end no process may hold more than after the first
// rollouts.
func TestSoak(t *testing.T) {
	j := openSoak(t)
	f := newFleet(t, 2)
	f.importHello()
	f.Apply(drainingHello("1") + "---\n" + helloService)
	f.Run("rollout", "status", "deployment", "hello", "--timeout", "3m")
	_, port := clusterIP(t, f.Cluster, "hello")
	u := fmt.Sprintf("http://%s:%d/", f.machines[0].IP, port)
	f.Eventually(time.Minute, "the node port answers", func() error { _, err := get(u); return err })
	cl, err := client.New(f.Kubeconfig(), "soak")
	if err != nil {
		t.Fatal(err)
	}
	version := 1
	roll := func() {
		version += 2 // 2 is never ready
		f.Apply(drainingHello(strconv.Itoa(version)))
		f.Run("rollout", "status", "deployment", "hello", "--timeout", "5m")
		f.Eventually(3*time.Minute, "old pods are gone", func() error {
			if n := len(f.Pods("app=hello")); n != 3 {
				return fmt.Errorf("%d pods", n)
			}
			return nil
		})
	}
	// What grows once, grows now: the same load, and two rollouts.
	l := newPacedLoad(u, soakClients, soakPace)
	roll()
	roll()
	if done, failed := l.stop(); len(failed) > 0 {
		t.Fatalf("at first: %d of %d requests failed: %v", len(failed), done, failed[:min(5, len(failed))])
	}
	before := f.holds(cl)
	for j.Spent < j.wanted {
		start := time.Now()
		l := newPacedLoad(u, soakClients, soakPace)
		for range 3 {
			roll()
			j.Rollouts++
		}
		done, failed := l.stop()
		j.Requests += done
		j.Failed = append(j.Failed, failed...)
		j.Spent += time.Since(start)
		j.save(t)
		t.Logf("%s: %d rollouts, %d requests, %d failed", j.Spent.Round(time.Second), j.Rollouts, j.Requests, len(j.Failed))
	}
	if len(j.Failed) > 0 {
		t.Errorf("%d of %d requests failed: %v", len(j.Failed), j.Requests, j.Failed[:min(10, len(j.Failed))])
	}
	f.leaks(before, cl)
	t.Logf("%d rolling restarts of 3 pods on 3 nodes in %s under %d kept connections: %d requests, %d failed", j.Rollouts, j.Spent.Round(time.Second), soakClients, j.Requests, len(j.Failed))
}

// leaks compares once what is on its way has ended.
func (f *fleet) leaks(before map[string]held, cl *client.Client) {
	f.t.Helper()
	var after map[string]held
	var grown []string
	f.Eventually(2*time.Minute, "everything is as it was", func() error {
		after, grown = f.holds(cl), nil
		for name, b := range before {
			// Connections and workers come and go; memory is what a collector
			// left. What leaks with every rollout or request is far more. A
			// server fills its watch ring (32 MiB), its cache of objects (24) and
			// its Events (16, and 8 for their watches), and the collector lets
			// half as much lie.
			a, room := after[name], 16<<10
			if name == "server" {
				room += (32 + 24 + 16 + 8) * 3 / 2 << 10
			}
			if a.Files > b.Files+16 || a.Goroutines > b.Goroutines+32 || a.Addresses > b.Addresses || a.KiB > b.KiB*5/4+room {
				grown = append(grown, fmt.Sprintf("%s: %+v, was %+v", name, a, b))
			}
		}
		if len(grown) > 0 {
			return errors.New(strings.Join(grown, "; "))
		}
		return nil
	})
	names := make([]string, 0, len(before))
	for name := range before {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		f.t.Logf("%s: files %d → %d, goroutines %d → %d, addresses %d → %d, PSS %.1f → %.1f MiB", name, before[name].Files, after[name].Files, before[name].Goroutines, after[name].Goroutines,
			before[name].Addresses, after[name].Addresses, float64(before[name].KiB)/1024, float64(after[name].KiB)/1024)
	}
}

// holds asks every process, once no connection of a client is left.
func (f *fleet) holds(cl *client.Client) map[string]held {
	f.t.Helper()
	out := map[string]held{}
	dirs := map[string]string{"e2e": f.Dir, "n1": f.agents[0].Dir, "n2": f.agents[1].Dir}
	netns := map[string]string{"e2e": f.NetNS, "n1": f.agents[0].NetNS, "n2": f.agents[1].NetNS}
	for node, dir := range dirs {
		f.Eventually(time.Minute, "no connection is left at the proxy of "+node, func() error {
			st, err := proxy.Ask(filepath.Join(dir, "run", "proxy"))
			if err != nil {
				return err
			}
			if st.Connections != 0 {
				return fmt.Errorf("%d", st.Connections)
			}
			h := holding(f.t, st.PID)
			h.Goroutines = st.Goroutines
			addrs, err := exec.Command("ip", "-n", netns[node], "-o", "addr").Output()
			h.Addresses = strings.Count(string(addrs), "\n")
			out["proxy of "+node] = h
			return err
		})
	}
	for i, a := range f.agents {
		h := holding(f.t, a.Cmd.Process.Pid)
		h.Goroutines = goroutines(f.t, func() (string, error) { return overSocket(filepath.Join(a.Dir, "run", "agent.sock"), "/metrics") })
		out[fmt.Sprintf("agent n%d", i+1)] = h
	}
	h := holding(f.t, f.Cmd.Process.Pid)
	h.Goroutines = goroutines(f.t, func() (string, error) {
		body, err := cl.Do(f.t.Context(), client.Request{Method: http.MethodGet, Path: "/metrics", Accept: "text/plain"})
		if err != nil {
			return "", err
		}
		defer func() { _ = body.Close() }()
		b, err := io.ReadAll(body)
		return string(b), err
	})
	out["server"] = h
	return out
}

func goroutines(t *testing.T, metrics func() (string, error)) int {
	t.Helper()
	text, err := metrics()
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(text, "\ngo_goroutines ")
	n, err := strconv.ParseFloat(strings.Fields(rest + " none")[0], 64)
	if err != nil {
		t.Fatal("no go_goroutines in the figures")
	}
	return int(n)
}

// holding reads what the kernel knows of a process.
func holding(t *testing.T, pid int) (h held) {
	t.Helper()
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	h.Files = len(files)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			h.KiB, _ = strconv.Atoi(strings.Fields(rest)[0])
		}
	}
	return h
}
