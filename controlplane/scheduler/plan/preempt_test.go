package plan

import (
	"cmp"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"pgregory.net/rapid"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// ranked are the pods of a world with what preemption looks at.
type ranked struct {
	*world
	flat    map[string]*Pod        // by name
	typed   map[string]*corev1.Pod // by name
	rooms   map[string]int64       // cpu, by node
	budgets []*Budget
}

func drawRanked(t *rapid.T) *ranked {
	r := &ranked{world: drawWorld(t), flat: map[string]*Pod{}, typed: map[string]*corev1.Pod{}, rooms: map[string]int64{}}
	for _, n := range r.nodes {
		facts := factsOf(n)
		r.rooms[n.Name] = rapid.Int64Range(1, 8).Draw(t, "cpu")
		facts.Allocatable = []state.Quantity{{Name: "cpu", Value: r.rooms[n.Name]}, {Name: "pods", Value: 100}}
		r.world.flat.Set(facts)
	}
	for _, p := range r.pods {
		r.typed[p.Name] = p
		slot, _ := r.world.flat.Slot(p.Spec.NodeName)
		for _, q := range slices.Clone(r.world.flat.Pods(slot)) {
			if q.Name != p.Name {
				continue
			}
			r.world.flat.Drop(slot, q)
			q.Requests = []state.Quantity{{Name: "cpu", Value: rapid.Int64Range(0, 4).Draw(t, "takes")}}
			if rapid.IntRange(0, 5).Draw(t, "port") == 0 {
				q.HostPorts = []state.HostPort{{Protocol: "TCP", Port: 80}}
			}
			q.UID = q.Name
			q.Rank = &Rank{Priority: rapid.Int32Range(-1, 3).Draw(t, "priority"), Since: rapid.Int64Range(0, 3).Draw(t, "since")}
			q.Fixed = rapid.IntRange(0, 9).Draw(t, "fixed") == 0
			r.world.flat.Add(slot, q)
			r.flat[q.Name] = q
		}
	}
	for range rapid.IntRange(0, 2).Draw(t, "budgets") {
		s := drawSelector(t)
		r.budgets = append(r.budgets, &Budget{Namespace: rapid.SampledFrom([]string{"ns1", "ns2"}).Draw(t, "guarded"), Selector: selectorOf(s),
			Allowed: rapid.Int32Range(0, 2).Draw(t, "allowed"), Disrupted: map[string]bool{}})
	}
	return r
}

// fitsWithout: the rules, told plainly.
func (r *ranked) fitsWithout(p *corev1.Pod, g *Group, node *corev1.Node, gone map[string]bool) bool {
	cpu, port := r.rooms[node.Name], false
	rest := &cluster{nodes: r.nodes, spaces: r.spaces}
	for _, q := range r.pods {
		if gone[q.Name] {
			continue
		}
		rest.pods = append(rest.pods, q)
		if q.Spec.NodeName == node.Name {
			for _, x := range r.flat[q.Name].Requests {
				cpu -= x.Value
			}
			port = port || len(r.flat[q.Name].HostPorts) > 0
		}
	}
	facts := factsOf(node)
	return g.Shape.check(&facts) == fits && (g.Requests[0].Value == 0 || cpu >= g.Requests[0].Value) && (!port || len(g.HostPorts) == 0) && rest.judge(p, node) == none
}

// victims of one node, by upstream's procedure; ok is false if it is none.
func (r *ranked) victims(p *corev1.Pod, g *Group, node *corev1.Node, priority int32) (names []string, h harm, ok bool) {
	now := r.judge(p, node)
	if now == noTopology || now == noAffinity {
		return nil, harm{}, false
	}
	gone := map[string]bool{}
	var pods []*Pod
	any := false
	for _, q := range r.pods {
		f := r.flat[q.Name]
		if q.Spec.NodeName == node.Name && f.Rank.Priority < priority && !f.Fixed {
			gone[q.Name], any = true, true
			if q.DeletionTimestamp == nil && !f.Doomed {
				pods = append(pods, f)
			}
		}
	}
	if !any || !r.fitsWithout(p, g, node, gone) {
		return nil, harm{}, false
	}
	slices.SortFunc(pods, func(a, b *Pod) int {
		return cmp.Or(-cmp.Compare(a.Rank.Priority, b.Rank.Priority), cmp.Compare(a.Rank.Since, b.Rank.Since), cmp.Compare(a.UID, b.UID))
	})
	left := map[*Budget]int32{}
	violates := map[*Pod]bool{}
	for _, q := range pods {
		for _, b := range r.budgets {
			if b.Namespace != q.Namespace || b.Selector.Empty() || !b.Selector.Matches(labels.Set(q.Labels)) || b.Disrupted[q.Name] {
				continue
			}
			left[b]++
			if left[b] > b.Allowed {
				violates[q] = true
				break
			}
		}
	}
	c := Choice{}
	for _, first := range []bool{true, false} {
		for _, q := range pods {
			if violates[q] != first {
				continue
			}
			delete(gone, q.Name)
			if r.fitsWithout(p, g, node, gone) {
				continue
			}
			gone[q.Name] = true
			c.Victims = append(c.Victims, q)
			names = append(names, q.Name)
			if first {
				c.Violations++
			}
		}
	}
	slices.Sort(names)
	c.Slot, _ = r.world.flat.Slot(node.Name)
	return names, c.harm(), true
}

// Preemption takes the node of least harm and the victims that upstream's
// procedure takes; afterwards the pod fits there; and where no node is found
// none would help.
func TestPreemptionByThePlainRules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRanked(t)
		p := drawPod(t, "")
		priority := rapid.Int32Range(0, 4).Draw(t, "preemptor")
		g := groupOf(t, p)
		g.Requests = []state.Quantity{{Name: "cpu", Value: rapid.Int64Range(0, 8).Draw(t, "wants")}}
		if rapid.IntRange(0, 3).Draw(t, "wantsPort") == 0 {
			g.HostPorts = []state.HostPort{{Protocol: "TCP", Port: 80}}
		}
		if len(Place(r.world.flat, g)) == 1 {
			return
		}
		before := fmt.Sprint(r.world.flat.free, r.world.flat.peers.held)
		pre := NewPreemption(r.world.flat, g, priority, r.budgets)
		if after := fmt.Sprint(r.world.flat.free, r.world.flat.peers.held); after != before {
			t.Fatalf("judging changed the nodes: %s, was %s", after, before)
		}
		c, found := pre.Next()
		var least *harm
		for _, n := range r.nodes {
			names, h, ok := r.victims(p, g, n, priority)
			if ok && (least == nil || h.compare(*least) < 0) {
				least = &h
			}
			if slot, _ := r.world.flat.Slot(n.Name); found && slot == c.Slot {
				var got []string
				for _, v := range c.Victims {
					got = append(got, v.Name)
				}
				slices.Sort(got)
				if !ok || !slices.Equal(got, names) {
					t.Fatalf("victims on %s: %v, by the rules %v (%v)", n.Name, got, names, ok)
				}
			}
		}
		if found != (least != nil) || found && c.harm() != *least {
			t.Fatalf("chosen %+v (%v), least harm by the rules %+v", c.harm(), found, least)
		}
		if !found {
			return
		}
		// Carry it out: the victims go, the pod comes, and fits.
		for _, v := range c.Victims {
			if v.Rank.Priority >= priority || v.Fixed {
				t.Fatalf("victim %+v", v)
			}
			v.Doomed = true
			Spend(r.budgets, v)
		}
		if !r.leave(p, g, c, priority) {
			t.Fatalf("it does not fit on %d after %d victims", c.Slot, len(c.Victims))
		}
	})
}

