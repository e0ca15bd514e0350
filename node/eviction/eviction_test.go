package eviction

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"pgregory.net/rapid"
)

func TestFlags(t *testing.T) {
	c, err := Flags{
		Hard: "memory.available<64Mi, nodefs.available<5%", Soft: "memory.available<20%,pid.available<100",
		SoftGrace: "memory.available=1m30s,pid.available=10s", MinReclaim: "memory.available=16Mi,nodefs.available=500Mi",
	}.Parse()
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, th := range c.Thresholds {
		got += fmt.Sprintf("%s %+v %v %s %+v\n", th.Signal, th.Value, th.Soft, th.Grace, th.MinReclaim)
	}
	want := `memory.available {Amount:67108864 Percent:0 Most:0} false 0s {Amount:16777216 Percent:0 Most:0}
nodefs.available {Amount:0 Percent:5 Most:0} false 0s {Amount:524288000 Percent:0 Most:0}
nodefs.inodesFree {Amount:0 Percent:5 Most:0} false 0s {Amount:0 Percent:0 Most:0}
pid.available {Amount:0 Percent:5 Most:1000} false 0s {Amount:0 Percent:0 Most:0}
memory.available {Amount:0 Percent:20 Most:0} true 1m30s {Amount:16777216 Percent:0 Most:0}
pid.available {Amount:100 Percent:0 Most:0} true 10s {Amount:0 Percent:0 Most:0}
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	for flags, says := range map[Flags]string{
		{Hard: "memory.available>1Mi"}:                                  "--eviction-hard: \"memory.available>1Mi\": want signal<value",
		{Hard: "memory.free<1Mi"}:                                       "--eviction-hard: no signal \"memory.free\": there are [memory.available",
		{Hard: "memory.available<1Mi,memory.available<2Mi"}:             "given twice",
		{Hard: "memory.available<101%"}:                                 "no percentage",
		{Hard: "memory.available<NaN%"}:                                 "no percentage",
		{Hard: "memory.available<-1Mi"}:                                 "must not be negative",
		{Hard: "memory.available<much"}:                                 "no quantity",
		{Soft: "memory.available<1Mi"}:                                  "needs a time",
		{Soft: "memory.available<1Mi", SoftGrace: "memory.available=x"}: "--eviction-soft-grace-period: memory.available: ",
		{SoftGrace: "memory.available=1m"}:                              "has no soft threshold",
		{MinReclaim: "memory.available<1Mi"}:                            "want signal=value",
		{MaxPodGrace: -1}:                                               "--eviction-max-pod-grace-period=-1ns",
	} {
		if _, err := flags.Parse(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%+v: %v, want %q", flags, err, says)
		}
	}
}

// TestMinimumReclaim: a shortage is over only with so much more.
func TestMinimumReclaim(t *testing.T) {
	c, err := Flags{Hard: "memory.available<100", MinReclaim: "memory.available=50"}.Parse()
	if err != nil {
		t.Fatal(err)
	}
	tr, now := NewTracker(c), time.Unix(1e9, 0)
	for i, s := range []struct {
		free int64
		due  int
	}{{120, 0}, {99, 1}, {100, 1}, {149, 1}, {150, 0}, {120, 0}, {99, 1}} {
		now = now.Add(time.Second)
		if _, due := tr.Look(Readings{MemoryAvailable: {Capacity: 1000, Available: s.free}}, now); len(due) != s.due {
			t.Errorf("look %d, %d free: %d due", i, s.free, len(due))
		}
	}
}

// Whatever the readings do: nothing is due while nothing is short, a hard
// threshold is due at once, a soft one only after its whole grace, and the
// condition is on from the first moment until some time after the last.
func TestTracker(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		limit := rapid.Int64Range(1, 500).Draw(rt, "limit")
		soft := rapid.Bool().Draw(rt, "soft")
		grace := time.Duration(rapid.IntRange(0, 60).Draw(rt, "grace")) * time.Second
		c := Config{Transition: 30 * time.Second, Thresholds: []Threshold{{Signal: MemoryAvailable, Value: Value{Amount: limit}, Soft: soft, Grace: grace}}}
		tr, now := NewTracker(c), time.Unix(1e9, 0)
		var since, last time.Time
		for range rapid.IntRange(1, 50).Draw(rt, "looks") {
			now = now.Add(time.Duration(rapid.IntRange(1, 20).Draw(rt, "seconds")) * time.Second)
			r := Readings{}
			free := rapid.Int64Range(0, 1000).Draw(rt, "free")
			known := rapid.IntRange(0, 9).Draw(rt, "known") > 0
			if known {
				r[MemoryAvailable] = Reading{Capacity: 1000, Available: free}
			}
			met, due := tr.Look(r, now)
			short := known && free < limit
			if !short {
				since = time.Time{}
			} else {
				last = now
				if since.IsZero() {
					since = now
				}
			}
			wantDue := short && (!soft || now.Sub(since) >= grace)
			if (len(met) == 1) != short || (len(due) == 1) != wantDue {
				rt.Fatalf("free %d of limit %d: met %v, due %v", free, limit, met, due)
			}
			if on := tr.On(corev1.NodeMemoryPressure, now); on != (!last.IsZero() && now.Sub(last) < 30*time.Second) {
				rt.Fatalf("condition %v, last seen %s ago", on, now.Sub(last))
			}
		}
	})
}

// Whatever pods there are: critical ones and those whose end frees nothing
// never go; who uses no more than it asked for goes after all who do; among
// equals the lower priority goes first, then who is further over; and the
// order in which they are listed does not matter.
func TestRank(t *testing.T) {
	pod := rapid.Custom(func(rt *rapid.T) Pod {
		u := func(what string) Usage {
			n := rapid.SampledFrom([]int64{0, 1, 50, 2 << 20, 8 << 20, 64 << 20})
			return Usage{n.Draw(rt, what), n.Draw(rt, what), n.Draw(rt, what), n.Draw(rt, what)}
		}
		return Pod{Priority: rapid.Int32Range(-1, 2).Draw(rt, "priority"), Critical: rapid.IntRange(0, 3).Draw(rt, "critical") == 0, Usage: u("usage"), Request: u("request")}
	})
	rapid.Check(t, func(rt *rapid.T) {
		pods := rapid.SliceOfN(pod, 0, 12).Draw(rt, "pods")
		for i := range pods {
			pods[i].UID = fmt.Sprint(i)
		}
		s := rapid.SampledFrom(signals).Draw(rt, "signal")
		got := Rank(s, pods)
		may := 0
		for _, p := range pods {
			if !p.Critical && p.Usage.of(s) >= leastFreed[s] {
				may++
			}
		}
		if len(got) != may {
			rt.Fatalf("%d of %d", len(got), may)
		}
		over := func(p Pod) int64 { return p.Usage.of(s) - p.Request.of(s) }
		for i := range got {
			if got[i].Critical || got[i].Usage.of(s) < leastFreed[s] {
				rt.Fatalf("%+v goes", got[i])
			}
			if i == 0 {
				continue
			}
			a, b := got[i-1], got[i]
			aOver, bOver := over(a) > 0 || s == PIDAvailable, over(b) > 0 || s == PIDAvailable
			switch {
			case !aOver && bOver:
				rt.Fatalf("%+v, within its request, goes before %+v", a, b)
			case aOver == bOver && a.Priority > b.Priority:
				rt.Fatalf("%+v goes before %+v of lower priority", a, b)
			case aOver == bOver && a.Priority == b.Priority && over(a) < over(b):
				rt.Fatalf("%+v goes before %+v, which is further over", a, b)
			}
		}
		again := Rank(s, rapid.Permutation(pods).Draw(rt, "order"))
		if !slices.EqualFunc(got, again, func(a, b Pod) bool { return a.UID == b.UID }) {
			rt.Fatalf("the order changes the outcome")
		}
	})
}
