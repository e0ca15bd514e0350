package plan

import (
	"math"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Group is a number of pods that no decision can tell apart.
type Group struct {
	Shape     *Shape
	Requests  []state.Quantity // effective requests of one pod, "pods" included
	HostPorts []state.HostPort
	Count     int
	// Spread places the pods on nodes with the fewest of their siblings, then
	// the emptiest; otherwise they are packed onto the fullest that fits.
	Spread bool
	// Siblings counts, by node name, the pods of the same controller; only
	// read with Spread.
	Siblings map[string]int
}

// Place decides for all pods of the group, in one pass over the nodes, and
// returns the slots of those that fit, one a pod; fewer than Count means that
// the others do not fit anywhere (see Explain). It changes nothing but the
// Shape's memory of verdicts: the caller Takes what it accepts. The outcome
// equals that of Count groups of one pod, each taken before the next.
func Place(n *Nodes, g *Group) []int {
	g.Shape.judge(n)
	if g.Count <= 0 || len(n.info) == 0 {
		return nil
	}
	d := newDemand(n, g)
	if g.Count == 1 {
		var slot int
		if g.Spread || g.Shape.prefer != nil || len(d.extra) > 0 || len(g.HostPorts) > 0 {
			slot = d.bestGeneral()
		} else {
			slot = d.bestPacked()
		}
		if slot < 0 {
			return nil
		}
		return []int{slot}
	}
	return d.many()
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
	return d
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
	return len(d.g.HostPorts) == 0 || (k == 0 && n.portsFree(i, d.g.HostPorts))
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
	s := base + float32(d.cpu)*n.invCPU[i] + float32(d.memory)*n.invMem[i]
	if d.g.Spread {
		s = -s - spreadWeight*float32(int64(d.siblings[int32(i)])+k)
	}
	if p := d.g.Shape.prefer; p != nil {
		s += p[i]
	}
	return s
}

// spreadWeight makes one sibling outweigh any preference and any load.
const spreadWeight = 16

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
