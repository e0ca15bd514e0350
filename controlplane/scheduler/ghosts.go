package scheduler

import "github.com/dunlin-project/dunlin/controlplane/scheduler/plan"

// ghost is a pod that waits for the room of its nominated node. It takes
// that room already, for all pods that are not more important than it.
type ghost struct {
	pod      plan.Pod
	node     string
	priority int32
	// seen: the API said so; when it no longer does, somebody took it back.
	seen bool
	// taken is the slot whose room it takes, plus one; 0 is none.
	taken int
}

// ghosts are the nominations of this term, rebuilt from
// status.nominatedNodeName. Not safe for concurrent use.
type ghosts struct {
	nodes    *plan.Nodes
	byUID    map[string]*ghost
	priority int32  // the level that is applied
	except   string // the pod that is being decided
	dirty    bool
	terms    int // how many have terms
}

func newGhosts(nodes *plan.Nodes) *ghosts {
	return &ghosts{nodes: nodes, byUID: map[string]*ghost{}, dirty: true}
}

// set nominates a node for a pod.
func (g *ghosts) set(x *ghost) {
	g.remove(x.pod.UID)
	g.byUID[x.pod.UID] = x
	if x.pod.Terms != nil {
		g.terms++
	}
	g.dirty = true
}

// remove takes a nomination back, if there is one.
func (g *ghosts) remove(uid string) {
	x := g.byUID[uid]
	if x == nil {
		return
	}
	g.take(x, false)
	delete(g.byUID, uid)
	if x.pod.Terms != nil {
		g.terms--
	}
}

// release gives the room on a node back before the node goes.
func (g *ghosts) release(node string) {
	for _, x := range g.byUID {
		if x.node == node {
			g.take(x, false)
		}
	}
	g.dirty = true
}

// level makes the ghosts take their room that come before pods of the
// priority: all that are not less important, but for the pod itself.
func (g *ghosts) level(priority int32, except string) {
	switch {
	case g.dirty || g.priority != priority:
		for uid, x := range g.byUID {
			g.take(x, x.priority >= priority && uid != except)
		}
	case g.except != except:
		if x := g.byUID[g.except]; x != nil {
			g.take(x, x.priority >= priority)
		}
		if x := g.byUID[except]; x != nil {
			g.take(x, false)
		}
	}
	g.priority, g.except, g.dirty = priority, except, false
}

func (g *ghosts) take(x *ghost, want bool) {
	slot, known := g.nodes.Slot(x.node)
	switch {
	case want && x.taken == 0 && known:
		g.nodes.Take(slot, x.pod.Requests, x.pod.HostPorts)
		x.taken = slot + 1
	case !want && x.taken != 0:
		g.nodes.Give(x.taken-1, x.pod.Requests, x.pod.HostPorts)
		x.taken = 0
	}
}

// list are the ghosts that take their room now.
func (g *ghosts) list() (out []plan.Ghost) {
	for _, x := range g.byUID {
		if x.taken != 0 {
			out = append(out, plan.Ghost{Slot: x.taken - 1, Pod: &x.pod})
		}
	}
	return out
}
