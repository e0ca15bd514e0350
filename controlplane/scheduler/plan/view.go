package plan

import "slices"

// view is how a group's pods see the others: the counts of everything that
// their terms, and others' terms about them, speak of. It is built from the
// nodes once a group and moved on with every pod of the group that gets a
// place.
type view struct {
	n *Nodes
	g *Group
	// away are the anti-affinity terms of placed and nominated pods that
	// select the group's, by the domains of those that have them.
	away     []domainCount
	hard     []hardSpread
	soft     []softSpread
	affinity []domainCount
	// selected are the pods, anywhere, that the required affinity selects.
	selected int64
	// selfAffinity: the group's own pods are such pods.
	selfAffinity bool
	anti         []domainCount
	scores       []domainScore
}

// domainCount counts pods by domain of one term's topology key.
type domainCount struct {
	col    *domains
	counts []int32
	self   bool   // the group's own pods count
	id     string // of the term; away only
}

func (c *domainCount) add(slot int) {
	if d := c.col.of[slot]; c.self && d >= 0 {
		c.counts[d]++
	}
}

// domainScore sums weights by domain of one topology key.
type domainScore struct {
	key    string
	col    *domains
	scores []int64
	self   int64 // what one more pod of the group adds to its domain
}

// newView returns nil if nothing speaks of the group's pods and they speak
// of nothing.
func newView(n *Nodes, g *Group) *view {
	t := g.Terms
	if t == nil && len(n.peers.held) == 0 && len(g.Ghosts) == 0 {
		return nil
	}
	v := &view{n: n, g: g}
	v.addHeld()
	v.addGhostTerms()
	if t == nil {
		if len(v.away) == 0 && len(v.scores) == 0 {
			return nil
		}
		return v
	}
	v.addAffinity()
	for i := range t.Anti {
		v.anti = append(v.anti, v.countBy(&t.Anti[i].Who, t.Anti[i].Key))
	}
	for i := range t.Prefer {
		v.addPreference(&t.Prefer[i])
	}
	v.addSpread()
	v.addGhosts()
	return v
}

// dynamic: a placement of the group changes what the next sees.
func (v *view) dynamic() bool { return v.g.Terms != nil }

func (v *view) spaces() map[string]string { return v.n.peers.spaces[v.g.Namespace] }

// selects says whether the selection has the group's own pods.
func (v *view) selects(w *Who) bool { return w.covers(v.g.Namespace, v.spaces(), v.g.Labels) }

// keptAway finds or makes the counts of one term that keeps pods away.
func (v *view) keptAway(t *Term) *domainCount {
	for i := range v.away {
		if v.away[i].id == t.id {
			return &v.away[i]
		}
	}
	col := v.n.topology(t.Key)
	v.away = append(v.away, domainCount{col: col, counts: make([]int32, len(col.values)), id: t.id})
	return &v.away[len(v.away)-1]
}

// addHeld looks at the terms of placed pods that select the group's.
func (v *view) addHeld() {
	if len(v.n.peers.held) == 0 {
		return
	}
	for _, id := range v.n.heldFor(v.g.Namespace, v.g.Labels) {
		h := v.n.peers.held[id]
		col := v.n.topology(h.term.Key)
		if h.required {
			away := v.keptAway(h.term)
			for slot, k := range h.slots {
				if d := col.of[slot]; d >= 0 {
					away.counts[d] += k
				}
			}
			continue
		}
		s := v.score(h.term.Key)
		for slot, k := range h.slots {
			if d := col.of[slot]; d >= 0 {
				s.scores[d] += int64(h.term.Weight) * int64(k)
			}
		}
	}
}

// addGhostTerms lets the anti-affinity of nominated pods keep others away.
func (v *view) addGhostTerms() {
	for _, ghost := range v.g.Ghosts {
		if ghost.Pod.Terms == nil {
			continue
		}
		for i := range ghost.Pod.Terms.Anti {
			if t := &ghost.Pod.Terms.Anti[i]; v.selects(&t.Who) {
				away := v.keptAway(t)
				if d := away.col.of[ghost.Slot]; d >= 0 {
					away.counts[d]++
				}
			}
		}
	}
}

// addGhosts counts nominated pods against the group: they are never what it
// has affinity to.
func (v *view) addGhosts() {
	for _, ghost := range v.g.Ghosts {
		p := ghost.Pod
		spaces := v.n.peers.spaces[p.Namespace]
		for i := range v.anti {
			if d := v.anti[i].col.of[ghost.Slot]; d >= 0 && v.g.Terms.Anti[i].Who.covers(p.Namespace, spaces, p.Labels) {
				v.anti[i].counts[d]++
			}
		}
		for i := range v.hard {
			h := &v.hard[i]
			if d := h.col.of[ghost.Slot]; d >= 0 && h.eligible[ghost.Slot] && !h.Who.pods.Empty() && h.Who.covers(p.Namespace, spaces, p.Labels) {
				if h.ghosts == nil {
					h.ghosts = make([]int32, len(h.counts))
				}
				h.ghosts[d]++
			}
		}
	}
}

