package node

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/dunlin-project/dunlin/node/eviction"
)

// DiskFacts describe a file system.
type DiskFacts struct {
	Path               string // a folder on it
	Size, Free         int64  // bytes; free for those who are not root
	Inodes, InodesFree int64  // 0 of 0 where the file system has no such limit
}

// SupplyFacts are how much there is of something, and how much is left.
type SupplyFacts struct{ Capacity, Available int64 }

// readings are the signals of eviction; what is not known is left out.
func (f *MachineFacts) readings() eviction.Readings {
	r := eviction.Readings{}
	if m := f.FreeMemory; m != nil && m.Capacity > 0 {
		r[eviction.MemoryAvailable] = eviction.Reading{Capacity: m.Capacity, Available: m.Available}
	}
	if p := f.PIDs; p != nil && p.Capacity > 0 {
		r[eviction.PIDAvailable] = eviction.Reading{Capacity: p.Capacity, Available: p.Available}
	}
	if d := f.Disk; d != nil && d.Size > 0 {
		r[eviction.DiskAvailable] = eviction.Reading{Capacity: d.Size, Available: d.Free, Where: d.Path}
		if d.Inodes > 0 {
			r[eviction.InodesFree] = eviction.Reading{Capacity: d.Inodes, Available: d.InodesFree, Where: d.Path}
		}
	}
	return r
}

// reading words what a signal shows.
func reading(s eviction.Signal, r eviction.Reading) string {
	switch s {
	case eviction.DiskAvailable:
		return fmt.Sprintf("%s of %s is free on the disk of %s", bytesText(r.Available), bytesText(r.Capacity), r.Where)
	case eviction.InodesFree:
		return fmt.Sprintf("%d of %d inodes (files) are free on the disk of %s", r.Available, r.Capacity, r.Where)
	case eviction.PIDAvailable:
		return fmt.Sprintf("%d of %d process ids are free", r.Available, r.Capacity)
	}
	return fmt.Sprintf("%s of %s of memory is available", bytesText(r.Available), bytesText(r.Capacity))
}

// shortage words a met threshold; permille is how much is left.
func shortage(m *eviction.Met) (what string, permille int64) {
	limit := bytesText(m.Limit)
	if m.Signal == eviction.InodesFree || m.Signal == eviction.PIDAvailable {
		limit = strconv.FormatInt(m.Limit, 10)
	}
	return fmt.Sprintf("%s, and %s should be", reading(m.Signal, m.Reading), limit), m.Available * 1000 / m.Capacity
}

func bytesText(n int64) string {
	for _, u := range []struct {
		size int64
		name string
	}{{1 << 30, "Gi"}, {1 << 20, "Mi"}, {1 << 10, "Ki"}} {
		if n >= 10*u.size {
			return fmt.Sprintf("%d%s", n/u.size, u.name)
		}
	}
	return resource.NewQuantity(n, resource.BinarySI).String()
}

// pressures is what the node tells of what it runs short of. A condition
// begins at once and ends only some time after it was last seen. Its figures
// are those of the worst moment, with its time, in steps, so that a disk that
// fills is not written about all the time. That the shortage is over is told
// when it has been for a while: the longer, the more often it came back, so
// that what goes up and down is not written about for ever either.
type pressures struct {
	tracker *eviction.Tracker
	told    map[corev1.NodeConditionType]told
}

type told struct {
	message string // of the shortage
	worst   int64  // permille
	// since is when it was first seen to be over, zero while it is not; over is
	// said instead of message once that lasts for wait.
	since time.Time
	free  string // the reading of that moment
	over  string
	wait  time.Duration
}

// overAfter is the first wait.
const overAfter = 10 * time.Second

func newPressures(c eviction.Config) *pressures {
	return &pressures{tracker: eviction.NewTracker(c), told: map[corev1.NodeConditionType]told{}}
}

