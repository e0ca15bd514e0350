package scheduler

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/controlplane/state"
)

// placed is a pod that takes room on a node, assumed or confirmed:
//
//	(unknown) --assume--> placed --forget--> (unknown)
//	(unknown) --event with a node--> placed --terminal or deleted--> (unknown)
//
// An assumed pod needs no flag: the event that confirms it changes nothing.
type placed struct {
	plan.Pod
	node string
}

// cache mirrors the store's nodes and placements. Not safe for concurrent
// use.
type cache struct {
	nodes  *plan.Nodes
	placed map[string]*placed // by pod uid
	// waiting holds pods placed on a node that is not known (yet).
	waiting map[string]map[string]*placed // node -> pod uid
	// unranked pods' importance was not read yet; priorities counts the others.
	unranked   map[string]*placed
	priorities map[int32]int
}

func newCache() *cache {
	return &cache{nodes: plan.NewNodes(), placed: map[string]*placed{}, waiting: map[string]map[string]*placed{},
		unranked: map[string]*placed{}, priorities: map[int32]int{}}
}

// setNode takes a node's record.
func (c *cache) setNode(store registry.Store, r *state.Record, room int64) (plan.Change, error) {
	obj, err := store.Decode(r)
	if err != nil {
		return plan.Change{}, fmt.Errorf("decode node %s: %w", r.Header.Key.Name, err)
	}
	node, ok := obj.(*corev1.Node)
	if !ok {
		return plan.Change{}, fmt.Errorf("node %s is a %T", r.Header.Key.Name, obj)
	}
	name := r.Header.Key.Name
	if slot, known := c.nodes.Slot(name); known && c.nodes.At(slot).UID != r.Header.UID {
		c.removeNode(name)
	}
	change := c.nodes.Set(plan.Node{
		Name: name, UID: r.Header.UID, Labels: r.Header.Labels, Taints: node.Spec.Taints,
		Unschedulable: node.Spec.Unschedulable || r.Header.Deleted != 0, NotReady: !ready(node), Allocatable: r.Header.Allocatable,
		Images: imagesOn(node), Identity: node.Spec.ProviderID, VolumeRoom: room,
	})
	if slot, ok := c.nodes.Slot(name); ok {
		for _, p := range c.waiting[name] {
			c.nodes.Add(slot, &p.Pod)
		}
		delete(c.waiting, name)
	}
	return change, nil
}

func imagesOn(n *corev1.Node) []plan.Image {
	out := make([]plan.Image, len(n.Status.Images))
	for i := range out {
		out[i] = plan.Image{Names: n.Status.Images[i].Names, Size: n.Status.Images[i].SizeBytes}
	}
	return out
}

func ready(n *corev1.Node) bool {
	for i := range n.Status.Conditions {
		if n.Status.Conditions[i].Type == corev1.NodeReady {
			return n.Status.Conditions[i].Status == corev1.ConditionTrue
		}
	}
	return false
}

// removeNode forgets a node; its pods wait for one of the same name.
func (c *cache) removeNode(name string) {
	for _, p := range c.nodes.Remove(name) {
		c.wait(c.placed[p.UID])
	}
}

func (c *cache) wait(p *placed) {
	if c.waiting[p.node] == nil {
		c.waiting[p.node] = map[string]*placed{}
	}
	c.waiting[p.node][p.UID] = p
}

// put places a pod; changed says that it was not there, or otherwise.
func (c *cache) put(p *placed) (changed bool) {
	if old, ok := c.placed[p.UID]; ok {
		if old.node == p.node && slices.Equal(old.Requests, p.Requests) && slices.Equal(old.HostPorts, p.HostPorts) &&
			old.Terminating == p.Terminating && old.Terms == p.Terms && maps.Equal(old.Labels, p.Labels) {
			return false
		}
		if p.Rank == nil {
			p.Rank = old.Rank
		}
		p.Doomed = old.Doomed
		c.drop(p.UID)
	}
	c.placed[p.UID] = p
	c.unranked[p.UID] = p
	if p.Rank != nil {
		c.ranked(p, p.Rank)
	}
	if slot, ok := c.nodes.Slot(p.node); ok {
		c.nodes.Add(slot, &p.Pod)
	} else {
		c.wait(p)
	}
	return true
}

func (c *cache) ranked(p *placed, r *plan.Rank) {
	p.Rank = r
	c.priorities[r.Priority]++
	delete(c.unranked, p.UID)
}

// above says whether a placed pod is known to be less important.
func (c *cache) above(priority int32) bool {
	for have := range c.priorities {
		if have < priority {
			return true
		}
	}
	return false
}

// drop takes a pod's room back.
func (c *cache) drop(uid string) bool {
	p, ok := c.placed[uid]
	if !ok {
		return false
	}
	delete(c.placed, uid)
	delete(c.unranked, uid)
	if p.Rank != nil {
		if c.priorities[p.Rank.Priority]--; c.priorities[p.Rank.Priority] == 0 {
			delete(c.priorities, p.Rank.Priority)
		}
	}
	if w := c.waiting[p.node]; w[uid] != nil {
		delete(w, uid)
		if len(w) == 0 {
			delete(c.waiting, p.node)
		}
		return false
	}
	if slot, ok := c.nodes.Slot(p.node); ok {
		c.nodes.Drop(slot, &p.Pod)
	}
	return true
}

// terminal pods take no room.
func terminal(h *state.Header) bool {
	return h.Phase == string(corev1.PodSucceeded) || h.Phase == string(corev1.PodFailed)
}
