// Package plan decides where pods go. It is pure: a decision is a function
// of (Nodes, Group) alone, with no clock, random source, network or store,
// so that the same input always gives the same output.
//
// Nodes are flat arrays, one slot a node, so that a decision is one linear
// pass over a few columns. Everything about a node that changes rarely
// (labels, taints, cordon) is judged once per kind of pod and node version
// and remembered as one verdict byte; see Shape.
package plan

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// The resources with fixed columns; others get the next ones as they appear.
const (
	colCPU = iota
	colMemory
	colPods
	colEphemeral
	fixedCols
)

// unlimited stands for "the node does not report this resource", where that
// means that it does not limit it.
const unlimited = int64(1) << 60

// most is the largest value that is told apart (4 PiB, or as many millicores):
// sums over a node's pods then never overflow. The state machine has the last
// word on the exact figures.
const most = int64(1) << 52

// Node describes one node.
type Node struct {
	Name, UID     string
	Labels        map[string]string
	Taints        []corev1.Taint
	Unschedulable bool
	// NotReady: the node did not say that it is ready. It counts as the taint
	// node.kubernetes.io/not-ready:NoSchedule, which the node lifecycle
	// controller is about to write.
	NotReady    bool
	Allocatable []state.Quantity
	// Identity of the machine; VolumeRoom is what volumes may still take of its
	// disk, in bytes, negative for any amount.
	Identity   string
	VolumeRoom int64
	// Images are scored only: that they change is no Change. Read by Set.
	Images []Image
}

// Nodes holds all nodes. Not safe for concurrent use.
type Nodes struct {
	index   map[string]int32
	info    []Node // by slot
	live    []bool
	version []uint32 // of the slot's static facts
	latest  uint32
	spare   []int32 // free slots

	column map[string]int // resource name -> column
	alloc  [][]int64      // [column][slot]
	free   [][]int64
	invCPU []float32 // 1/allocatable, 0 if none
	invMem []float32
	base   []float32 // share of cpu plus share of memory that is taken
	ports  []map[state.HostPort]int32
	count  int
	peers  peers

	images   map[string]*imageOn // by ImageName
	imagesOf [][]*imageOn        // by slot
}

// NewNodes returns an empty set.
func NewNodes() *Nodes {
	n := &Nodes{index: map[string]int32{}, images: map[string]*imageOn{}, column: map[string]int{
		string(corev1.ResourceCPU): colCPU, string(corev1.ResourceMemory): colMemory,
		string(corev1.ResourcePods): colPods, string(corev1.ResourceEphemeralStorage): colEphemeral,
	}}
	n.alloc, n.free = make([][]int64, fixedCols), make([][]int64, fixedCols)
	n.peers = peers{spaces: map[string]map[string]string{}, queries: map[string]*query{}, held: map[string]*held{}, columns: map[string]*domains{}}
	return n
}

// Len counts the nodes.
func (n *Nodes) Len() int { return n.count }

// Slot finds a node's slot.
func (n *Nodes) Slot(name string) (int, bool) {
	i, ok := n.index[name]
	return int(i), ok
}

// At returns the node in a slot.
func (n *Nodes) At(slot int) *Node { return &n.info[slot] }

// Each calls f for every node.
func (n *Nodes) Each(f func(*Node)) {
	for i := range n.info {
		if n.live[i] {
			f(&n.info[i])
		}
	}
}

// Change says what a Set did, for deciding which pods are worth another try.
type Change struct {
	Static bool // labels, taints, cordon, readiness or room for volumes differ (or the node is new)
	More   bool // something allocatable grew (or the node is new)
}

// Set adds or replaces a node. What is taken on it stays taken, unless it is
// another node of the same name (another UID): then nothing is.
func (n *Nodes) Set(node Node) Change {
	slot, known := n.Slot(node.Name)
	if known && n.info[slot].UID != node.UID {
		n.Remove(node.Name)
		known = false
	}
	var c Change
	if !known {
		slot = n.newSlot()
		n.index[node.Name] = int32(slot)
		n.live[slot] = true
		n.count++
		c = Change{Static: true, More: true}
	} else {
		c.Static = !sameStatic(&n.info[slot], &node)
	}
	n.setImages(slot, node.Images)
	node.Images = nil
	n.info[slot] = node
	if c.Static {
		n.latest++
		n.version[slot] = n.latest
	}
	if n.setAllocatable(slot, node.Allocatable) {
		c.More = true
	}
	return c
}

func sameStatic(a, b *Node) bool {
	if a.Unschedulable != b.Unschedulable || a.NotReady != b.NotReady || a.Identity != b.Identity || a.VolumeRoom != b.VolumeRoom || !sameLabels(a.Labels, b.Labels) {
		return false
	}
	return slices.EqualFunc(a.Taints, b.Taints, func(x, y corev1.Taint) bool {
		return x.Key == y.Key && x.Value == y.Value && x.Effect == y.Effect
	})
}

func sameLabels(a, b map[string]string) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v != w {
			return false
		}
	}
	return true
}

