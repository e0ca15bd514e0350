package plan

import "math"

// Room says how many more pods of the group a slot could take, by everything
// but other pods' terms.
func Room(n *Nodes, g *Group, slot int) int {
	g.Shape.judge(n)
	if !n.live[slot] || g.Shape.verdicts[slot] != fits || !n.portsFree(slot, g.HostPorts) {
		return 0
	}
	room := int64(math.MaxInt32)
	if len(g.HostPorts) > 0 {
		room = 1
	}
	for _, q := range g.Requests {
		if v := min(q.Value, most); v > 0 {
			room = min(room, max(n.Free(slot, q.Name), 0)/v)
		}
	}
	return int(room)
}

// Could says whether the slot could take a pod of the group if no other pod
// were on it.
func Could(n *Nodes, g *Group, slot int) bool {
	g.Shape.judge(n)
	if !n.live[slot] || g.Shape.verdicts[slot] != fits {
		return false
	}
	for _, q := range g.Requests {
		if c, known := n.column[q.Name]; q.Value > 0 && (!known || n.alloc[c][slot] < min(q.Value, most)) {
			return false
		}
	}
	return true
}

// Minds says whether the group's terms, or the pod's, make it matter to the
// group that the pod came or went.
func (g *Group) Minds(n *Nodes, p *Pod, came bool) bool {
	if !came && p.Terms != nil {
		for i := range p.Terms.Anti {
			if p.Terms.Anti[i].Who.covers(g.Namespace, n.peers.spaces[g.Namespace], g.Labels) {
				return true
			}
		}
	}
	if g.Terms == nil {
		return false
	}
	spaces := n.peers.spaces[p.Namespace]
	for i := range g.Terms.Affinity {
		if g.Terms.Affinity[i].Who.covers(p.Namespace, spaces, p.Labels) {
			return true
		}
	}
	for i := range g.Terms.Spread {
		if c := &g.Terms.Spread[i]; c.Hard && c.Who.covers(p.Namespace, spaces, p.Labels) {
			return true
		}
	}
	for i := range g.Terms.Anti {
		if !came && g.Terms.Anti[i].Who.covers(p.Namespace, spaces, p.Labels) {
			return true
		}
	}
	return false
}
