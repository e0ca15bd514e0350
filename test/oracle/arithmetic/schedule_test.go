package arithmetic

import (
	"context"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/scheduler/framework/preemption"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/scheduler"
)

// clusters is how many random ones each test compares.
const clusters = 1500

// rounding is by how much scores may differ: upstream cuts each to a whole
// number before it is weighted.
func rounding() (sum int64) {
	for _, w := range weights {
		sum += int64(w)
	}
	return sum
}

func settle(t *testing.T, c *cluster) {
	t.Helper()
	env := c.w.Env()
	s := scheduler.New(scheduler.Config{Store: c.w.Store, Term: env.Term, Clock: c.w, Log: env.Log, Events: c.w.Events, Rand: env.Rand, Writers: 1})
	if err := s.Settle(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// Every filter says the same of every node, and the node that is chosen is
// one of those that upstream would choose.
func TestFiltersAndScores(t *testing.T) {
	chosen, refused, by := 0, 0, map[string]int{}
	for seed := range uint64(clusters) {
		c := newCluster(t, seed)
		p := c.pod("new")
		p.Spec.Priority = new(int32) // preempts nobody
		c.choosy(p)
		c.terms(p, 4)
		c.w.Create(p)
		p = fixture.Get[*corev1.Pod](c.w, fixture.Pod, p.Namespace, p.Name)
		ctx, cancel := context.WithCancel(context.Background())
		want := newUpstream(ctx, t, c).ask(ctx, p)
		cancel()
		got, err := scheduler.Explain(c.w.Store, nil, p, func(string) bool { return true })
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range got.Nodes {
			first := ""
			for _, f := range n.Filters {
				if !f.OK && first == "" {
					first = f.Name
				}
			}
			if first != want.objects[n.Name] {
				t.Errorf("seed %d: node %s is refused by %q, upstream by %q; %+v", seed, n.Name, first, want.objects[n.Name], n.Filters)
			}
			by[first]++
		}
		settle(t, c)
		node := fixture.Get[*corev1.Pod](c.w, fixture.Pod, p.Namespace, p.Name).Spec.NodeName
		if len(want.scores) == 0 {
			if refused++; node != "" {
				t.Errorf("seed %d: placed on %s, upstream finds no node", seed, node)
			}
			continue
		}
		chosen++
		best := slices.Max(slices.Collect(maps.Values(want.scores)))
		if has, ok := want.scores[node]; !ok || has < best-rounding() {
			t.Errorf("seed %d: placed on %q; upstream's scores are %v", seed, node, want.scores)
		}
		if t.Failed() && seed > 200 {
			t.Fatal("enough")
		}
	}
	t.Logf("%d chosen, %d refused everywhere; by filter: %v", chosen, refused, by)
	for _, f := range filters {
		if by[f] < 20 {
			t.Errorf("filter %s refused %d times: the clusters do not try it", f, by[f])
		}
	}
}

// harm is what upstream weighs candidates by, before the age of victims.
func harm(c preemption.Candidate) [4]int64 {
	h := [4]int64{c.Victims().NumPDBViolations}
	for _, p := range c.Victims().Pods {
		prio := int64(*p.Spec.Priority)
		h[1] = max(h[1], prio)
		h[2] += prio + 1<<32 // upstream's shift, so that more victims weigh more
		h[3]++
	}
	return h
}

// A pod that fits nowhere gets the same victims on the node that is chosen,
// and that node is one that upstream could choose.
func TestVictims(t *testing.T) {
	preempted, helpless := 0, 0
	for seed := range uint64(clusters) {
		c := newCluster(t, 1<<32+seed)
		for _, app := range []string{"a", "b"} {
			if c.odds(2) {
				c.budget(app)
			}
		}
		p := c.pod("new")
		*p.Spec.Priority = int32(2 + c.r.IntN(3))
		c.choosy(p)
		c.terms(p, 6)
		c.w.Create(p)
		c.read()
		p = fixture.Get[*corev1.Pod](c.w, fixture.Pod, p.Namespace, p.Name)
		ctx, cancel := context.WithCancel(context.Background())
		u := newUpstream(ctx, t, c)
		want := u.ask(ctx, p)
		if len(want.scores) > 0 {
			cancel()
			continue // it fits
		}
		candidates, best := u.preempt(ctx, p, want, c.budgets)
		cancel()
		settle(t, c)
		node := fixture.Get[*corev1.Pod](c.w, fixture.Pod, p.Namespace, p.Name).Status.NominatedNodeName
		if best == "" {
			if helpless++; node != "" {
				t.Errorf("seed %d: preempts on %s, upstream nowhere", seed, node)
			}
			continue
		}
		preempted++
		var victims, theirs []string
		for _, q := range fixture.List[*corev1.Pod](c.w, fixture.Pod, "") {
			if q.DeletionTimestamp != nil {
				victims = append(victims, q.Namespace+"/"+q.Name)
			}
		}
		for _, q := range c.placed { // those that were deleted at once
			if _, err := c.w.Store.Get(fixture.Pod, q.Namespace, q.Name); err != nil {
				victims = append(victims, q.Namespace+"/"+q.Name)
			}
		}
		if candidates[node] == nil {
			t.Errorf("seed %d: preempts %v on %q, upstream on %s", seed, victims, node, best)
			continue
		}
		for _, q := range candidates[node].Victims().Pods {
			theirs = append(theirs, q.Namespace+"/"+q.Name)
		}
		slices.Sort(victims)
		slices.Sort(theirs)
		if !slices.Equal(victims, theirs) {
			t.Errorf("seed %d: victims on %s are %v, upstream's %v", seed, node, victims, theirs)
		}
		if a, b := harm(candidates[node]), harm(candidates[best]); a != b {
			t.Errorf("seed %d: preempts on %s with harm %v, upstream on %s with %v", seed, node, a, best, b)
		}
		if t.Failed() && seed > 200 {
			t.Fatal("enough")
		}
	}
	t.Logf("%d preempted, %d could not", preempted, helpless)
	if preempted < 50 || helpless < 50 {
		t.Error("the clusters do not try it")
	}
}