// adopt goes on from what an earlier agent told.
func (p *pressures) adopt(conds []corev1.NodeCondition, now time.Time) {
	for _, c := range conds {
		if _, ok := pressureReasons[c.Type]; ok && c.Status == corev1.ConditionTrue && c.Reason != reasonUnsaved {
			p.tracker.Adopt(c.Type, now)
			p.told[c.Type] = told{message: c.Message, worst: 1000, wait: overAfter}
		}
	}
}

// look takes readings and returns what a pod has to go for.
func (p *pressures) look(r eviction.Readings, now time.Time) (due []eviction.Met) {
	met, due := p.tracker.Look(r, now)
	short := map[corev1.NodeConditionType]bool{}
	for i := range met {
		c := eviction.ConditionOf[met[i].Signal]
		short[c] = true
		what, permille := shortage(&met[i])
		t, on := p.told[c]
		if !on {
			t.wait = overAfter
		}
		if !on || permille <= t.worst/2 && permille < t.worst {
			t.message, t.worst = fmt.Sprintf("%s (at %s, the least so far)", what, clockText(now)), permille
		}
		if t.over != "" {
			t.wait *= 2
		}
		t.since, t.over = time.Time{}, ""
		p.told[c] = t
	}
	for c, t := range p.told {
		if !short[c] {
			p.told[c] = t.isOver(c, r, now, p.tracker.Until(c))
		}
	}
	return due
}

// isOver notes that nothing of a condition is short any more.
func (t told) isOver(c corev1.NodeConditionType, r eviction.Readings, now, until time.Time) told {
	if t.since.IsZero() {
		for _, s := range eviction.SignalsOf(c) {
			if got, ok := r[s]; ok {
				t.since, t.free = now, reading(s, got)
				break
			}
		}
	}
	if t.over == "" && !t.since.IsZero() && now.Sub(t.since) >= t.wait {
		t.over = fmt.Sprintf("over since %s at the latest (at that moment %s); still told until %s, in case it comes back", clockText(t.since), t.free, clockText(until))
	}
	return t
}

func clockText(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// pressureReasons are upstream's, on and off, and what is said when it is off.
var pressureReasons = map[corev1.NodeConditionType][3]string{
	corev1.NodeMemoryPressure: {"KubeletHasInsufficientMemory", "KubeletHasSufficientMemory", "the agent sees no memory pressure"},
	corev1.NodeDiskPressure:   {"KubeletHasDiskPressure", "KubeletHasNoDiskPressure", "the agent sees no disk pressure"},
	corev1.NodePIDPressure:    {"KubeletHasInsufficientPID", "KubeletHasSufficientPID", "the agent sees no shortage of process ids"},
}

func (p *pressures) condition(t corev1.NodeConditionType, now time.Time) corev1.NodeCondition {
	words := pressureReasons[t]
	if !p.tracker.On(t, now) {
		delete(p.told, t)
		return corev1.NodeCondition{Type: t, Status: corev1.ConditionFalse, Reason: words[1], Message: words[2]}
	}
	return corev1.NodeCondition{Type: t, Status: corev1.ConditionTrue, Reason: words[0], Message: cmp.Or(p.told[t].over, p.told[t].message)}
}

// reasonUnsaved is why a node whose state cannot be saved has disk pressure:
// what it cannot save it does not start, so that pods belong elsewhere.
const reasonUnsaved = "StateCannotBeSaved"

// unsaved is the disk pressure of a node whose state cannot be saved.
func unsaved(err error) corev1.NodeCondition {
	return corev1.NodeCondition{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue, Reason: reasonUnsaved,
		Message: fmt.Sprintf("the state folder cannot be written: no pod is started or stopped here until it can; what runs goes on (%v); look at the disk, and at the kernel's log", err)}
}

// pressed are the conditions that are on, and for which pods are refused: those
// that wait for the state folder are taken once it can be written.
func pressed(conds []corev1.NodeCondition) (out []corev1.NodeConditionType) {
	for _, c := range conds {
		if _, ok := pressureReasons[c.Type]; ok && c.Status == corev1.ConditionTrue && c.Reason != reasonUnsaved {
			out = append(out, c.Type)
		}
	}
	slices.Sort(out)
	return out
}
