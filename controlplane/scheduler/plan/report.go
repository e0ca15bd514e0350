package plan

import (
	"cmp"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// NodeReport is what every filter says of one node.
type NodeReport struct {
	Slot     int
	Findings []Finding
}

// Fits says whether no filter objects.
func (r *NodeReport) Fits() bool {
	return !slices.ContainsFunc(r.Findings, func(f Finding) bool { return !f.OK })
}

// Finding is what one filter says of a node. Filters have upstream's names.
type Finding struct {
	Filter string
	OK     bool
	Text   string // why not
	// Figures of the resources, of NodeResourcesFit.
	Figures []Figure
	// Holders have what is missing, or are in the way: those with the host port,
	// those that affinity keeps away, or that keep this one away.
	Holders []*Pod
	// Volume is the claim that VolumeBinding objects for; nil: it is not one's.
	Volume *VolumeTerm
}

// Figure is one resource that the pod asks for, in the units of the resource
// vector (see Format).
type Figure struct {
	Resource        string
	Needs, Free, Of int64
	// Holders are the pods that take most of it; nil if enough is free.
	Holders []*Pod
}

// Report asks every filter about every node, also where one has said no.
func Report(n *Nodes, g *Group) []NodeReport {
	g.Shape.judge(n)
	v := newView(n, g)
	var out []NodeReport
	for slot := range n.info {
		if n.live[slot] {
			out = append(out, NodeReport{slot, findings(n, g, v, slot)})
		}
	}
	slices.SortFunc(out, func(a, b NodeReport) int { return cmp.Compare(n.info[a.Slot].Name, n.info[b.Slot].Name) })
	return out
}

func findings(n *Nodes, g *Group, v *view, slot int) []Finding {
	s, node := g.Shape, &n.info[slot]
	of := func(filter string, ok bool, bad verdict) Finding {
		f := Finding{Filter: filter, OK: ok}
		if !ok {
			f.Text = s.text(bad, node)
		}
		return f
	}
	spread, peers := Finding{Filter: "PodTopologySpread", OK: true}, Finding{Filter: "InterPodAffinity", OK: true}
	if v != nil {
		if o, text := v.checkSpread(slot); o != none {
			spread.OK, spread.Text = false, objections[o]+text
		}
		if o := v.checkPeers(slot); o != none {
			text, holders := v.whyPeers(slot, o)
			peers.OK, peers.Text, peers.Holders = false, objections[o]+text, holders
		}
	}
	match, volumes := of("NodeAffinity", s.matches(node), noMatch), Finding{Filter: "VolumeBinding"}
	if !match.OK {
		match.Text += s.whyNoMatch(node)
	}
	volumes.Text, volumes.Volume = s.Volumes.object(node)
	if volumes.OK = volumes.Text == ""; !volumes.OK && s.Volumes.Refuse == "" && volumes.Volume == nil {
		volumes.Text = fmt.Sprintf("node(s) did not have enough free storage (needs %s, free %s)",
			resource.NewQuantity(s.Volumes.Room, resource.BinarySI), resource.NewQuantity(max(node.VolumeRoom, 0), resource.BinarySI))
	}
	return []Finding{
		of("NodeUnschedulable", !s.isCordoned(node), cordoned),
		of("TaintToleration", s.untolerated(node) == nil, tainted),
		match,
		of("RuntimeClass", s.runs(node), noRuntime),
		portFinding(n, g, slot), roomFinding(n, g, slot), spread, peers, volumes,
	}
}

func portFinding(n *Nodes, g *Group, slot int) Finding {
	f := Finding{Filter: "NodePorts", OK: n.portsFree(slot, g.HostPorts)}
	if f.OK {
		return f
	}
	f.Text = "node(s) didn't have free ports for the requested pod ports"
	for _, p := range n.peers.pods[slot] {
		if slices.ContainsFunc(p.HostPorts, func(x state.HostPort) bool {
			return slices.ContainsFunc(g.HostPorts, func(w state.HostPort) bool { return clash(x, w) })
		}) {
			f.Holders = append(f.Holders, p)
		}
	}
	return f
}

func roomFinding(n *Nodes, g *Group, slot int) Finding {
	f := Finding{Filter: "NodeResourcesFit", OK: true}
	for _, q := range g.Requests {
		if q.Value <= 0 {
			continue
		}
		c := n.col(q.Name)
		x := Figure{Resource: q.Name, Needs: q.Value, Free: n.free[c][slot], Of: n.alloc[c][slot]}
		if x.Free < min(q.Value, most) {
			f.OK = false
			x.Holders = largest(n.peers.pods[slot], q.Name)
		}
		f.Figures = append(f.Figures, x)
	}
	if !f.OK {
		f.Text = "node(s) lack resources"
	}
	return f
}

// largest are the pods that take most of a resource.
func largest(pods []*Pod, resource string) []*Pod {
	var out []*Pod
	for _, p := range pods {
		if p.Takes(resource) > 0 {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b *Pod) int {
		return cmp.Or(cmp.Compare(b.Takes(resource), a.Takes(resource)), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// Takes says how much of a resource the pod requests.
func (p *Pod) Takes(resource string) int64 {
	for _, q := range p.Requests {
		if q.Name == resource {
			return q.Value
		}
	}
	return 0
}

func (h *hardSpread) figures(d int32) string {
	return fmt.Sprintf(" (%s has %d matching pods, the least is %d, maxSkew %d)", h.Key, h.counts[d], h.floor(), h.MaxSkew)
}
