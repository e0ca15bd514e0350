package plan

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Explanation says why a group's pods fit nowhere.
type Explanation struct {
	// Message is for people, in upstream's words plus the figures.
	Message string
	// Capacity: something that becomes free, or a bigger node, could help.
	Capacity bool
	// Peers: pods that come or go elsewhere, or their labels, could help.
	Peers bool
	// Fits: some node could take one more, so that the message is not all.
	Fits bool
}

// Explain judges every node against one more pod of the group.
func Explain(n *Nodes, g *Group) Explanation {
	g.Shape.judge(n)
	if n.count == 0 {
		return Explanation{Message: "no nodes available to schedule pods: none has joined this cluster", Capacity: true}
	}
	if v := g.Shape.Volumes; v != nil && v.Refuse != "" {
		return Explanation{Message: fmt.Sprintf("0/%d nodes are available: %s.", n.count, v.Refuse)}
	}
	var e Explanation
	counts := map[string]int{}
	short := map[string]int64{} // resource -> the most that is free among nodes that lack it
	v := newView(n, g)
	for i := range n.info {
		if !n.live[i] {
			continue
		}
		if v := g.Shape.verdicts[i]; v != fits {
			counts[g.Shape.text(v, &n.info[i])]++
			continue
		}
		if !n.portsFree(i, g.HostPorts) {
			e.Capacity = true
			counts["node(s) didn't have free ports for the requested pod ports"]++
			continue
		}
		lacks := false
		for _, q := range g.Requests {
			free := n.free[n.col(q.Name)][i]
			if q.Value <= 0 || free >= q.Value {
				continue
			}
			lacks, e.Capacity = true, true
			counts[q.Name]++
			if most, seen := short[q.Name]; !seen || free > most {
				short[q.Name] = free
			}
		}
		if lacks {
			continue
		}
		o := none
		if v != nil {
			o = v.check(i)
		}
		if o == none {
			e.Fits = true
			continue
		}
		counts[objections[o]]++
		e.Peers = true
	}
	lines := make([]string, 0, len(counts))
	for what, k := range counts {
		if most, ok := short[what]; ok {
			what = insufficient(what, g, most)
		}
		lines = append(lines, fmt.Sprintf("%d %s", k, what))
	}
	slices.Sort(lines)
	e.Message = fmt.Sprintf("0/%d nodes are available", n.count)
	if len(lines) > 0 {
		e.Message += ": " + strings.Join(lines, ", ")
	}
	e.Message += "."
	return e
}

func insufficient(name string, g *Group, most int64) string {
	if name == string(corev1.ResourcePods) {
		return "Too many pods"
	}
	want := g.Wanted[name]
	for _, q := range g.Requests {
		if q.Name == name && want == "" {
			want = Format(name, q.Value)
		}
	}
	return fmt.Sprintf("Insufficient %s (needs %s, most free %s)", name, want, Format(name, max(most, 0)))
}

// Format shows a value of a resource vector as a quantity: "1500m", "210Mi".
func Format(name string, v int64) string {
	switch name {
	case string(corev1.ResourceCPU):
		return resource.NewMilliQuantity(v, resource.DecimalSI).String()
	case string(corev1.ResourceMemory), string(corev1.ResourceEphemeralStorage):
		if v >= 10<<20 {
			v = v >> 20 << 20 // whole Mi are enough for people
		}
		return resource.NewQuantity(v, resource.BinarySI).String()
	}
	return resource.NewQuantity(v, resource.DecimalSI).String()
}

// WithoutFigures is a message without its "(needs ..., most free ...)": equal
// ones say the same for as long as only the figures move.
func WithoutFigures(message string) string {
	var b strings.Builder
	for {
		i := strings.Index(message, " (needs ")
		if i < 0 {
			break
		}
		j := strings.IndexByte(message[i:], ')')
		if j < 0 {
			break
		}
		b.WriteString(message[:i])
		message = message[i+j+1:]
	}
	b.WriteString(message)
	return b.String()
}
