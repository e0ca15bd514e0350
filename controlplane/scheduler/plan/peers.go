package plan

import (
	"slices"
	"strconv"
	"strings"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// Pod is a placed pod: what it takes of its node, and what others' terms see
// of it. Its fields do not change while it is placed, but for Rank and Doomed.
type Pod struct {
	UID, Namespace, Name string
	Labels               map[string]string
	Requests             []state.Quantity
	HostPorts            []state.HostPort
	// Terminating pods take room, but do not count for topology spread.
	Terminating bool
	Terms       *Terms // nil: none
	// Fixed pods are never preempted: nothing that the API deletes stops them.
	Fixed bool
	// Rank is read before a preemption looks at the pod; nil: not yet.
	Rank *Rank
	// Doomed: it was chosen as a victim, and its deletion is on its way.
	Doomed bool

	at int32 // its place in the slot's list
}

// Rank orders pods by importance: priority, then age.
type Rank struct {
	Priority int32
	Since    int64 // Unix seconds
}

// peers is what Nodes knows of placed pods beyond what they take.
type peers struct {
	pods [][]*Pod // by slot
	// spaces are the namespaces' labels.
	spaces map[string]map[string]string
	// queries are selections of pods that somebody asked for, counted by slot
	// as pods come and go.
	queries map[string]*query
	// held are the terms of placed pods that concern others.
	held map[string]*held
	// columns are the domains of the topology keys that somebody asked for.
	columns map[string]*domains
}

// maxQueries bounds the remembered selections: beyond, all are forgotten and
// counted again when they are asked for.
const maxQueries = 1024

// query counts the pods by slot that every one of its selections covers.
type query struct {
	all    []*Who
	living bool // without terminating pods
	counts []int32
}

func (q *query) covers(n *Nodes, p *Pod) bool {
	if q.living && p.Terminating {
		return false
	}
	spaces := n.peers.spaces[p.Namespace]
	for _, w := range q.all {
		if !w.covers(p.Namespace, spaces, p.Labels) {
			return false
		}
	}
	return true
}

func (q *query) add(slot int, by int32) {
	for len(q.counts) <= slot {
		q.counts = append(q.counts, 0)
	}
	q.counts[slot] += by
}

// held is a term of placed pods, by the slots of those that have it.
type held struct {
	term *Term
	// required anti-affinity keeps pods away; others are scored.
	required bool
	slots    map[int32]int32
}

// SetNamespace tells a namespace's labels; nil when it is gone.
func (n *Nodes) SetNamespace(name string, labels map[string]string) (changed bool) {
	if old, known := n.peers.spaces[name]; known == (labels != nil) && sameLabels(old, labels) {
		return false
	}
	if labels == nil {
		delete(n.peers.spaces, name)
	} else {
		n.peers.spaces[name] = labels
	}
	for id, q := range n.peers.queries {
		if slices.ContainsFunc(q.all, func(w *Who) bool { return w.spaces != nil }) {
			delete(n.peers.queries, id)
		}
	}
	return true
}

// Add places a pod on a slot.
func (n *Nodes) Add(slot int, p *Pod) {
	n.Take(slot, p.Requests, p.HostPorts)
	p.at = int32(len(n.peers.pods[slot]))
	n.peers.pods[slot] = append(n.peers.pods[slot], p)
	n.tell(slot, p, 1)
}

// Drop undoes Add.
func (n *Nodes) Drop(slot int, p *Pod) {
	list := n.peers.pods[slot]
	if int(p.at) >= len(list) || list[p.at] != p {
		return
	}
	last := len(list) - 1
	list[p.at] = list[last]
	list[p.at].at = p.at
	list[last] = nil
	n.peers.pods[slot] = list[:last]
	n.Give(slot, p.Requests, p.HostPorts)
	n.tell(slot, p, -1)
}

// Pods are the pods on a slot; not to be modified.
func (n *Nodes) Pods(slot int) []*Pod { return n.peers.pods[slot] }

// tell counts a pod where somebody asked for it, and its own terms.
func (n *Nodes) tell(slot int, p *Pod, by int32) {
	for _, q := range n.peers.queries {
		if q.covers(n, p) {
			q.add(slot, by)
		}
	}
	if p.Terms == nil {
		return
	}
	for i := range p.Terms.Affinity {
		n.hold(slot, &p.Terms.Affinity[i], false, by)
	}
	for i := range p.Terms.Anti {
		n.hold(slot, &p.Terms.Anti[i], true, by)
	}
	for i := range p.Terms.Prefer {
		n.hold(slot, &p.Terms.Prefer[i], false, by)
	}
}

func (n *Nodes) hold(slot int, t *Term, required bool, by int32) {
	id := heldID(t, required)
	h := n.peers.held[id]
	if h == nil {
		h = &held{term: t, required: required, slots: map[int32]int32{}}
		n.peers.held[id] = h
	}
	if h.slots[int32(slot)] += by; h.slots[int32(slot)] <= 0 {
		delete(h.slots, int32(slot))
		if len(h.slots) == 0 {
			delete(n.peers.held, id)
		}
	}
}

func heldID(t *Term, required bool) string {
	if required {
		return "!" + t.id
	}
	return strconv.Itoa(int(t.Weight)) + t.id
}

// Spoken names the terms that speak of such a pod, of placed pods and of the
// others given, in a stable order: pods of which the same is spoken are alike.
func (n *Nodes) Spoken(namespace string, labels map[string]string, others []*Terms) string {
	if len(n.peers.held) == 0 && len(others) == 0 {
		return ""
	}
	ids := n.heldFor(namespace, labels)
	for _, t := range others {
		for _, list := range [][]Term{t.Affinity, t.Anti, t.Prefer} {
			for i := range list {
				if list[i].Who.covers(namespace, n.peers.spaces[namespace], labels) {
					ids = append(ids, list[i].id)
				}
			}
		}
	}
	return strings.Join(ids, "\n")
}

func (n *Nodes) heldFor(namespace string, labels map[string]string) []string {
	var ids []string
	for id, h := range n.peers.held {
		if h.term.Who.covers(namespace, n.peers.spaces[namespace], labels) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// selection finds or makes the counts of a selection.
func (n *Nodes) selection(living bool, all ...*Who) *query {
	id := strconv.FormatBool(living)
	for _, w := range all {
		id += "&" + w.id
	}
	q := n.peers.queries[id]
	if q == nil {
		if len(n.peers.queries) >= maxQueries {
			clear(n.peers.queries)
		}
		q = &query{all: all, living: living}
		for slot, pods := range n.peers.pods {
			for _, p := range pods {
				if q.covers(n, p) {
					q.add(slot, 1)
				}
			}
		}
		n.peers.queries[id] = q
	}
	if grow := len(n.info) - len(q.counts); grow > 0 {
		q.counts = append(q.counts, make([]int32, grow)...)
	}
	return q
}

// domains numbers the values of one node label.
type domains struct {
	values   map[string]int32
	of       []int32 // by slot; -1: the node has no such label
	versions []uint32
	latest   uint32
}

// topology finds or makes the domains of a label, up to date.
func (n *Nodes) topology(key string) *domains {
	d := n.peers.columns[key]
	if d == nil || len(d.values) > 2*len(n.info)+64 { // most are of nodes that are gone
		d = &domains{values: map[string]int32{}}
		n.peers.columns[key] = d
	}
	if d.latest == n.latest && len(d.of) == len(n.info) {
		return d
	}
	for len(d.of) < len(n.info) {
		d.of, d.versions = append(d.of, -1), append(d.versions, 0)
	}
	for i := range n.info {
		if d.versions[i] == n.version[i] {
			continue
		}
		d.versions[i], d.of[i] = n.version[i], -1
		if v, ok := n.info[i].Labels[key]; ok && n.live[i] {
			id, known := d.values[v]
			if !known {
				id = int32(len(d.values))
				d.values[v] = id
			}
			d.of[i] = id
		}
	}
	d.latest = n.latest
	return d
}