func (n *Nodes) newSlot() int {
	if k := len(n.spare); k > 0 {
		slot := n.spare[k-1]
		n.spare = n.spare[:k-1]
		return int(slot)
	}
	n.info = append(n.info, Node{})
	n.live = append(n.live, false)
	n.version = append(n.version, 0)
	n.invCPU = append(n.invCPU, 0)
	n.invMem = append(n.invMem, 0)
	n.base = append(n.base, 0)
	n.ports = append(n.ports, nil)
	n.imagesOf = append(n.imagesOf, nil)
	n.peers.pods = append(n.peers.pods, nil)
	for c := range n.alloc {
		n.alloc[c] = append(n.alloc[c], 0)
		n.free[c] = append(n.free[c], 0)
	}
	return len(n.info) - 1
}

func (n *Nodes) col(name string) int {
	c, ok := n.column[name]
	if !ok {
		c = len(n.alloc)
		n.column[name] = c
		n.alloc = append(n.alloc, make([]int64, len(n.info)))
		n.free = append(n.free, make([]int64, len(n.info)))
	}
	return c
}

// setAllocatable moves free by the difference, and says if any grew.
func (n *Nodes) setAllocatable(slot int, q []state.Quantity) (more bool) {
	want := make([]int64, len(n.alloc), len(n.alloc)+len(q))
	want[colEphemeral] = unlimited
	for _, x := range q {
		c := n.col(x.Name)
		for len(want) <= c {
			want = append(want, 0)
		}
		want[c] = min(x.Value, most)
	}
	for c, v := range want {
		d := v - n.alloc[c][slot]
		n.alloc[c][slot] = v
		n.free[c][slot] += d
		more = more || d > 0
	}
	n.invCPU[slot], n.invMem[slot] = inverse(want[colCPU]), inverse(want[colMemory])
	n.rebase(slot)
	return more
}

func inverse(v int64) float32 {
	if v <= 0 {
		return 0
	}
	return 1 / float32(v)
}

func (n *Nodes) rebase(slot int) {
	n.base[slot] = n.share(slot, n.alloc[colCPU][slot]-n.free[colCPU][slot], n.alloc[colMemory][slot]-n.free[colMemory][slot])
}

// share is what part of the node so much cpu and memory is, both added.
func (n *Nodes) share(slot int, cpu, memory int64) float32 {
	return float32(cpu)*n.invCPU[slot] + float32(memory)*n.invMem[slot]
}

// Remove forgets a node and all that is taken on it, and returns the pods
// that were placed there.
func (n *Nodes) Remove(name string) []*Pod {
	slot, ok := n.Slot(name)
	if !ok {
		return nil
	}
	gone := slices.Clone(n.peers.pods[slot])
	for _, p := range gone {
		n.Drop(slot, p)
	}
	delete(n.index, name)
	n.live[slot] = false
	n.info[slot] = Node{}
	n.ports[slot] = nil
	n.setImages(slot, nil)
	for c := range n.alloc {
		n.alloc[c][slot], n.free[c][slot] = 0, 0
	}
	n.invCPU[slot], n.invMem[slot], n.base[slot] = 0, 0, 0
	n.latest++
	n.version[slot] = n.latest
	n.spare = append(n.spare, int32(slot))
	n.count--
	return gone
}

// Take counts a pod's requests and ports on a slot; Give gives them back.
func (n *Nodes) Take(slot int, q []state.Quantity, ports []state.HostPort) { n.move(slot, q, ports, 1) }

// Give undoes Take.
func (n *Nodes) Give(slot int, q []state.Quantity, ports []state.HostPort) {
	n.move(slot, q, ports, -1)
}

func (n *Nodes) move(slot int, q []state.Quantity, ports []state.HostPort, sign int64) {
	for _, x := range q {
		n.free[n.col(x.Name)][slot] -= sign * min(x.Value, most)
	}
	n.rebase(slot)
	for _, p := range ports {
		if n.ports[slot] == nil {
			n.ports[slot] = map[state.HostPort]int32{}
		}
		if n.ports[slot][p] += int32(sign); n.ports[slot][p] <= 0 {
			delete(n.ports[slot], p)
		}
	}
}

// Free returns what of a resource is free on a slot, which may be negative.
func (n *Nodes) Free(slot int, resource string) int64 {
	c, ok := n.column[resource]
	if !ok {
		return 0
	}
	return n.free[c][slot]
}

// portsFree says whether none of the ports is taken on the slot. A port on
// every address clashes with the same port on any.
func (n *Nodes) portsFree(slot int, want []state.HostPort) bool {
	for _, w := range want {
		for p := range n.ports[slot] {
			if clash(p, w) {
				return false
			}
		}
	}
	return true
}

func clash(p, w state.HostPort) bool {
	return p.Port == w.Port && p.Protocol == w.Protocol && (anyIP(p.IP) || anyIP(w.IP) || p.IP == w.IP)
}

func anyIP(ip string) bool { return ip == "" || ip == "0.0.0.0" || ip == "::" }
