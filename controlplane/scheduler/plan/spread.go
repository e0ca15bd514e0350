package plan

import "math"

// hardSpread is a DoNotSchedule constraint.
type hardSpread struct {
	*Constraint
	domainCount
	own      int32 // 1 if the selector selects the pod itself
	present  []bool
	domains  int32
	eligible []bool // by slot: its pods count and its domain exists
	least    int32
	atLeast  int32
	// ghosts are nominated pods by domain: they count against the group, but
	// do not raise the least of all, since it must fit both with and without
	// them. nil: none.
	ghosts []int32
}

// softSpread is a ScheduleAnyway constraint.
type softSpread struct {
	*Constraint
	domainCount
	weight   float64
	eligible []bool
	ignored  []bool // by slot: the node lacks a topology key
}

func (v *view) addSpread() {
	for _, hard := range []bool{true, false} {
		var of []*Constraint
		for i := range v.g.Terms.Spread {
			if c := &v.g.Terms.Spread[i]; c.Hard == hard {
				of = append(of, c)
			}
		}
		if len(of) == 0 {
			continue
		}
		lacks := v.lacking(of)
		for _, c := range of {
			if hard {
				v.addHard(c, lacks)
			} else {
				v.addSoft(c, lacks)
			}
		}
	}
}

// lacking marks the slots without one of the topology keys.
func (v *view) lacking(of []*Constraint) []bool {
	out := make([]bool, len(v.n.info))
	for _, c := range of {
		for slot, d := range v.n.topology(c.Key).of {
			if d < 0 {
				out[slot] = true
			}
		}
	}
	return out
}

// eligible marks the slots whose pods count for the constraint.
func (v *view) eligible(c *Constraint, lacks []bool) []bool {
	out := make([]bool, len(lacks))
	s := v.g.Shape
	for slot := range out {
		if lacks[slot] || !v.n.live[slot] {
			continue
		}
		node := &v.n.info[slot]
		verdict := s.verdicts[slot]
		if c.HonorAffinity && verdict != fits && verdict != noRuntime && (verdict == noMatch || !s.matches(node)) {
			continue
		}
		out[slot] = !c.HonorTaints || verdict != tainted && (verdict != cordoned || s.untolerated(node) == nil)
	}
	return out
}

// spreadCount counts the living pods by domain over eligible slots. An empty
// selector selects none of them (as upstream).
func (v *view) spreadCount(c *Constraint, eligible []bool) domainCount {
	out := domainCount{col: v.n.topology(c.Key)}
	out.counts = make([]int32, len(out.col.values))
	if c.Who.pods.Empty() {
		return out
	}
	out.self = v.selects(&c.Who)
	q := v.n.selection(true, &c.Who)
	for slot, d := range out.col.of {
		if d >= 0 && eligible[slot] {
			out.counts[d] += q.counts[slot]
		}
	}
	return out
}

func (v *view) addHard(c *Constraint, lacks []bool) {
	h := hardSpread{Constraint: c, eligible: v.eligible(c, lacks)}
	h.domainCount = v.spreadCount(c, h.eligible)
	h.present = make([]bool, len(h.counts))
	if v.selects(&c.Who) {
		h.own = 1
	}
	for slot, d := range h.col.of {
		if d >= 0 && h.eligible[slot] && !h.present[d] {
			h.present[d] = true
			h.domains++
		}
	}
	h.lowest()
	v.hard = append(v.hard, h)
}

func (h *hardSpread) lowest() {
	h.least, h.atLeast = math.MaxInt32, 0
	for d, k := range h.counts {
		if !h.present[d] {
			continue
		}
		if k < h.least {
			h.least, h.atLeast = k, 0
		}
		if k == h.least {
			h.atLeast++
		}
	}
}

// floor is the least count that the skew is measured from.
func (h *hardSpread) floor() int32 {
	if h.domains < h.MinDomains {
		return 0
	}
	return h.least
}

func (h *hardSpread) place(slot int) {
	if h.self && h.col.of[slot] >= 0 && h.eligible[slot] {
		h.move(h.col.of[slot], 1)
	}
}

// move counts one pod more or less in a domain.
func (h *hardSpread) move(d, by int32) {
	was := h.counts[d]
	h.counts[d] += by
	switch now := h.counts[d]; {
	case now < h.least:
		h.least, h.atLeast = now, 1
	case was == h.least && now > was:
		if h.atLeast--; h.atLeast <= 0 {
			h.lowest()
		}
	case now == h.least:
		h.atLeast++
	}
}

func (v *view) addSoft(c *Constraint, lacks []bool) {
	s := softSpread{Constraint: c, ignored: lacks, eligible: v.eligible(c, lacks)}
	s.domainCount = v.spreadCount(c, s.eligible)
	// The size of the topology: domains of nodes that could take the pod.
	seen := make([]bool, len(s.counts))
	size := 0
	for slot, d := range s.col.of {
		if d >= 0 && !lacks[slot] && v.g.Shape.verdicts[slot] == fits && !seen[d] {
			seen[d] = true
			size++
		}
	}
	s.weight = math.Log(float64(size + 2))
	v.soft = append(v.soft, s)
}

// checkSpread is spreadObjection with figures, for people.
func (v *view) checkSpread(slot int) (objection, string) {
	o, h := v.spreadObjection(slot)
	if o != skewed {
		return o, ""
	}
	return o, h.figures(h.col.of[slot])
}

func (v *view) spreadObjection(slot int) (objection, *hardSpread) {
	for i := range v.hard {
		h := &v.hard[i]
		d := h.col.of[slot]
		if d < 0 {
			return noTopology, h
		}
		count := int64(h.counts[d])
		if h.ghosts != nil {
			count += int64(h.ghosts[d])
		}
		if count+int64(h.own)-int64(h.floor()) > int64(h.MaxSkew) {
			return skewed, h
		}
	}
	return none, nil
}

// crowd is how full the slot's domains of the ScheduleAnyway constraints are;
// negative if the slot is not to be scored.
func (v *view) crowd(slot int) float64 {
	var sum float64
	for i := range v.soft {
		s := &v.soft[i]
		if s.ignored[slot] {
			return -1
		}
		sum += float64(s.counts[s.col.of[slot]])*s.weight + float64(s.MaxSkew-1)
	}
	return math.Round(sum)
}
