package manifests

import (
	"sort"
	"strings"
)

// nearest gives up to three names that could be meant by name: equal but for
// case, or few edits away.
func nearest(name string, known []string) []string {
	if len(name) > 60 {
		return nil
	}
	type scored struct {
		name string
		n    int
	}
	var found []scored
	limit := 1 + len(name)/5
	if limit > 3 {
		limit = 3
	}
	for _, k := range known {
		if strings.EqualFold(k, name) {
			return []string{k}
		}
		if n := edits(strings.ToLower(name), strings.ToLower(k), limit); n <= limit {
			found = append(found, scored{k, n})
		}
	}
	sort.SliceStable(found, func(i, j int) bool { return found[i].n < found[j].n })
	var out []string
	for _, f := range found {
		if f.n > found[0].n+1 || len(out) == 3 {
			break
		}
		out = append(out, f.name)
	}
	return out
}

// edits is the distance by insertions, deletions, substitutions and swaps of
// neighbours; more than limit is cut short.
func edits(a, b string, limit int) int {
	if d := len(a) - len(b); d > limit || -d > limit {
		return limit + 1
	}
	prev2, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], prev2[j-2]+1)
			}
		}
		prev2, prev, cur = prev, cur, prev2
	}
	return prev[len(b)]
}

// nearField hints at a key that was meant to be name.
func nearField(n *node, name string) string {
	var keys []string
	for _, p := range n.pairs {
		keys = append(keys, p.key.value)
	}
	if near := nearest(name, keys); len(near) > 0 {
		return "there is " + near[0] + "; did you mean " + name + "?"
	}
	return ""
}
