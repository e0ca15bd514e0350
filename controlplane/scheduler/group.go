package scheduler

import (
	"strconv"
	"strings"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// podGroup is a plan.Group with the pods that it stands for.
type podGroup struct {
	plan.Group
	pods []*waitingPod
}

// group joins pods that no decision can tell apart, in the order in which
// the first of each group stands in the queue. Pods of different priority
// are never joined, so that a later one cannot overtake.
func (s *Scheduler) group(pods []*waitingPod) []*podGroup {
	type id struct {
		shape    *plan.Shape
		spread   bool
		priority int32
		rest     string
	}
	var out []*podGroup
	known := map[id]*podGroup{}
	snap := s.reader.Snapshot()
	for _, p := range pods {
		h := &p.rec.Header
		owner := ""
		if p.class.spread {
			if o, ok := loop.ControllerOf(p.rec); ok {
				owner = o.UID
			}
		}
		k := id{p.class.shape, p.class.spread, p.class.priority, requestsText(h, owner)}
		g := known[k]
		if g == nil {
			g = &podGroup{Group: plan.Group{Shape: p.class.shape, Requests: h.Requests, HostPorts: h.HostPorts, Spread: p.class.spread}}
			if owner != "" {
				g.Siblings = s.siblings(snap, owner)
			}
			known[k] = g
			out = append(out, g)
		}
		g.pods = append(g.pods, p)
		g.Count++
	}
	return out
}

func requestsText(h *state.Header, owner string) string {
	var b strings.Builder
	b.WriteString(owner)
	for _, q := range h.Requests {
		b.WriteByte(' ')
		b.WriteString(q.Name)
		b.WriteByte('=')
		b.WriteString(strconv.FormatInt(q.Value, 10))
	}
	for _, p := range h.HostPorts {
		b.WriteByte(' ')
		b.WriteString(p.IP + "/" + p.Protocol + "/")
		b.WriteString(strconv.Itoa(int(p.Port)))
	}
	return b.String()
}

// siblings counts the controller's placed pods by node.
func (s *Scheduler) siblings(snap state.Snapshot, owner string) map[string]int {
	count := map[string]int{}
	snap.ByOwner(owner, func(r *state.Record) bool {
		if p, ok := s.cache.placed[r.Header.UID]; ok {
			count[p.node]++
		}
		return true
	})
	return count
}
