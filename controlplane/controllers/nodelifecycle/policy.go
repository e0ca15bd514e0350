package nodelifecycle

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/dunlin-project/dunlin/wire"
)

// DefaultZone is the zone of nodes without a zone label.
const DefaultZone = "default"

// ZoneNode is one node as the freeze rules see it.
type ZoneNode struct {
	Name, Zone string
	Silent     bool
}

// Frozen decides in which zones silence is held against the link and not
// against the nodes: in any zone when more than half and at least three of
// its nodes are silent together; in a zone other than the leader's also when
// all of it is silent, whatever its size. Pure.
func Frozen(nodes []ZoneNode, leaderZone string) map[string]bool {
	total, silent := map[string]int{}, map[string]int{}
	for _, n := range nodes {
		total[n.Zone]++
		if n.Silent {
			silent[n.Zone]++
		}
	}
	out := map[string]bool{}
	for zone, all := range total {
		k := silent[zone]
		if (k >= 3 && 2*k > all) || (zone != leaderZone && k == all) {
			out[zone] = true
		}
	}
	return out
}

// overdue is the age from which a lease that has not run out is in doubt: it is
// renewed every 2 s, and again 0.9 s after a renewal without an answer. Nodes
// that fall silent in one moment renewed last within 2 s of each other, so when
// the first lease runs out, after 6.5 s, those of all the others are 4.5 s old.
const overdue = 3500 * time.Millisecond

// doubtful are the zones with a silent node that would be frozen if the nodes
// whose leases are overdue were silent, too: soon they are, or have renewed.
// Without this the first node of a zone whose link breaks would be given up
// before the others' leases ran out. Pure.
func doubtful(nodes []ZoneNode, leases map[string]LeaseInfo, leaderZone string) map[string]bool {
	list, silent := slices.Clone(nodes), map[string]bool{}
	for i, n := range list {
		if n.Silent {
			silent[n.Zone] = true
		}
		list[i].Silent = n.Silent || leases[n.Name].Age > overdue
	}
	out := Frozen(list, leaderZone)
	maps.DeleteFunc(out, func(zone string, _ bool) bool { return !silent[zone] })
	return out
}

// Bucket limits the evictions of one zone: one node at once, then one more
// each Every.
type Bucket struct {
	Every time.Duration
	last  time.Time
	used  bool
}

// Take says whether one more node may go now. Times are monotonic.
func (b *Bucket) Take(now time.Time) bool {
	if b.used && now.Sub(b.last) < b.Every {
		return false
	}
	b.used, b.last = true, now
	return true
}

// Wait is how long until Take would succeed.
func (b *Bucket) Wait(now time.Time) time.Duration {
	if !b.used {
		return 0
	}
	return max(b.Every-now.Sub(b.last), 0)
}

// verdict is what the assessment came to for one node.
type verdict struct {
	silent bool // lease expired
	evict  bool // its pods may be moved
	frozen bool // its zone is frozen, or may be about to: touch nothing of its pods
	stale  bool // back, but has not reported
	// returning: its pods are not moved yet, since others of its zone came back
	// a moment ago.
	returning bool
	alone     bool // it is the only node of its zone
	only      bool // and of the cluster
	known     bool // renewed or expired in this term: the verdict is worth acting on
}

// assessor turns lease snapshots into verdicts. It owns what must be
// remembered between two looks. Not safe for concurrent use.
type assessor struct {
	leaderZone string
	every      time.Duration
	nodes      map[string]*watched
	zones      map[string]*Bucket
	froze      map[string]time.Time // zone: when it was seen frozen last
}

type watched struct {
	proven  bool // a renewal or an expiry was seen in this term
	granted bool
	silent  bool
	held    bool      // silent under the leader before, with its zone
	since   time.Time // silent since
}

func newAssessor(leaderZone string, every time.Duration) *assessor {
	return &assessor{leaderZone: cmp.Or(leaderZone, DefaultZone), every: every, nodes: map[string]*watched{}, zones: map[string]*Bucket{}, froze: map[string]time.Time{}}
}

