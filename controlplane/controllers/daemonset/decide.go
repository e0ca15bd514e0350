package daemonset

import (
	"cmp"
	"slices"
)

// pod is one pod of the set, as far as decisions go. Pods that are being
// deleted are seen only by gone.
type pod struct {
	name    string
	current bool // of the current revision
	bound   bool
	ready   bool
	// available: ready for minReadySeconds.
	available bool
	// silent: not ready only because its node was not heard of, and that node
	// is only just back.
	silent  bool
	failed  bool // phase Failed
	done    bool // phase Succeeded
	created int64
}

// node is one node that the set is or should be on.
type node struct {
	name string
	want bool // a pod shall be there
	keep bool // one that is there may stay
	// away: the node is not ready or cannot be reached; it would want a pod.
	// Its pods are left as they are until it is back, and it takes nothing
	// from the budget.
	away bool
	// backingOff: its last pod failed a moment ago.
	backingOff bool
	// settled: a surplus pod was just removed; the rest is left for now.
	settled bool
	pods    []pod
	leaving int // pods being deleted
}

// order: what serves first, then bound ones, then the oldest.
func order(a, b pod) int {
	return cmp.Or(rank(a)-rank(b), cmp.Compare(a.created, b.created), cmp.Compare(a.name, b.name))
}

func rank(p pod) int {
	switch {
	case p.available:
		return 0
	case p.ready:
		return 1
	case p.silent: // it may serve
		return 2
	case p.bound:
		return 3
	}
	return 4
}

// strategy is how an update goes, in numbers.
type strategy struct {
	onDelete              bool
	surge, maxUnavailable int
}

// actions are what to do in one round.
type actions struct {
	create []string // nodes
	remove []string // pods
	failed []string // of these, pods that failed: say so, and back off
	done   []string // of these, pods that ended well
}

// decide says what to do: pods where they are wanted and missing, none
// where they are not, and as much of the update as the budget allows. Pure.
func decide(nodes []node, s strategy) actions {
	var p actions
	var rest []node
	for _, n := range nodes {
		if n = p.tend(n, s.surge > 0 && !s.onDelete); n.name != "" {
			rest = append(rest, n)
		}
	}
	switch {
	case s.onDelete:
	case s.surge > 0:
		p.surge(rest, s.surge, wanted(nodes))
	default:
		p.replace(rest, max(s.maxUnavailable, 1))
	}
	return p
}

func wanted(nodes []node) (n int) {
	for i := range nodes {
		if nodes[i].want {
			n++
		}
	}
	return n
}

// tend does what does not depend on the budget on one node, and returns what
// remains of it for the update; a node without a name if nothing does.
func (p *actions) tend(n node, surging bool) node {
	if !n.keep {
		for _, x := range n.pods {
			p.remove = append(p.remove, x.name)
		}
		return node{}
	}
	if n.away {
		return node{}
	}
	var running []pod
	for _, x := range n.pods {
		switch {
		case x.failed && n.backingOff:
		case x.failed:
			p.remove, p.failed = append(p.remove, x.name), append(p.failed, x.name)
		case x.done:
			p.remove, p.done = append(p.remove, x.name), append(p.done, x.name)
		default:
			running = append(running, x)
		}
	}
	slices.SortFunc(running, order)
	if n.want && len(n.pods) == 0 && (n.leaving == 0 || surging) {
		p.create = append(p.create, n.name)
	}
	if surging {
		running = p.pair(running)
	} else if len(running) > 1 {
		for _, x := range running[1:] {
			p.remove = append(p.remove, x.name)
		}
		running, n.settled = running[:1], true
	}
	n.pods = running
	return n
}

// pair keeps the oldest pod of the current revision and the oldest of
// others, and of these the one that serves.
func (p *actions) pair(running []pod) []pod {
	var now, old *pod
	var kept []pod
	for i := range running {
		x := &running[i]
		slot := &old
		if x.current {
			slot = &now
		}
		if *slot != nil {
			p.remove = append(p.remove, x.name)
			continue
		}
		*slot = x
		kept = append(kept, *x)
	}
	if now != nil && old != nil && (!old.ready && !old.silent || now.available) {
		p.remove = append(p.remove, old.name)
		return []pod{*now}
	}
	return kept
}

// replace deletes pods of old revisions: those that do not serve at once,
// the others as long as no more than max nodes are without.
func (p *actions) replace(nodes []node, most int) {
	unavailable := 0
	var candidates []string
	for _, n := range nodes {
		switch {
		case len(n.pods) == 0:
			if n.want {
				unavailable++
			}
		case n.settled && n.pods[0].available:
		case !n.pods[0].available:
			unavailable++
			if !n.pods[0].current && !n.pods[0].silent && !n.settled {
				p.remove = append(p.remove, n.pods[0].name)
			}
		case !n.pods[0].current:
			candidates = append(candidates, n.pods[0].name)
		}
	}
	p.remove = append(p.remove, candidates[:max(min(most-unavailable, len(candidates)), 0)]...)
}

// surge makes new pods beside old ones: at once where the old one does not
// serve, else as long as no more than max nodes have two. Where no pod is
// wanted any more, the old one goes once enough others serve.
func (p *actions) surge(nodes []node, most, desired int) {
	surging, available := 0, 0
	var candidates, leaving []string
	for _, n := range nodes {
		var now, old *pod
		for i := range n.pods {
			if n.pods[i].current {
				now = &n.pods[i]
			} else {
				old = &n.pods[i]
			}
		}
		if serving := cmp.Or(old, now); serving != nil && serving.available {
			available++
		}
		switch {
		case old == nil || old.silent:
		case now != nil:
			surging++ // pair waits for it
		case !n.want && !old.available:
			p.remove = append(p.remove, old.name)
		case !n.want:
			leaving = append(leaving, old.name)
		case !old.available:
			p.create = append(p.create, n.name)
		default:
			candidates = append(candidates, n.name)
		}
	}
	p.remove = append(p.remove, leaving[:max(min(available-desired, len(leaving)), 0)]...)
	p.create = append(p.create, candidates[:max(min(most-surging, len(candidates)), 0)]...)
}