func (v *view) score(key string) *domainScore {
	for i := range v.scores {
		if v.scores[i].key == key {
			return &v.scores[i]
		}
	}
	col := v.n.topology(key)
	v.scores = append(v.scores, domainScore{key: key, col: col, scores: make([]int64, len(col.values))})
	return &v.scores[len(v.scores)-1]
}

// countBy counts the pods of a selection by domain.
func (v *view) countBy(w *Who, key string) domainCount {
	return v.fold(v.n.selection(false, w), key, v.selects(w))
}

func (v *view) fold(q *query, key string, self bool) domainCount {
	c := domainCount{col: v.n.topology(key), self: self}
	c.counts = make([]int32, len(c.col.values))
	for slot, d := range c.col.of {
		if d >= 0 {
			c.counts[d] += q.counts[slot]
		}
	}
	return c
}

// addAffinity: a pod counts for required affinity only if every term selects
// it (as upstream).
func (v *view) addAffinity() {
	terms := v.g.Terms.Affinity
	if len(terms) == 0 {
		return
	}
	all := make([]*Who, len(terms))
	v.selfAffinity = true
	for i := range terms {
		all[i] = &terms[i].Who
		v.selfAffinity = v.selfAffinity && v.selects(all[i])
	}
	q := v.n.selection(false, all...)
	for i := range terms {
		c := v.fold(q, terms[i].Key, v.selfAffinity)
		for _, k := range c.counts {
			v.selected += int64(k)
		}
		v.affinity = append(v.affinity, c)
	}
	// As existing pods they are worth something to each other.
	for i := range terms {
		if v.selects(&terms[i].Who) {
			v.score(terms[i].Key).self += int64(terms[i].Weight)
		}
	}
}

func (v *view) addPreference(t *Term) {
	c := v.countBy(&t.Who, t.Key)
	s := v.score(t.Key)
	for d, k := range c.counts {
		s.scores[d] += int64(t.Weight) * int64(k)
	}
	if c.self { // as the incoming pod, and as one that is there
		s.self += 2 * int64(t.Weight)
	}
}

// place moves the view on: one more pod of the group is on the slot.
func (v *view) place(slot int) {
	for i := range v.hard {
		v.hard[i].place(slot)
	}
	for i := range v.soft {
		if v.soft[i].eligible[slot] {
			v.soft[i].add(slot)
		}
	}
	for i := range v.affinity {
		v.affinity[i].add(slot)
	}
	if v.selfAffinity && len(v.affinity) > 0 {
		v.selected++
	}
	for i := range v.anti {
		v.anti[i].add(slot)
	}
	for i := range v.scores {
		s := &v.scores[i]
		if d := s.col.of[slot]; d >= 0 {
			s.scores[d] += s.self
		}
	}
}

// Objections of the filters that look at other pods, in upstream's order.
type objection uint8

const (
	none objection = iota
	noTopology
	skewed
	noAffinity
	hasAnti
	isKeptAway
)

var objections = map[objection]string{
	noTopology: "node(s) didn't match pod topology spread constraints (missing required label)",
	skewed:     "node(s) didn't match pod topology spread constraints",
	noAffinity: "node(s) didn't match pod affinity rules",
	hasAnti:    "node(s) didn't match pod anti-affinity rules",
	isKeptAway: "node(s) didn't satisfy existing pods anti-affinity rules",
}

// check says what speaks against one more pod of the group on the slot.
func (v *view) check(slot int) objection {
	if o, _ := v.spreadObjection(slot); o != none {
		return o
	}
	return v.checkPeers(slot)
}

// checkPeers is what affinity and anti-affinity say.
func (v *view) checkPeers(slot int) objection {
	if len(v.affinity) > 0 {
		there := true
		for i := range v.affinity {
			d := v.affinity[i].col.of[slot]
			if d < 0 {
				return noAffinity
			}
			there = there && v.affinity[i].counts[d] > 0
		}
		// The first of pods that want to be together may go anywhere.
		if !there && (v.selected > 0 || !v.selfAffinity) {
			return noAffinity
		}
	}
	for i := range v.anti {
		if d := v.anti[i].col.of[slot]; d >= 0 && v.anti[i].counts[d] > 0 {
			return hasAnti
		}
	}
	for i := range v.away {
		if d := v.away[i].col.of[slot]; d >= 0 && v.away[i].counts[d] > 0 {
			return isKeptAway
		}
	}
	return none
}

// raw is the slot's inter-pod score before it is normalized.
func (v *view) raw(slot int) int64 {
	var sum int64
	for i := range v.scores {
		if d := v.scores[i].col.of[slot]; d >= 0 {
			sum += v.scores[i].scores[d]
		}
	}
	return sum
}

// normalized maps raw scores of the slots to 0..1, as upstream does.
func normalized(slots []int32, raw func(slot int) int64) []float32 {
	out := make([]float32, len(slots))
	values := make([]int64, len(slots))
	for i, slot := range slots {
		values[i] = raw(int(slot))
	}
	if len(values) == 0 {
		return out
	}
	low, high := slices.Min(values), slices.Max(values)
	if high > low {
		for i, x := range values {
			out[i] = float32(x-low) / float32(high-low)
		}
	}
	return out
}
