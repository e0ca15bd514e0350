package state

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// totals are what the pods of one node take: sums of integer vectors and the
// host ports in use. Immutable once published. pods counts who is in it.
type totals struct {
	node      string
	pods      int
	requested []Quantity // sorted by name
	ports     []HostPort // sorted; a forced pod may have doubled one
}

// counted says whether a pod takes room on its node: from its binding (or a
// create with nodeName) until it is deleted or terminal.
func counted(pod *Record) bool {
	return pod.Header.NodeName != "" && !Terminal(pod.Header.Phase)
}

// Terminal says whether a pod phase is final.
func Terminal(phase string) bool { return phase == PodSucceeded || phase == PodFailed }

// count adds the pod to its node's totals (sign +1) or takes it out (-1).
func (t *tables) count(pod *Record, sign int64) {
	h := &pod.Header
	next := &totals{node: h.NodeName}
	if old, ok := t.totals.Get(next); ok {
		next.pods = old.pods
		next.requested = slices.Clone(old.requested)
		next.ports = slices.Clone(old.ports)
	}
	next.pods += int(sign)
	for _, q := range h.Requests {
		next.requested = addQuantity(next.requested, q.Name, sign*q.Value)
	}
	for _, p := range h.HostPorts {
		i, found := slices.BinarySearchFunc(next.ports, p, comparePorts)
		switch {
		case sign > 0:
			next.ports = slices.Insert(next.ports, i, p)
		case found:
			next.ports = slices.Delete(next.ports, i, i+1)
		}
	}
	t.other.totals = true
	if next.pods == 0 {
		t.totals.Delete(next)
		return
	}
	t.totals.Set(next)
}

func addQuantity(v []Quantity, name string, delta int64) []Quantity {
	i, found := slices.BinarySearchFunc(v, name, func(q Quantity, n string) int { return strings.Compare(q.Name, n) })
	if !found {
		return slices.Insert(v, i, Quantity{Name: name, Value: delta})
	}
	v[i].Value += delta
	return v
}

func comparePorts(a, b HostPort) int {
	return cmp.Or(cmp.Compare(a.Port, b.Port), strings.Compare(a.Protocol, b.Protocol), strings.Compare(a.IP, b.IP))
}

// MaxQuantity bounds a request, so that sums over any number of pods that fit
// in memory cannot overflow. A request of so much stands for larger ones too.
const MaxQuantity = math.MaxInt64 >> 20

// fits says whether the pod's requests fit beside what is taken; if not, why:
// "cpu: needs 500, free 200 of 2000".
func fits(pod, node *Record, taken *totals) (string, bool) {
	for _, q := range pod.Header.Requests {
		if q.Value <= 0 {
			continue
		}
		capacity := quantity(node.Header.Allocatable, q.Name)
		free := capacity
		if taken != nil {
			free -= quantity(taken.requested, q.Name)
		}
		if q.Value > free {
			return fmt.Sprintf("%s: needs %d, free %d of %d", q.Name, q.Value, free, capacity), false
		}
	}
	return "", true
}

func quantity(v []Quantity, name string) int64 {
	for i := range v {
		if v[i].Name == name {
			return v[i].Value
		}
	}
	return 0
}

// portTaken returns the first host port of the pod that is in use.
func portTaken(pod *Record, taken *totals) (HostPort, bool) {
	if taken == nil {
		return HostPort{}, false
	}
	for _, p := range pod.Header.HostPorts {
		for _, q := range taken.ports {
			if p.Port == q.Port && p.Protocol == q.Protocol && (anyAddress(p.IP) || anyAddress(q.IP) || p.IP == q.IP) {
				return p, true
			}
		}
	}
	return HostPort{}, false
}

func anyAddress(ip string) bool { return ip == "" || ip == "0.0.0.0" || ip == "::" }
