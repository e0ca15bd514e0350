package sim

import (
	"crypto/sha256"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dunlin-project/dunlin/controlplane/consensus"
)

var (
	seedCount = flag.Int("seeds", 12, "how many seeds TestSeeds runs, beside those that failed once")
	seedFirst = flag.Uint64("first", 1, "the first of them")
	oneSeed   = flag.Uint64("seed", 0, "run this seed alone")
	servers   = flag.Int("servers", 1, "with -seed: how many servers its world has")
	jobFile   = flag.String("job", "", "a file that keeps which seeds passed, so that a long job goes on where it was; \"\" is none")
	cutFor    = flag.Duration("cut", 6*time.Hour, "how long TestLongCut cuts the link")
	again     = flag.Int("again", 50, "how often a seed that failed is run again")
)

// result of one run.
type result struct {
	violations, trace []string
	converged         time.Duration
	virtual           time.Duration
	acked             uint64 // version of the state at the end
}

// runSeed runs one seed in a bubble of its own.
func runSeed(t *testing.T, r run) (res result) {
	t.Helper()
	pulse := &pulse{}
	defer pulse.watch(r.String())()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		w, err := newWorld(r.size(), r.seed, pulse)
		if err != nil {
			t.Fatalf("%s: %v", r, err)
		}
		defer w.within(longest, func(what string) { pulse.stacks(); panic(fmt.Sprintf("sim: %s %s", r, what)) })()
		p := newPlan(r.seed, r.size())
		res.converged = p.run(w)
		w.idle(2 * time.Minute)
		res.acked = w.finish()
		res.violations, res.trace = w.verdict()
		res.virtual = time.Since(start)
	})
	return res
}

// longest is how much virtual time a seed may take. What it waits for has
// bounds of its own, which sum up to an hour; this one is for what waits for
// something that never comes.
const longest = 90 * time.Minute

// within calls over, with the end of the trace, when so much of the world's
// time is over before stop is called.
func (w *world) within(d time.Duration, over func(what string)) (stop func()) {
	t := time.AfterFunc(d, func() {
		_, lines := w.verdict()
		over(fmt.Sprintf("did not end within %s of virtual time; its trace ends with\n%s", d, strings.Join(lines[max(len(lines)-200, 0):], "\n")))
	})
	return func() { t.Stop() }
}

// A seed that never ends is said to, with its trace; one that ends is not.
func TestSeedsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var said []string
		w := &world{began: time.Now()}
		w.say("its last word")
		w.within(time.Minute, func(what string) { said = append(said, what) })()
		sleep(2 * time.Minute)
		synctest.Wait()
		if len(said) > 0 {
			t.Errorf("a world that ended in time: %q", said)
		}
		stop := w.within(time.Minute, func(what string) { said = append(said, what) })
		defer stop()
		sleep(2 * time.Minute)
		synctest.Wait()
		if len(said) != 1 || !strings.Contains(said[0], "did not end within 1m0s") || !strings.Contains(said[0], "its last word") {
			t.Errorf("a world that never ends: %q", said)
		}
	})
}

// sleep lets virtual time pass; everything here runs in a bubble.
func sleep(d time.Duration) {
	time.Sleep(d)
}

// idle checks that a cluster at rest writes nothing.
func (w *world) idle(d time.Duration) {
	srv := w.leading()
	if srv == nil {
		return // said already
	}
	time.Sleep(10 * time.Second)
	// A budget gives back by itself what an eviction took that did not get to
	// its pod; it is not at rest before.
	for end := time.Now().Add(3 * time.Minute); awaitsEviction(srv) && time.Now().Before(end); {
		time.Sleep(time.Second)
	}
	before := srv.Consensus().State().Snapshot().ResourceVersion()
	var writes []uint64
	for _, h := range w.hosts {
		writes = append(writes, h.disk.Writes())
	}
	time.Sleep(d)
	if after := srv.Consensus().State().Snapshot().ResourceVersion(); after != before {
		w.violated("%d writes in %s at rest", after-before, d)
	}
	for i, h := range w.hosts {
		if n := h.disk.Writes() - writes[i]; n > 0 {
			w.violated("%s: %d writes to its disk in %s at rest", h.name, n, d)
		}
	}
}

