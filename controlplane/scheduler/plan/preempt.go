package plan

import (
	"cmp"
	"container/heap"
	"math"
	"slices"

	"k8s.io/apimachinery/pkg/labels"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Budget is a PodDisruptionBudget.
type Budget struct {
	Namespace string
	Selector  labels.Selector
	Allowed   int32
	// Disrupted pods, by name, were counted already.
	Disrupted map[string]bool
}

// Choice is a node for a pod, once its victims are gone.
type Choice struct {
	Slot    int
	Victims []*Pod // the most important first; without those that go anyway
	// Violations is how many of them a budget does not allow.
	Violations int
}

// harm orders choices, the least first: upstream's order.
type harm struct {
	violations int
	highest    int64 // priority
	sum        int64
	count      int
	since      int64 // earliest start of the most important victims
	slot       int
}

func (a harm) compare(b harm) int {
	return cmp.Or(cmp.Compare(a.violations, b.violations), cmp.Compare(a.highest, b.highest), cmp.Compare(a.sum, b.sum),
		cmp.Compare(a.count, b.count), cmp.Compare(b.since, a.since), cmp.Compare(a.slot, b.slot))
}

// Preemption finds room for pods of a group that fit nowhere. All nodes are
// judged once; a node is judged again when it is about to be chosen, so that
// what was chosen before counts.
type Preemption struct {
	n        *Nodes
	g        *Group
	priority int32
	budgets  []*Budget
	view     *view
	queue    choices
	fresh    bool
}

// NewPreemption judges every node for pods of this priority. Every placed
// pod must have its Rank. The Nodes are as they were before, afterwards.
func NewPreemption(n *Nodes, g *Group, priority int32, budgets []*Budget) *Preemption {
	p := &Preemption{n: n, g: g, priority: priority, budgets: budgets}
	p.start()
	return p
}

func (p *Preemption) start() {
	p.g.Shape.judge(p.n)
	p.view, p.queue, p.fresh = newView(p.n, p.g), nil, true
	for slot := range p.n.info {
		if c, ok := p.judge(slot); ok {
			p.queue = append(p.queue, c)
		}
	}
	heap.Init(&p.queue)
}

// Next returns the choice of least harm for one more pod. What earlier calls
// returned has been carried out by then: victims are Doomed, and the room of
// each pod that was nominated is taken.
func (p *Preemption) Next() (Choice, bool) {
	if p.view != nil && !p.fresh { // everything may be otherwise now
		p.start()
	}
	p.fresh = false
	for p.queue.Len() > 0 {
		best := p.queue[0]
		now, ok := p.judge(best.choice.Slot)
		if !ok {
			heap.Pop(&p.queue)
			continue
		}
		if now.harm.compare(best.harm) > 0 {
			p.queue[0] = now
			heap.Fix(&p.queue, 0)
			if p.queue[0].choice.Slot != now.choice.Slot {
				continue
			}
		}
		return now.choice, true
	}
	return Choice{}, false
}

// choices is a heap, the least harm first.
type choices []judged

type judged struct {
	choice Choice
	harm   harm
}

func (c choices) Len() int           { return len(c) }
func (c choices) Less(i, j int) bool { return c[i].harm.compare(c[j].harm) < 0 }
func (c choices) Swap(i, j int)      { c[i], c[j] = c[j], c[i] }
func (c *choices) Push(x any)        { *c = append(*c, x.(judged)) }
func (c *choices) Pop() any {
	old := *c
	x := old[len(old)-1]
	*c = old[:len(old)-1]
	return x
}

// judge finds the victims on one slot, as upstream does: all that are less
// important go, then as many as possible come back, those that a budget
// protects first, each time the most important first.
func (p *Preemption) judge(slot int) (judged, bool) {
	n, g := p.n, p.g
	if g.Shape.verdicts[slot] != fits || p.hopeless(slot) {
		return judged{}, false
	}
	room := p.roomOf(slot)
	var potential []*Pod
	any := false
	for _, q := range n.peers.pods[slot] {
		if q.Rank == nil || q.Rank.Priority >= p.priority || q.Fixed {
			continue
		}
		any = true
		room.move(q, -1)
		if !q.Doomed && !q.Terminating {
			potential = append(potential, q)
		}
	}
	defer room.undo()
	if !any || !room.fits() {
		return judged{}, false
	}
	slices.SortFunc(potential, moreImportant)
	violating, others := p.byBudget(potential)
	c := Choice{Slot: slot}
	for i, list := range [][]*Pod{violating, others} {
		for _, q := range list {
			room.move(q, 1)
			if room.fits() {
				continue
			}
			room.move(q, -1)
			c.Victims = append(c.Victims, q)
			if i == 0 {
				c.Violations++
			}
		}
	}
	slices.SortStableFunc(c.Victims, moreImportant)
	return judged{c, c.harm()}, true
}

func (c *Choice) harm() harm {
	h := harm{violations: c.Violations, highest: math.MinInt64, count: len(c.Victims), since: math.MaxInt64, slot: c.Slot}
	for _, q := range c.Victims {
		h.highest = max(h.highest, int64(q.Rank.Priority))
		h.sum += int64(q.Rank.Priority) + math.MaxInt32 + 1 // so that more of negative priority are not less
	}
	for _, q := range c.Victims {
		if int64(q.Rank.Priority) == h.highest {
			h.since = min(h.since, q.Rank.Since)
		}
	}
	return h
}

func moreImportant(a, b *Pod) int {
	return cmp.Or(cmp.Compare(b.Rank.Priority, a.Rank.Priority), cmp.Compare(a.Rank.Since, b.Rank.Since), cmp.Compare(a.UID, b.UID))
}

// byBudget splits the pods by whether a budget allows them to go, if all
// before them go.
func (p *Preemption) byBudget(pods []*Pod) (violating, others []*Pod) {
	if len(p.budgets) == 0 {
		return nil, pods
	}
	left := make([]int32, len(p.budgets))
	for i, b := range p.budgets {
		left[i] = b.Allowed
	}
	for _, q := range pods {
		over := false
		for i, b := range p.budgets {
			if !b.protects(q) {
				continue
			}
			if left[i]--; left[i] < 0 {
				over = true
				break
			}
		}
		if over {
			violating = append(violating, q)
		} else {
			others = append(others, q)
		}
	}
	return violating, others
}

// protects: does the pod's end cost the budget something?
func (b *Budget) protects(q *Pod) bool {
	return b.Namespace == q.Namespace && len(q.Labels) > 0 && !b.Selector.Empty() && b.Selector.Matches(labels.Set(q.Labels)) && !b.Disrupted[q.Name]
}

// Spend counts a victim in its budgets.
func Spend(budgets []*Budget, victim *Pod) {
	for _, b := range budgets {
		if b.protects(victim) {
			b.Allowed--
			if b.Disrupted == nil {
				b.Disrupted = map[string]bool{}
			}
			b.Disrupted[victim.Name] = true
		}
	}
}

// hopeless: no pod that goes from this slot helps.
func (p *Preemption) hopeless(slot int) bool {
	if p.view == nil {
		return false
	}
	o := p.view.check(slot)
	return o == noTopology || o == noAffinity
}

// room is one slot with pods taken off it.
type room struct {
	p     *Preemption
	slot  int
	free  []need64
	moved []*Pod // that are gone
}

type need64 struct {
	name       string
	want, free int64
}

func (p *Preemption) roomOf(slot int) *room {
	r := &room{p: p, slot: slot, free: make([]need64, 0, len(p.g.Requests))}
	for _, q := range p.g.Requests {
		if q.Value > 0 {
			r.free = append(r.free, need64{q.Name, min(q.Value, most), p.n.Free(slot, q.Name)})
		}
	}
	return r
}

// move takes a pod off the slot (-1), or puts it back (+1).
func (r *room) move(q *Pod, by int32) {
	for i := range r.free {
		for _, x := range q.Requests {
			if x.Name == r.free[i].name {
				r.free[i].free -= int64(by) * min(x.Value, most)
			}
		}
	}
	if by < 0 {
		r.moved = append(r.moved, q)
	} else {
		r.moved = slices.DeleteFunc(r.moved, func(m *Pod) bool { return m == q })
	}
	if r.p.view != nil {
		r.p.view.move(r.slot, q, by)
	}
}

func (r *room) undo() {
	for len(r.moved) > 0 {
		r.move(r.moved[0], 1)
	}
}

func (r *room) fits() bool {
	for i := range r.free {
		if r.free[i].free < r.free[i].want {
			return false
		}
	}
	return r.portsFree() && (r.p.view == nil || r.p.view.check(r.slot) == none)
}

func (r *room) portsFree() bool {
	if len(r.p.g.HostPorts) == 0 {
		return true
	}
	taken := r.p.n.ports[r.slot]
	gone := map[state.HostPort]int32{}
	for _, q := range r.moved {
		for _, port := range q.HostPorts {
			gone[port]++
		}
	}
	for _, w := range r.p.g.HostPorts {
		for port, k := range taken {
			if k > gone[port] && clash(port, w) {
				return false
			}
		}
	}
	return true
}

// move takes a placed pod out of the view, or puts it back.
func (v *view) move(slot int, q *Pod, by int32) {
	spaces := v.n.peers.spaces[q.Namespace]
	for i := range v.away {
		a := &v.away[i]
		if q.Terms == nil || a.col.of[slot] < 0 {
			continue
		}
		for k := range q.Terms.Anti {
			if q.Terms.Anti[k].id == a.id {
				a.counts[a.col.of[slot]] += by
			}
		}
	}
	t := v.g.Terms
	if t == nil {
		return
	}
	for i := range v.anti {
		if d := v.anti[i].col.of[slot]; d >= 0 && t.Anti[i].Who.covers(q.Namespace, spaces, q.Labels) {
			v.anti[i].counts[d] += by
		}
	}
	for i := range v.hard {
		h := &v.hard[i]
		if d := h.col.of[slot]; d >= 0 && h.eligible[slot] && !q.Terminating && !h.Who.pods.Empty() && h.Who.covers(q.Namespace, spaces, q.Labels) {
			h.move(d, by)
		}
	}
	every := len(t.Affinity) > 0
	for i := range t.Affinity {
		every = every && t.Affinity[i].Who.covers(q.Namespace, spaces, q.Labels)
	}
	if !every {
		return
	}
	for i := range v.affinity {
		if d := v.affinity[i].col.of[slot]; d >= 0 {
			v.affinity[i].counts[d] += by
			v.selected += int64(by)
		}
	}
}
