// Package eviction decides which pod has to leave a node that runs short of
// memory, disk, inodes or process ids. It is pure: figures and moments in,
// decisions out. Words, syntax and order are the kubelet's ("Node-pressure
// Eviction" in the Kubernetes documentation), except that nothing is evicted
// whose end would free nothing.
package eviction

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Signal is something of which there can be too little.
type Signal string

// Signals. Modules and logs are on the same file system as volumes, so there
// is no imagefs of its own.
const (
	MemoryAvailable Signal = "memory.available"
	DiskAvailable   Signal = "nodefs.available"
	InodesFree      Signal = "nodefs.inodesFree"
	PIDAvailable    Signal = "pid.available"
)

// signals in the order in which they are looked at.
var signals = []Signal{MemoryAvailable, DiskAvailable, InodesFree, PIDAvailable}

// resourceOf names what a signal is about, as in the messages of evictions.
var resourceOf = map[Signal]string{MemoryAvailable: "memory", DiskAvailable: "ephemeral-storage", InodesFree: "inodes", PIDAvailable: "pids"}

// ConditionOf is the node's condition that a signal sets.
var ConditionOf = map[Signal]corev1.NodeConditionType{
	MemoryAvailable: corev1.NodeMemoryPressure, DiskAvailable: corev1.NodeDiskPressure,
	InodesFree: corev1.NodeDiskPressure, PIDAvailable: corev1.NodePIDPressure,
}

// SignalsOf are those that set a condition, the most telling first.
func SignalsOf(c corev1.NodeConditionType) (out []Signal) {
	for _, s := range signals {
		if ConditionOf[s] == c {
			out = append(out, s)
		}
	}
	return out
}

// Value is an amount, or a share of what there is.
type Value struct {
	Amount  int64   // bytes, inodes or processes
	Percent float64 // used when Amount is 0
	// Most bounds a percentage: a tenth of a large disk is no shortage. Only
	// defaults have one.
	Most int64
}

// of resolves the value against the capacity.
func (v Value) of(capacity int64) int64 {
	if v.Amount != 0 || v.Percent == 0 {
		return v.Amount
	}
	n := int64(float64(capacity) * v.Percent / 100)
	if v.Most > 0 {
		n = min(n, v.Most)
	}
	return n
}

// Threshold is met while less than Value is available.
type Threshold struct {
	Signal Signal
	Value  Value
	// Grace is how long a soft threshold must be met before a pod is evicted;
	// Soft ones give pods their time to end.
	Soft  bool
	Grace time.Duration
	// MinReclaim is by how much more than Value must be available until a met
	// threshold is over.
	MinReclaim Value
}

// Config of a node.
type Config struct {
	Thresholds []Threshold
	// MaxPodGrace bounds the time that a soft eviction gives a pod to end; 0
	// is the pod's own.
	MaxPodGrace time.Duration
	// Transition is how long a pressure is told after it was last seen, so
	// that a node does not flap; 0 is five minutes.
	Transition time.Duration
}

// Defaults are the kubelet's hard thresholds, bounded so that they also suit
// a small board (a tenth of 256 MiB of memory) and a large disk.
func Defaults() []Threshold {
	return []Threshold{
		{Signal: MemoryAvailable, Value: Value{Percent: 10, Most: 100 << 20}},
		{Signal: DiskAvailable, Value: Value{Percent: 10, Most: 2 << 30}},
		{Signal: InodesFree, Value: Value{Percent: 5}},
		{Signal: PIDAvailable, Value: Value{Percent: 5, Most: 1000}},
	}
}

// Flags are the kubelet's, in its syntax: lists of "signal<value", and of
// "signal=value". A hard threshold replaces the default of its signal.
type Flags struct {
	Hard, Soft, SoftGrace, MinReclaim string
	MaxPodGrace                       time.Duration
	Transition                        time.Duration
}

// Parse reads the flags. An error names the flag and the place.
func (f Flags) Parse() (Config, error) {
	c := Config{MaxPodGrace: f.MaxPodGrace, Transition: f.Transition}
	for flag, d := range map[string]time.Duration{"eviction-max-pod-grace-period": f.MaxPodGrace, "eviction-pressure-transition-period": f.Transition} {
		if d < 0 {
			return c, fmt.Errorf("--%s=%s: must not be negative", flag, d)
		}
	}
	hard, err := pairs("eviction-hard", f.Hard, "<", value)
	if err != nil {
		return c, err
	}
	soft, err := pairs("eviction-soft", f.Soft, "<", value)
	if err != nil {
		return c, err
	}
	grace, err := pairs("eviction-soft-grace-period", f.SoftGrace, "=", time.ParseDuration)
	if err != nil {
		return c, err
	}
	reclaim, err := pairs("eviction-minimum-reclaim", f.MinReclaim, "=", value)
	if err != nil {
		return c, err
	}
	for s := range grace {
		if _, ok := soft[s]; !ok {
			return c, fmt.Errorf("--eviction-soft-grace-period: %s has no soft threshold in --eviction-soft", s)
		}
	}
	for _, d := range Defaults() {
		if v, ok := hard[d.Signal]; ok {
			d.Value = v
		}
		d.MinReclaim = reclaim[d.Signal]
		c.Thresholds = append(c.Thresholds, d)
	}
	for _, s := range signals {
		v, ok := soft[s]
		if !ok {
			continue
		}
		g, ok := grace[s]
		if !ok || g < 0 {
			return c, fmt.Errorf("--eviction-soft: %s needs a time in --eviction-soft-grace-period, as %s=1m30s", s, s)
		}
		c.Thresholds = append(c.Thresholds, Threshold{Signal: s, Value: v, Soft: true, Grace: g, MinReclaim: reclaim[s]})
	}
	return c, nil
}

// pairs reads a list of "signal OP value".
func pairs[V any](flag, list, op string, parse func(string) (V, error)) (map[Signal]V, error) {
	out := map[Signal]V{}
	for _, item := range strings.Split(list, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		name, text, ok := strings.Cut(item, op)
		if !ok {
			return nil, fmt.Errorf("--%s: %q: want signal%svalue, as memory.available%s100Mi", flag, item, op, op)
		}
		s := Signal(name)
		if !slices.Contains(signals, s) {
			return nil, fmt.Errorf("--%s: no signal %q: there are %v", flag, name, signals)
		}
		if _, twice := out[s]; twice {
			return nil, fmt.Errorf("--%s: %s is given twice", flag, s)
		}
		v, err := parse(text)
		if err != nil {
			return nil, fmt.Errorf("--%s: %s: %w", flag, s, err)
		}
		out[s] = v
	}
	return out, nil
}

// value reads "100Mi" or "10%".
func value(text string) (Value, error) {
	if n, ok := strings.CutSuffix(text, "%"); ok {
		p, err := strconv.ParseFloat(n, 64)
		if err != nil || math.IsNaN(p) || p < 0 || p > 100 {
			return Value{}, fmt.Errorf("%q is no percentage from 0%% to 100%%", text)
		}
		return Value{Percent: p}, nil
	}
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return Value{}, fmt.Errorf("%q is no quantity: %w", text, err)
	}
	if q.Sign() < 0 {
		return Value{}, fmt.Errorf("%q: must not be negative", text)
	}
	return Value{Amount: q.Value()}, nil
}
