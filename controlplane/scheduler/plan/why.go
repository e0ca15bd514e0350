package plan

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// whyPeers says which term objects to the slot, in which domain, and which
// pods are in the way: the figures of the filter InterPodAffinity.
func (v *view) whyPeers(slot int, o objection) (text string, holders []*Pod) {
	switch o {
	case noAffinity:
		return v.whyNoAffinity(slot), nil
	case hasAnti:
		for i := range v.anti {
			t, c := &v.g.Terms.Anti[i], &v.anti[i]
			if d := c.col.of[slot]; d >= 0 && c.counts[d] > 0 {
				holders = v.inDomain(c.col, d, func(p *Pod) bool { return t.Who.covers(p.Namespace, v.n.peers.spaces[p.Namespace], p.Labels) })
				return fmt.Sprintf(" (%s has %d pods of %s, none is wanted)", v.domain(t.Key, slot), c.counts[d], t.Who.text(v.g.Namespace)), holders
			}
		}
	case isKeptAway:
		for i := range v.away {
			c := &v.away[i]
			if d := c.col.of[slot]; d >= 0 && c.counts[d] > 0 {
				var t *Term
				holders = v.inDomain(c.col, d, func(p *Pod) bool {
					at := -1
					if p.Terms != nil {
						at = slices.IndexFunc(p.Terms.Anti, func(t Term) bool { return t.id == c.id })
					}
					if at >= 0 {
						t = &p.Terms.Anti[at]
					}
					return at >= 0
				})
				if t == nil {
					return "", nil
				}
				return fmt.Sprintf(" (%s has %d pods that keep %s away)", v.domain(t.Key, slot), c.counts[d], t.Who.text(v.g.Namespace)), holders
			}
		}
	}
	return "", nil
}

// whyNoAffinity tells the first term that nothing on the slot meets, and
// where there are such pods.
func (v *view) whyNoAffinity(slot int) string {
	for i := range v.affinity {
		t, c := &v.g.Terms.Affinity[i], &v.affinity[i]
		d := c.col.of[slot]
		if d < 0 {
			return fmt.Sprintf(" (the node has no label %s)", t.Key)
		}
		if c.counts[d] > 0 {
			continue
		}
		var there []string
		for value, d := range c.col.values {
			if c.counts[d] > 0 {
				there = append(there, value)
			}
		}
		slices.Sort(there)
		where := "there are none anywhere"
		if len(there) > 0 {
			more := ""
			if len(there) > 3 {
				there, more = there[:3], fmt.Sprintf(" and %d more", len(there)-3)
			}
			where = "there are some in " + strings.Join(there, ", ") + more
		}
		return fmt.Sprintf(" (%s has no pod of %s; %s)", v.domain(t.Key, slot), t.Who.text(v.g.Namespace), where)
	}
	return ""
}

func (v *view) domain(key string, slot int) string {
	return key + "=" + v.n.info[slot].Labels[key]
}

// inDomain finds placed and nominated pods in a domain.
func (v *view) inDomain(col *domains, d int32, match func(*Pod) bool) (out []*Pod) {
	for slot, pods := range v.n.peers.pods {
		if slot >= len(col.of) || col.of[slot] != d {
			continue
		}
		for _, p := range pods {
			if match(p) {
				out = append(out, p)
			}
		}
	}
	for _, ghost := range v.g.Ghosts {
		if col.of[ghost.Slot] == d && match(ghost.Pod) {
			out = append(out, ghost.Pod)
		}
	}
	slices.SortFunc(out, func(a, b *Pod) int { return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name)) })
	return out
}

// text is the selection for people who know their own namespace.
func (w *Who) text(own string) string {
	s := selectorText(w.pods)
	if w.spaces != nil {
		return s + " in namespaces of " + selectorText(w.spaces)
	}
	if len(w.namespaces) == 1 && w.namespaces[0] == own {
		return s
	}
	return s + " in " + strings.Join(w.namespaces, ", ")
}

// whyNoMatch tells the first label of selector and required node affinity
// that the node does not have as wanted, of the terms the first.
func (s *Shape) whyNoMatch(n *Node) string {
	keys := make([]string, 0, len(s.Selector))
	for k := range s.Selector {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		if w, ok := n.Labels[k]; !ok || w != s.Selector[k] {
			return fmt.Sprintf(" (wants %s=%s, the node %s)", k, s.Selector[k], has(n, k))
		}
	}
	if s.Required == nil {
		return ""
	}
	for i := range s.Required.NodeSelectorTerms {
		t := &s.Required.NodeSelectorTerms[i]
		also := ""
		if more := len(s.Required.NodeSelectorTerms) - 1; more > 0 {
			also = fmt.Sprintf("; it meets none of %d other terms either", more)
		}
		for j := range t.MatchExpressions {
			r := &t.MatchExpressions[j]
			if w, ok := n.Labels[r.Key]; !matchRequirement(r, w, ok) {
				return fmt.Sprintf(" (wants %s, the node %s%s)", requirement(r), has(n, r.Key), also)
			}
		}
		for j := range t.MatchFields {
			if r := &t.MatchFields[j]; r.Key != "metadata.name" || !matchRequirement(r, n.Name, true) {
				return fmt.Sprintf(" (wants %s%s)", requirement(r), also)
			}
		}
	}
	return ""
}

// handlers are what the node's labels say it runs.
func handlers(n *Node) string {
	var list []string
	for k, v := range n.Labels {
		if h, ok := strings.CutPrefix(k, RuntimeLabel("")); ok && v == "true" {
			list = append(list, h)
		}
	}
	if len(list) == 0 {
		return "none"
	}
	slices.Sort(list)
	return strings.Join(list, ", ")
}

func requirement(r *corev1.NodeSelectorRequirement) string {
	s := r.Key + " " + string(r.Operator)
	if len(r.Values) > 0 {
		s += " [" + strings.Join(r.Values, ", ") + "]"
	}
	return s
}

func has(n *Node, key string) string {
	if v, ok := n.Labels[key]; ok {
		return "has " + key + "=" + v
	}
	return "has no label " + key
}