// finish ends the world and compares every server's disk with what it had in
// memory, and the servers with each other.
func (w *world) finish() uint64 {
	type last struct {
		rv   uint64
		hash [sha256.Size]byte
	}
	var lasts []last
	for _, s := range w.servers {
		if srv := s.now(); srv != nil {
			m := srv.Consensus().State()
			h, err := m.Hash()
			if err != nil {
				w.violated("%s: %v", s.name(), err)
			}
			lasts = append(lasts, last{m.Snapshot().ResourceVersion(), h})
		}
	}
	for _, l := range lasts {
		if l != lasts[0] {
			w.violated("replicas differ: %v", lasts)
		}
	}
	for _, h := range w.hosts {
		h.crash()
	}
	for i, s := range w.servers {
		s.crash()
		if len(w.servers) > 1 || i >= len(lasts) {
			continue // alone, none of several can lead
		}
		s.setFault(nil)
		n, err := consensus.Open(w.ctx, consensus.Config{Dir: filepath.Join(s.dir, "raft"), Log: w.logger("reopened"), ReserveBytes: -1, SegmentBytes: 64 << 10})
		if err != nil {
			w.violated("%s: its state does not open again: %v", s.name(), err)
			continue
		}
		if _, err := n.WaitLeading(w.ctx); err != nil {
			w.violated("%s: %v", s.name(), err)
		}
		if h, err := n.State().Hash(); err != nil || h != lasts[i].hash {
			w.violated("%s: what is on its disk is not what it had in memory (%v)", s.name(), err)
		}
		if err := n.Close(); err != nil {
			w.violated("%s: %v", s.name(), err)
		}
	}
	w.close()
	if len(lasts) == 0 {
		return 0
	}
	return lasts[0].rv
}

// TestSeeds runs many worlds. A seed that fails is run again, often, since a
// seed does not fix how goroutines are interleaved; its trace is printed.
func TestSeeds(t *testing.T) {
	todo := chosen(t)
	j, err := openJob(*jobFile)
	must(t, err)
	t.Run("all", func(t *testing.T) {
		for _, r := range todo {
			if j.has(r) {
				continue
			}
			t.Run(r.String(), func(t *testing.T) {
				t.Parallel()
				res := runSeed(t, r)
				j.ran(r, res)
				if len(res.violations) > 0 {
					report(t, r, res)
				}
			})
		}
	})
	j.finish()
}

// run is a seed and the size of its world.
type run struct {
	servers int
	seed    uint64
}

func (r run) String() string { return fmt.Sprintf("%d-%d", r.servers, r.seed) }

func (r run) size() size { return size{servers: r.servers, nodes: 5} }

// chosen are the runs that the flags ask for: those that failed once, and of
// the rest every third with three servers.
func chosen(t *testing.T) []run {
	if *oneSeed != 0 {
		return []run{{*servers, *oneSeed}}
	}
	runs, count := regressions(t), *seedCount
	if raced {
		runs, count = runs[:min(len(runs), 2)], min(count, 3)
	}
	for i := range uint64(count) {
		r := run{1, *seedFirst + i}
		if r.seed%3 == 0 {
			r.servers = 3
		}
		if !slices.Contains(runs, r) {
			runs = append(runs, r)
		}
	}
	return runs
}

// report prints a failed seed and runs it again.
func report(t *testing.T, r run, res result) {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "sim: trace of %s\n", r)
	for _, l := range res.trace {
		fmt.Fprintln(&b, l)
	}
	fmt.Print(b.String())
	for _, v := range res.violations {
		t.Errorf("%s: %s", r, v)
	}
	failed := 0
	for range *again {
		if len(runSeed(t, r).violations) > 0 {
			failed++
		}
	}
	t.Errorf("%s failed; run again %d times it failed %d times (go test ./test/sim -run TestSeeds -servers %d -seed %d)", r, *again, failed, r.servers, r.seed)
}

// regressions are the seeds that failed once.
func regressions(t *testing.T) (runs []run) {
	t.Helper()
	b, err := os.ReadFile("testdata/regressions.json")
	must(t, err)
	var list []struct {
		Servers int
		Seed    uint64
		Found   string
	}
	must(t, json.Unmarshal(b, &list))
	for _, e := range list {
		runs = append(runs, run{e.Servers, e.Seed})
	}
	return runs
}