// resume takes over from the leader before: nodes, with their zones, whose pods
// it held back because of their zone. They may be on their way back: nodes of
// their zone may have come a moment ago.
func (a *assessor) resume(held map[string]string, now time.Time) {
	for name, zone := range held {
		a.nodes[name] = &watched{held: true, since: now}
		a.froze[cmp.Or(zone, DefaultZone)] = now
	}
}

// assess judges all nodes. zones gives each existing node's zone; granted
// says that a node's pods were already given up (its taint says so).
func (a *assessor) assess(leases map[string]LeaseInfo, zones map[string]string, granted func(node string) bool, now time.Time) map[string]verdict {
	list := make([]ZoneNode, 0, len(zones))
	for name, zone := range zones {
		info, ok := leases[name]
		if !ok {
			delete(a.nodes, name)
			continue // no lease, no agent: nothing can be said
		}
		a.note(name, info, now)
		list = append(list, ZoneNode{name, cmp.Or(zone, DefaultZone), info.Expired})
	}
	for name := range a.nodes {
		if _, ok := zones[name]; !ok {
			delete(a.nodes, name)
		}
	}
	frozen := Frozen(list, a.leaderZone)
	for zone := range frozen {
		a.froze[zone] = now
	}
	maps.Copy(frozen, doubtful(list, leases, a.leaderZone))
	a.grant(list, frozen, granted, now)
	out, inZone := make(map[string]verdict, len(list)), map[string]int{}
	for _, n := range list {
		inZone[n.Zone]++
	}
	for _, n := range list {
		w := a.nodes[n.Name]
		returning := n.Silent && !w.granted && !frozen[n.Zone] && a.thawing(n.Zone, w.since, now)
		out[n.Name] = verdict{returning: returning, silent: n.Silent, evict: n.Silent && w.granted, frozen: frozen[n.Zone], stale: leases[n.Name].Stale, known: w.proven,
			alone: inZone[n.Zone] == 1, only: len(list) == 1}
	}
	return out
}

// grant decides whose pods may be moved from now on: the longest silent
// first. Only the silent are put in order: this runs four times a second.
func (a *assessor) grant(list []ZoneNode, frozen map[string]bool, granted func(node string) bool, now time.Time) {
	var silent []ZoneNode
	for _, n := range list {
		if n.Silent {
			silent = append(silent, n)
		} else {
			a.nodes[n.Name].granted = false
		}
	}
	slices.SortFunc(silent, func(x, y ZoneNode) int {
		return cmp.Or(a.nodes[x.Name].since.Compare(a.nodes[y.Name].since), cmp.Compare(x.Name, y.Name))
	})
	for _, n := range silent {
		w := a.nodes[n.Name]
		switch {
		case w.granted || frozen[n.Zone]:
		case granted(n.Name), !a.thawing(n.Zone, w.since, now) && a.bucket(n.Zone).Take(now):
			w.granted = true
		}
	}
}

// thawing says that a node which is silent since then fell silent together
// with its zone, and that others came back so lately that it may still be on
// its way: nodes wait between two attempts to connect.
func (a *assessor) thawing(zone string, since, now time.Time) bool {
	at, ok := a.froze[zone]
	return ok && !since.After(at) && now.Sub(at) < wire.ReconnectMost
}

func (a *assessor) bucket(zone string) *Bucket {
	b := a.zones[zone]
	if b == nil {
		b = &Bucket{Every: a.every}
		a.zones[zone] = b
	}
	return b
}

// note takes one node's lease. A new leader gives every node a fresh TTL, which
// is no sign of life: who was silent before stays so until it renews.
func (a *assessor) note(name string, info LeaseInfo, now time.Time) {
	w := a.nodes[name]
	if w == nil {
		w = &watched{}
		a.nodes[name] = w
	}
	w.proven = w.proven || info.Renewed || info.Expired
	if info.Renewed && !info.Expired {
		w.held = false
	}
	if info.Expired && !w.silent && !w.held {
		w.since = now
	}
	w.silent = info.Expired
}
