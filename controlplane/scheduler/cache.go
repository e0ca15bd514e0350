package scheduler

import (
	"fmt"
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
	node     string
	requests []state.Quantity
	ports    []state.HostPort
}

// cache mirrors the store's nodes and placements. Not safe for concurrent
// use.
type cache struct {
	nodes  *plan.Nodes
	placed map[string]placed // by pod uid
	// waiting holds pods placed on a node that is not known (yet).
	waiting map[string]map[string]struct{} // node -> pod uids
}

func newCache() *cache {
	return &cache{nodes: plan.NewNodes(), placed: map[string]placed{}, waiting: map[string]map[string]struct{}{}}
}

// setNode takes a node's record.
func (c *cache) setNode(store registry.Store, r *state.Record) (plan.Change, error) {
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
	})
	if slot, ok := c.nodes.Slot(name); ok {
		for uid := range c.waiting[name] {
			c.nodes.Take(slot, c.placed[uid].requests, c.placed[uid].ports)
		}
		delete(c.waiting, name)
	}
	return change, nil
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
	c.nodes.Remove(name)
	for uid, p := range c.placed {
		if p.node == name {
			c.wait(name, uid)
		}
	}
}

func (c *cache) wait(node, uid string) {
	if c.waiting[node] == nil {
		c.waiting[node] = map[string]struct{}{}
	}
	c.waiting[node][uid] = struct{}{}
}

// put places a pod; free says that an earlier placement of it gave room.
func (c *cache) put(uid string, p placed) (free bool) {
	if old, ok := c.placed[uid]; ok {
		if old.node == p.node && slices.Equal(old.requests, p.requests) && slices.Equal(old.ports, p.ports) {
			return false
		}
		free = c.drop(uid)
	}
	c.placed[uid] = p
	if slot, ok := c.nodes.Slot(p.node); ok {
		c.nodes.Take(slot, p.requests, p.ports)
	} else {
		c.wait(p.node, uid)
	}
	return free
}

// drop takes a pod's room back.
func (c *cache) drop(uid string) bool {
	p, ok := c.placed[uid]
	if !ok {
		return false
	}
	delete(c.placed, uid)
	if w := c.waiting[p.node]; w != nil {
		if _, waits := w[uid]; waits {
			delete(w, uid)
			if len(w) == 0 {
				delete(c.waiting, p.node)
			}
			return false
		}
	}
	if slot, ok := c.nodes.Slot(p.node); ok {
		c.nodes.Give(slot, p.requests, p.ports)
	}
	return true
}

// terminal pods take no room.
func terminal(h *state.Header) bool {
	return h.Phase == string(corev1.PodSucceeded) || h.Phase == string(corev1.PodFailed)
}