// leave drops everything on the slot that goes, and says whether the pod
// then gets that place.
func (r *ranked) leave(p *corev1.Pod, g *Group, c Choice, priority int32) bool {
	for _, q := range slices.Clone(r.world.flat.Pods(c.Slot)) {
		if q.Rank.Priority < priority && !q.Fixed && (q.Doomed || q.Terminating) {
			r.world.flat.Drop(c.Slot, q)
			r.pods = slices.DeleteFunc(r.pods, func(x *corev1.Pod) bool { return x.Name == q.Name })
		}
	}
	wished := *g
	wished.Wish = c.Slot + 1
	got := Place(r.world.flat, &wished)
	return len(got) == 1 && got[0] == c.Slot
}

// Many pods of one group: the second choice counts what the first takes.
func TestPreemptionOfAGroup(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := NewNodes()
		var low []*Pod
		for i := range rapid.IntRange(1, 5).Draw(t, "nodes") {
			n.Set(Node{Name: fmt.Sprintf("n%d", i), UID: fmt.Sprint(i), Allocatable: []state.Quantity{{Name: "cpu", Value: 10}}})
			for k := range 5 {
				p := &Pod{UID: fmt.Sprintf("%d-%d", i, k), Namespace: "a", Name: fmt.Sprintf("%d-%d", i, k), Labels: map[string]string{"a": "b"},
					Requests: []state.Quantity{{Name: "cpu", Value: 2}}, Rank: &Rank{Priority: rapid.Int32Range(0, 2).Draw(t, "priority")}}
				n.Add(i, p)
				low = append(low, p)
			}
		}
		budgets := []*Budget{{Namespace: "a", Selector: labels.SelectorFromSet(labels.Set{"a": "b"}), Allowed: rapid.Int32Range(0, 9).Draw(t, "allowed")}}
		g := &Group{Shape: &Shape{}, Count: 1, Requests: []state.Quantity{{Name: "cpu", Value: rapid.Int64Range(1, 5).Draw(t, "wants")}}}
		pre := NewPreemption(n, g, 2, budgets)
		nominated := map[int]int64{}
		for {
			c, ok := pre.Next()
			if !ok {
				break
			}
			again := NewPreemption(n, g, 2, budgets)
			if d, _ := again.Next(); d.Slot != c.Slot || len(d.Victims) != len(c.Victims) || d.Violations != c.Violations {
				t.Fatalf("in the group %+v, alone %+v", c, d)
			}
			for _, v := range c.Victims {
				if v.Doomed {
					t.Fatal("chosen twice")
				}
				v.Doomed = true
				Spend(budgets, v)
			}
			n.Take(c.Slot, g.Requests, nil)
			nominated[c.Slot] += g.Requests[0].Value
		}
		for _, p := range low {
			if p.Doomed {
				var slot int
				_, _ = fmt.Sscanf(p.Name, "%d-", &slot)
				n.Drop(slot, p)
			}
		}
		for slot := range nominated {
			if n.Free(slot, "cpu") < 0 {
				t.Fatalf("%d is overcommitted by %d once all victims are gone", slot, -n.Free(slot, "cpu"))
			}
		}
	})
}
