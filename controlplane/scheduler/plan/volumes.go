package plan

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// Volumes is what the claims of one pod demand of its node. Nil demands
// nothing.
type Volumes struct {
	// Refuse, if not empty, keeps the pod away from every node and says why.
	Refuse string
	Terms  []VolumeTerm
	// Room is how many bytes the volumes take that are to be made on the node.
	Room int64
}

// VolumeTerm is the demand of one claim.
type VolumeTerm struct {
	Claim  string
	Volume string // bound to it; "" if none is
	// Required is where the volume can be reached; nil is everywhere. Identity,
	// if not empty, is that of the machine that has the data.
	Required *corev1.NodeSelector
	Identity string
	// Node, if not empty, is the only one: it was chosen for the claim before,
	// or other pods use the claim there, which only one node may.
	Node string
	// OneOf, if Choose is set, are volumes of which the node must reach one.
	Choose bool
	OneOf  []*corev1.NodeSelector
}

// objection says why the volumes keep a pod away from a node; "" if they do
// not.
func (v *Volumes) objection(n *Node) string {
	text, _ := v.object(n)
	return text
}

// object is objection with the claim that objects, if it is one alone.
func (v *Volumes) object(n *Node) (string, *VolumeTerm) {
	if v == nil {
		return "", nil
	}
	if v.Refuse != "" {
		return v.Refuse, nil
	}
	for i := range v.Terms {
		t := &v.Terms[i]
		switch {
		case !Reaches(t.Required, n):
			return "node(s) didn't match PersistentVolume's node affinity", t
		case t.Identity != "" && n.Identity != "" && t.Identity != n.Identity:
			return "node(s) have the name but not the disk of the PersistentVolume's machine", t
		case t.Node != "" && t.Node != n.Name:
			return "node(s) are not the one on which the PersistentVolumeClaim is used", t
		case t.Choose && !slices.ContainsFunc(t.OneOf, func(s *corev1.NodeSelector) bool { return Reaches(s, n) }):
			return "node(s) didn't find available persistent volumes to bind", t
		}
	}
	if v.Room > 0 && n.VolumeRoom >= 0 && v.Room > n.VolumeRoom {
		return fmt.Sprintf("node(s) did not have enough free storage (needs %s)", resource.NewQuantity(v.Room, resource.BinarySI)), nil
	}
	return "", nil
}

// Reaches says whether a selector matches a node; nil matches all.
func Reaches(s *corev1.NodeSelector, n *Node) bool {
	return s == nil || slices.ContainsFunc(s.NodeSelectorTerms, func(t corev1.NodeSelectorTerm) bool { return matchTerm(&t, n) })
}
