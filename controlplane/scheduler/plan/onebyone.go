package plan

// candidate is a slot that has room for the group's pods.
type candidate struct {
	slot  int32
	taken int32
	base  float32 // all scores but those of the view
}

// oneByOne places pods that look at each other: a pass over the slots with
// room for each, over arrays of counts that each placement moves on.
func (d *demand) oneByOne() []int {
	v := d.view
	var list []candidate
	for i := range d.n.info {
		if d.fits(i, 0) {
			list = append(list, candidate{int32(i), 0, d.score(i, 0)})
		}
	}
	out := make([]int, 0, d.g.Count)
	feasible := make([]scoredByView, 0, len(list))
	for len(out) < d.g.Count {
		feasible = feasible[:0]
		for i := range list {
			slot := int(list[i].slot)
			if v.check(slot) != none {
				continue
			}
			feasible = append(feasible, scoredByView{at: int32(i), raw: v.raw(slot), crowd: v.crowd(slot)})
		}
		best := d.pick(list, feasible)
		if best < 0 {
			return out
		}
		c := &list[best]
		slot := int(c.slot)
		out = append(out, slot)
		v.place(slot)
		c.taken++
		if d.fits(slot, int64(c.taken)) {
			c.base = d.score(slot, int64(c.taken))
		} else {
			list = append(list[:best], list[best+1:]...) // the order stays: the lowest slot of equals wins
		}
	}
	return out
}

type scoredByView struct {
	at    int32
	raw   int64
	crowd float64
}

// pick adds the view's scores, normalized over what is feasible as upstream
// does, and returns the place in list of the best.
func (d *demand) pick(list []candidate, feasible []scoredByView) int {
	if len(feasible) == 0 {
		return -1
	}
	low, high := feasible[0].raw, feasible[0].raw
	least, most := -1.0, 0.0
	for i := range feasible {
		f := &feasible[i]
		low, high = min(low, f.raw), max(high, f.raw)
		if f.crowd >= 0 {
			if least < 0 || f.crowd < least {
				least = f.crowd
			}
			most = max(most, f.crowd)
		}
	}
	best, at := float32(0), -1
	for i := range feasible {
		f := &feasible[i]
		s := list[f.at].base
		if high > low {
			s += d.weights.InterPod * float32(f.raw-low) / float32(high-low)
		}
		switch {
		case len(d.view.soft) == 0 || f.crowd < 0:
		case most == 0:
			s += d.weights.Topology
		default:
			s += d.weights.Topology * float32((most+least-f.crowd)/most)
		}
		if at < 0 || s > best {
			best, at = s, int(f.at)
		}
	}
	return at
}
