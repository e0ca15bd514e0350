package plan

import (
	"math"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Group is a number of pods that no decision can tell apart.
type Group struct {
	Shape    *Shape
	Requests []state.Quantity // effective requests of one pod, "pods" included
	// Wanted is what is really asked for where Requests are capped
	// (state.MaxQuantity), for people; nil for all but absurd pods.
	Wanted    map[string]string
	HostPorts []state.HostPort
	Count     int
	// Spread places the pods on nodes with the fewest of their siblings, then
	// the emptiest; otherwise they are packed onto the fullest that fits.
	Spread bool
	// Least places the pods on the emptiest nodes.
	Least bool
	// Siblings counts, by node name, the pods of the same controller; only
	// read with Spread.
	Siblings map[string]int

	// Namespace and Labels are the pods'; only read where Terms, or terms of
	// placed pods, speak of pods.
	Namespace string
	Labels    map[string]string
	Terms     *Terms // nil: none
	// Ghosts are nominated pods that come before these: others' terms count
	// them where that keeps the pods away. What they take of their nodes has
	// been Taken.
	Ghosts []Ghost
	// Wish, if not 0, is a slot plus one: a single pod goes there if it fits.
	Wish int
	// Images of the pod's containers, one entry a container, as ImageName
	// tells them.
	Images []string
	// Weights of the scores; nil is DefaultWeights.
	Weights *Weights
}

// Ghost is a pod that is to be placed on a slot.
type Ghost struct {
	Slot int
	Pod  *Pod
}

// Weights say how much each score, from 0 to 1, counts.
type Weights struct {
	// Fit is how full the node is (how empty, with Group.Spread).
	Fit float32
	// NodeAffinity is the node's share of the preferred terms' weights.
	NodeAffinity float32
	// Taints is 1 without taints PreferNoSchedule that are not tolerated.
	Taints float32
	// InterPod sums the preferred terms of inter-pod affinity, as upstream.
	InterPod float32
	// Topology favours domains with few pods (ScheduleAnyway), as upstream.
	Topology float32
	// Images favours nodes that have the pod's images, as upstream.
	Images float32
	// Siblings is what each pod of the same controller costs, with
	// Group.Spread.
	Siblings float32
}

// DefaultWeights are upstream's. A sibling outweighs everything else.
var DefaultWeights = Weights{Fit: 1, NodeAffinity: 2, Taints: 3, InterPod: 2, Topology: 2, Images: 1, Siblings: 16}

// Place decides for all pods of the group, in one pass over the nodes where
// no pod of the group matters to the next, and returns the slots of those
// that fit, one a pod; fewer than Count means that the others do not fit
// anywhere (see Explain). It changes nothing but memories (of the Shape, of
// selections that were counted): the caller Adds what it accepts. The outcome
// equals that of Count groups of one pod, each added before the next.
func Place(n *Nodes, g *Group) []int {
	g.Shape.judge(n)
	if g.Count <= 0 || len(n.info) == 0 {
		return nil
	}
	d := newDemand(n, g)
	switch {
	case g.Wish > 0 && g.Count == 1 && d.fits(g.Wish-1, 0) && (d.view == nil || d.view.check(g.Wish-1) == none):
		return []int{g.Wish - 1}
	case d.view != nil && d.view.dynamic():
		return d.oneByOne()
	case g.Count > 1:
		return d.many()
	}
	var slot int
	if g.Spread || d.fit <= 0 || d.static != nil || d.view != nil || len(d.extra) > 0 || len(g.HostPorts) > 0 {
		slot = d.bestGeneral()
	} else {
		slot = d.bestPacked()
	}
	if slot < 0 {
		return nil
	}
	return []int{slot}
}

// demand is a group's requests as thresholds: a slot fits when free >= need.
type demand struct {
	n                 *Nodes
	g                 *Group
	cpu, memory       int64 // requested
	needCPU, needMem  int64
	needPods, onePods int64
	extra             []columnNeed
	siblings          map[int32]int32
	weights           *Weights
	fit               float32 // weight of a share of cpu plus a share of memory
	view              *view   // nil: nobody's terms matter
	static            []float32
}

type columnNeed struct {
	column int
	value  int64
}

// need turns a request into a threshold: nothing asked for always fits, even
// where more is taken than there is.
func need(v int64) int64 {
	if v <= 0 {
		return lowest
	}
	return v
}

// lowest is a threshold that everything passes; values are at most 2^52, so
// that no difference overflows.
const lowest = -(int64(1) << 62)

func newDemand(n *Nodes, g *Group) *demand {
	d := &demand{n: n, g: g, needCPU: lowest, needMem: lowest, needPods: lowest}
	for _, q := range g.Requests {
		q.Value = min(q.Value, most)
		switch c := n.col(q.Name); c {
		case colCPU:
			d.cpu, d.needCPU = q.Value, need(q.Value)
		case colMemory:
			d.memory, d.needMem = q.Value, need(q.Value)
		case colPods:
			d.onePods, d.needPods = q.Value, need(q.Value)
		default:
			if q.Value > 0 {
				d.extra = append(d.extra, columnNeed{c, q.Value})
			}
		}
	}
	if g.Spread && len(g.Siblings) > 0 {
		d.siblings = make(map[int32]int32, len(g.Siblings))
		for name, k := range g.Siblings {
			if slot, ok := n.index[name]; ok {
				d.siblings[slot] = int32(k)
			}
		}
	}
	if d.weights = g.Weights; d.weights == nil {
		d.weights = &DefaultWeights
	}
	if d.fit = d.weights.Fit / 2; g.Spread || g.Least {
		d.fit = -d.fit
	}
	d.view = newView(n, g)
	d.addStatic()
	return d
}

// addStatic sums the scores that no placement of the group changes.
func (d *demand) addStatic() {
	s, w := d.g.Shape, d.weights
	scored := d.view != nil && !d.view.dynamic() && len(d.view.scores) > 0
	images := d.n.locality(d.g.Images)
	if s.prefer == nil && s.averse == nil && images == nil && !scored {
		return
	}
	d.static = make([]float32, len(d.n.info))
	for i := range d.static {
		if s.prefer != nil {
			d.static[i] += w.NodeAffinity * s.prefer[i]
		}
		if s.averse != nil && s.averse[i] {
			d.static[i] -= w.Taints
		}
		if images != nil {
			d.static[i] += w.Images * float32(images[i]) / 100
		}
	}
	if !scored {
		return
	}
	var slots []int32
	for i := range d.static {
		if s.verdicts[i] == fits && d.view.check(i) == none {
			slots = append(slots, int32(i))
		}
	}
	for k, x := range normalized(slots, d.view.raw) {
		d.static[slots[k]] += w.InterPod * x
	}
}

// bestPacked is the hot loop: the fullest slot that fits, the lowest of
// equals. All columns are cut to one length so that the compiler drops the
// bounds checks, and the four filters are one branch: every difference is
// negative exactly if its filter fails, so the sign of their union says
// whether any does (values stay far below 2^62, see lowest).
func (d *demand) bestPacked() int {
	n := d.n
	size := len(n.info)
	cpu, memory, pods := n.free[colCPU][:size], n.free[colMemory][:size], n.free[colPods][:size]
	base, invCPU, invMem := n.base[:size], n.invCPU[:size], n.invMem[:size]
	verdicts := d.g.Shape.verdicts[:size]
	needCPU, needMem, needPods := d.needCPU, d.needMem, d.needPods
	addCPU, addMem := float32(d.cpu), float32(d.memory)
	best, slot := float32(math.Inf(-1)), -1
	for i := range size {
		if (cpu[i]-needCPU)|(memory[i]-needMem)|(pods[i]-needPods)|-int64(verdicts[i]) < 0 {
			continue
		}
		if s := base[i] + addCPU*invCPU[i] + addMem*invMem[i]; s > best {
			best, slot = s, i
		}
	}
	return slot
}

func (d *demand) bestGeneral() int {
	best, slot := float32(math.Inf(-1)), -1
	for i := range d.n.info {
		if !d.fits(i, 0) {
			continue
		}
		if s := d.score(i, 0); s > best {
			best, slot = s, i
		}
	}
	return slot
}

// fits says whether one more pod fits on the slot when k of the group are
// already meant for it.
func (d *demand) fits(i int, k int64) bool {
	n := d.n
	if d.g.Shape.verdicts[i] != fits ||
		!roomFor(n.free[colCPU][i], d.cpu, k) || !roomFor(n.free[colMemory][i], d.memory, k) || !roomFor(n.free[colPods][i], d.onePods, k) {
		return false
	}
	for _, x := range d.extra {
		if !roomFor(n.free[x.column][i], x.value, k) {
			return false
		}
	}
	if len(d.g.HostPorts) > 0 && (k > 0 || !n.portsFree(i, d.g.HostPorts)) {
		return false
	}
	return d.view == nil || d.view.dynamic() || d.view.check(i) == none
}

func roomFor(free, want, k int64) bool { return want <= 0 || free-k*want >= want }

// score of placing one more pod on the slot when k are already meant for it;
// higher is better.
func (d *demand) score(i int, k int64) float32 {
	n := d.n
	base := n.base[i]
	if k > 0 {
		base = n.share(i, n.alloc[colCPU][i]-n.free[colCPU][i]+k*d.cpu, n.alloc[colMemory][i]-n.free[colMemory][i]+k*d.memory)
	}
	s := d.fit * (base + float32(d.cpu)*n.invCPU[i] + float32(d.memory)*n.invMem[i])
	if d.g.Spread {
		s -= d.weights.Siblings * float32(int64(d.siblings[int32(i)])+k)
	}
	if d.static != nil {
		s += d.static[i]
	}
	return s
}

// many fills a heap of slots by score once, and takes from it pod by pod.
func (d *demand) many() []int {
	var h slotHeap
	for i := range d.n.info {
		if d.fits(i, 0) {
			h = append(h, scored{d.score(i, 0), int32(i), 0})
		}
	}
	h.init()
	out := make([]int, 0, min(d.g.Count, len(h)*128))
	for len(out) < d.g.Count && len(h) > 0 {
		top := &h[0]
		out = append(out, int(top.slot))
		top.taken++
		if d.fits(int(top.slot), int64(top.taken)) {
			top.score = d.score(int(top.slot), int64(top.taken))
		} else {
			last := len(h) - 1
			h[0] = h[last]
			h = h[:last]
		}
		h.down(0)
	}
	return out
}

type scored struct {
	score float32
	slot  int32
	taken int32
}

// slotHeap has the best score first, the lowest slot of equals.
type slotHeap []scored

func (h slotHeap) better(i, j int) bool {
	if h[i].score != h[j].score {
		return h[i].score > h[j].score
	}
	return h[i].slot < h[j].slot
}

func (h slotHeap) init() {
	for i := len(h)/2 - 1; i >= 0; i-- {
		h.down(i)
	}
}

func (h slotHeap) down(i int) {
	for {
		c := 2*i + 1
		if c >= len(h) {
			return
		}
		if c+1 < len(h) && h.better(c+1, c) {
			c++
		}
		if !h.better(c, i) {
			return
		}
		h[i], h[c] = h[c], h[i]
		i = c
	}
}
