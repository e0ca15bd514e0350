package node

import (
	"fmt"
	"slices"
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

// shortage words a met threshold; permille is how much is left.
func shortage(m *eviction.Met) (what string, permille int64) {
	permille = m.Available * 1000 / m.Capacity
	switch m.Signal {
	case eviction.DiskAvailable:
		what = fmt.Sprintf("%s of %s is free on the disk of %s, and %s should be", bytesText(m.Available), bytesText(m.Capacity), m.Where, bytesText(m.Limit))
	case eviction.InodesFree:
		what = fmt.Sprintf("%d of %d inodes (files) are free on the disk of %s, and %d should be", m.Available, m.Capacity, m.Where, m.Limit)
	case eviction.PIDAvailable:
		what = fmt.Sprintf("%d of %d process ids are free, and %d should be", m.Available, m.Capacity, m.Limit)
	default:
		what = fmt.Sprintf("%s of %s of memory is available, and %s should be", bytesText(m.Available), bytesText(m.Capacity), bytesText(m.Limit))
	}
	return what, permille
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
// are those of the worst moment, in steps, so that a disk that fills is not
// written about all the time.
type pressures struct {
	tracker *eviction.Tracker
	told    map[corev1.NodeConditionType]told
}

type told struct {
	message string
	worst   int64 // permille
}

func newPressures(c eviction.Config) *pressures {
	return &pressures{tracker: eviction.NewTracker(c), told: map[corev1.NodeConditionType]told{}}
}

// adopt goes on from what an earlier agent told.
func (p *pressures) adopt(conds []corev1.NodeCondition, now time.Time) {
	for _, c := range conds {
		if _, ok := pressureReasons[c.Type]; ok && c.Status == corev1.ConditionTrue {
			p.tracker.Adopt(c.Type, now)
			p.told[c.Type] = told{c.Message, 1000}
		}
	}
}

// look takes readings and returns what a pod has to go for.
func (p *pressures) look(r eviction.Readings, now time.Time) (due []eviction.Met) {
	met, due := p.tracker.Look(r, now)
	for i := range met {
		c := eviction.ConditionOf[met[i].Signal]
		what, permille := shortage(&met[i])
		if t, on := p.told[c]; !on || permille <= t.worst/2 && permille < t.worst {
			p.told[c] = told{what, permille}
		}
	}
	return due
}

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
	return corev1.NodeCondition{Type: t, Status: corev1.ConditionTrue, Reason: words[0], Message: p.told[t].message}
}

// pressed are the conditions that are on.
func pressed(conds []corev1.NodeCondition) (out []corev1.NodeConditionType) {
	for _, c := range conds {
		if _, ok := pressureReasons[c.Type]; ok && c.Status == corev1.ConditionTrue {
			out = append(out, c.Type)
		}
	}
	slices.Sort(out)
	return out
}
