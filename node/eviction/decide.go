package eviction

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Reading is what a signal shows: how much there is in all and how much of it
// is available, and where (a folder on the disk).
type Reading struct {
	Capacity, Available int64
	Where               string
}

// Readings by signal; what could not be read is absent and changes nothing.
type Readings map[Signal]Reading

// Met is a threshold that is crossed.
type Met struct {
	Threshold
	Reading
	Limit int64 // Value against the capacity
}

// defaultTransition is the kubelet's eviction-pressure-transition-period.
const defaultTransition = 5 * time.Minute

// Tracker remembers since when thresholds are met, and which conditions are
// on. It belongs to one goroutine.
type Tracker struct {
	c    Config
	met  map[int]time.Time // since, by place in Thresholds
	seen map[corev1.NodeConditionType]time.Time
}

// NewTracker begins with nothing met.
func NewTracker(c Config) *Tracker {
	if c.Transition == 0 {
		c.Transition = defaultTransition
	}
	if len(c.Thresholds) == 0 {
		c.Thresholds = Defaults()
	}
	return &Tracker{c: c, met: map[int]time.Time{}, seen: map[corev1.NodeConditionType]time.Time{}}
}

// Adopt goes on from a condition that an earlier agent told.
func (t *Tracker) Adopt(c corev1.NodeConditionType, now time.Time) { t.seen[c] = now }

// MaxPodGrace is the configured one.
func (t *Tracker) MaxPodGrace() time.Duration { return t.c.MaxPodGrace }

// Look takes readings. met are the thresholds that are crossed, soft ones in
// their grace among them; due those for which a pod has to go now, the most
// pressing first.
func (t *Tracker) Look(r Readings, now time.Time) (met, due []Met) {
	for i, th := range t.c.Thresholds {
		got, ok := r[th.Signal]
		if !ok {
			delete(t.met, i) // a soft one begins anew
			continue
		}
		since, was := t.met[i]
		limit := th.Value.of(got.Capacity)
		enough := limit
		if was {
			enough += th.MinReclaim.of(got.Capacity)
		}
		if got.Available >= enough {
			delete(t.met, i)
			continue
		}
		if !was {
			since = now
			t.met[i] = now
		}
		m := Met{th, got, limit}
		met = append(met, m)
		t.seen[ConditionOf[th.Signal]] = now
		if !th.Soft || now.Sub(since) >= th.Grace {
			due = append(due, m)
		}
	}
	slices.SortStableFunc(due, func(a, b Met) int {
		return cmp.Or(cmp.Compare(slices.Index(signals, a.Signal), slices.Index(signals, b.Signal)), boolean(a.Soft)-boolean(b.Soft))
	})
	return met, due
}

// On says whether a condition is to be told: it is seen, or was not long ago.
func (t *Tracker) On(c corev1.NodeConditionType, now time.Time) bool {
	at, ok := t.seen[c]
	if ok && now.Sub(at) >= t.c.Transition {
		delete(t.seen, c)
		ok = false
	}
	return ok
}

// Until is how long a condition is told at least.
func (t *Tracker) Until(c corev1.NodeConditionType) time.Time { return t.seen[c].Add(t.c.Transition) }

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

// Usage of a pod or container, in bytes, inodes and processes.
type Usage struct{ Memory, Disk, Inodes, PIDs int64 }

func (u Usage) of(s Signal) int64 {
	switch s {
	case MemoryAvailable:
		return u.Memory
	case DiskAvailable:
		return u.Disk
	case InodesFree:
		return u.Inodes
	}
	return u.PIDs
}

// Container is a part of a pod.
type Container struct {
	Name           string
	CPUNanos       uint64 // used since it started
	Usage, Request Usage
}

// Pod is one that could be evicted.
type Pod struct {
	UID, Namespace, Name string
	Priority             int32
	// Critical pods (static ones, system priorities) are never evicted.
	Critical   bool
	Usage      Usage
	Request    Usage
	Containers []Container
}

// leastFreed is what a pod must hold of a thing for its end to be worth it.
var leastFreed = map[Signal]int64{MemoryAvailable: 512 << 10, DiskAvailable: 1 << 20, InodesFree: 100, PIDAvailable: 1}

// Rank orders the pods that may go for a signal, first to go first: those
// that use more than they asked for, then by rising priority, then by how much
// more than asked for they use. For process ids there are no requests:
// priority, then number.
func Rank(s Signal, pods []Pod) []Pod {
	var out []Pod
	for _, p := range pods {
		if !p.Critical && p.Usage.of(s) >= leastFreed[s] {
			out = append(out, p)
		}
	}
	over := func(p *Pod) int64 { return p.Usage.of(s) - p.Request.of(s) }
	slices.SortFunc(out, func(a, b Pod) int {
		c := 0
		if s != PIDAvailable {
			c = boolean(over(&b) > 0) - boolean(over(&a) > 0)
		}
		return cmp.Or(c, cmp.Compare(a.Priority, b.Priority), cmp.Compare(over(&b), over(&a)), cmp.Compare(a.UID, b.UID))
	})
	return out
}

// Message words an eviction as the kubelet does. Where no container's use tells
// why, as of a disk, whose use is known of pods only, it tells the pod's.
func (m *Met) Message(p *Pod) string {
	var b strings.Builder
	told := false
	name := resourceOf[m.Signal]
	fmt.Fprintf(&b, "The node was low on resource: %s. Threshold quantity: %s, available: %s. ", name, m.text(m.Limit), m.text(m.Available))
	for _, c := range p.Containers {
		if use, want := c.Usage.of(m.Signal), c.Request.of(m.Signal); use > want {
			fmt.Fprintf(&b, "Container %s was using %s, request is %s, has larger consumption of %s. ", c.Name, m.text(use), m.text(want), name)
			told = true
		}
	}
	if use := p.Usage.of(m.Signal); !told && use > 0 {
		fmt.Fprintf(&b, "The pod was using %s, request is %s. ", m.text(use), m.text(p.Request.of(m.Signal)))
	}
	return b.String()
}

func (m *Met) text(n int64) string {
	if m.Signal == InodesFree || m.Signal == PIDAvailable {
		return fmt.Sprint(n)
	}
	if (m.Signal == MemoryAvailable || m.Signal == DiskAvailable) && n >= 1<<10 {
		n = n &^ (1<<10 - 1)
	}
	return resource.NewQuantity(n, resource.BinarySI).String()
}
