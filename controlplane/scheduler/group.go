package scheduler

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/controllers/loop"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
	"github.com/dunlin-project/dunlin/manifests"
)

// podGroup is a plan.Group with the pods that it stands for.
type podGroup struct {
	plan.Group
	id   groupID
	pods []*waitingPod
}

// groupID tells apart what a decision can tell apart.
type groupID struct {
	shape    *plan.Shape
	terms    *plan.Terms
	profile  *Profile
	spread   bool
	priority int32
	never    bool
	rest     string
}

// group joins pods that no decision can tell apart, in the order in which
// the first of each group stands in the queue. Pods of different priority
// are never joined, so that a later one cannot overtake.
func (s *Scheduler) group(pods []*waitingPod) []*podGroup {
	var out []*podGroup
	known := map[groupID]*podGroup{}
	snap := s.reader.Snapshot()
	terms := s.termsOf(pods)
	located := map[*class]string{}
	for _, p := range pods {
		h := &p.rec.Header
		owner := ""
		if p.class.spread {
			if o, ok := loop.ControllerOf(p.rec); ok {
				owner = o.UID
			}
		}
		wanted := s.wanted(p.rec)
		k := groupID{p.class.shape, p.class.terms, p.class.profile, p.class.spread, p.class.priority, p.class.never, requestsText(h, owner)}
		if p.nominated != "" {
			k.rest += " for " + h.UID // alone
		}
		k.rest += "\n" + s.cache.nodes.Spoken(h.Key.Namespace, h.Labels, terms)
		images, seen := located[p.class]
		if !seen {
			images = s.cache.nodes.Located(p.class.images)
			located[p.class] = images
		}
		if images != "" {
			k.rest += "\n" + strconv.Itoa(len(p.class.images)) + images
		}
		if p.class.terms != nil {
			k.rest += "\n" + h.Key.Namespace + labelsText(h.Labels)
		}
		for _, name := range slices.Sorted(maps.Keys(wanted)) {
			k.rest += " " + name + "=" + wanted[name]
		}
		g := known[k]
		if g == nil {
			g = &podGroup{id: k, Group: plan.Group{Shape: p.class.shape, Requests: h.Requests, HostPorts: h.HostPorts, Spread: p.class.spread, Wanted: wanted,
				Namespace: h.Key.Namespace, Labels: h.Labels, Terms: p.class.terms}}
			if images != "" {
				g.Images = p.class.images
			}
			if f := p.class.profile; f != nil {
				g.Weights, g.Least = &f.weights, f.ScoringStrategy == LeastAllocated
			}
			if owner != "" {
				g.Siblings = s.siblings(snap, owner)
			}
			known[k] = g
			out = append(out, g)
		}
		g.pods = append(g.pods, p)
		p.group = g
		g.Count++
	}
	return out
}

// wanted reads from the pod itself what is too much for its header.
func (s *Scheduler) wanted(rec *state.Record) map[string]string {
	if !slices.ContainsFunc(rec.Header.Requests, func(q state.Quantity) bool { return q.Value == state.MaxQuantity }) {
		return nil
	}
	obj, err := s.cfg.Store.Decode(rec)
	pod, ok := obj.(*corev1.Pod)
	if err != nil || !ok {
		return nil // the capped figure is not wrong, only not exact
	}
	asked := manifests.PodRequests(pod)
	out := map[string]string{}
	for _, q := range rec.Header.Requests {
		if v, ok := asked[corev1.ResourceName(q.Name)]; ok && q.Value == state.MaxQuantity {
			out[q.Name] = v.String()
		}
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

// termsOf are the terms of the batch, each of which may concern its other
// pods, and of nominated pods.
func (s *Scheduler) termsOf(pods []*waitingPod) (out []*plan.Terms) {
	seen := map[*plan.Terms]bool{}
	add := func(t *plan.Terms) {
		if t != nil && !seen[t] {
			seen[t] = true
			out = append(out, t)
		}
	}
	for _, p := range pods {
		add(p.class.terms)
	}
	if s.ghosts.terms > 0 {
		for _, x := range s.ghosts.byUID {
			add(x.pod.Terms)
		}
	}
	slices.SortFunc(out, func(a, b *plan.Terms) int { return strings.Compare(a.ID, b.ID) })
	return out
}

func labelsText(labels map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		b.WriteString(" " + k + "=" + labels[k])
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
