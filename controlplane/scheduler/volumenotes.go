package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/manifests"
)

// volumeNote says where the volumes of a pod's claims are that keep it
// waiting, and what became of their node.
func (s *Scheduler) volumeNote(c *class) string {
	if c.shape.Volumes == nil {
		return ""
	}
	var notes []string
	for i := range c.shape.Volumes.Terms {
		if n := s.termNote(&c.shape.Volumes.Terms[i]); n != "" {
			notes = append(notes, n)
		}
	}
	return strings.Join(notes, "; ")
}

func (s *Scheduler) termNote(t *plan.VolumeTerm) string {
	name, some := t.Node, ""
	if t.Required != nil {
		if name = onlyName(t.Required); name == "" {
			if name, some = s.reachable(t.Required); name == "" {
				return fmt.Sprintf("its claim %s is bound to volume %s, which no node of the cluster reaches", t.Claim, t.Volume)
			}
		}
	}
	if name == "" {
		return ""
	}
	is := fmt.Sprintf("its claim %s is bound to volume %s on node %s", t.Claim, t.Volume, name)
	if t.Volume == "" || t.Required == nil {
		is = fmt.Sprintf("its claim %s is used on node %s", t.Claim, name)
	}
	obj, err := s.cfg.Store.Get(nodeGK, "", name)
	node, ok := obj.(*corev1.Node)
	switch {
	case apierrors.IsNotFound(err):
		return is + ", which no longer exists: the data is on that machine's disk; join it again, or delete the claim to give the data up"
	case err != nil || !ok:
		return ""
	case t.Identity != "" && node.Spec.ProviderID != "" && t.Identity != node.Spec.ProviderID:
		return is + ", but on the disk of an earlier machine of that name; delete the claim to give the data up"
	case some != "":
		return is + " and " + some
	case node.Labels[manifests.LabelDead] != "":
		if t.Required == nil {
			return is + ", which was declared dead"
		}
		return is + ", which was declared dead: the data is lost with it; delete the claim and the pod to start empty"
	case outOfService(node):
		return is + ", which is out of service (taint " + corev1.TaintNodeOutOfService + ")"
	case ready(node):
		return is
	}
	status, since := corev1.ConditionUnknown, node.CreationTimestamp
	for i := range node.Status.Conditions {
		if c := &node.Status.Conditions[i]; c.Type == corev1.NodeReady {
			status, since = c.Status, c.LastTransitionTime
		}
	}
	word := "Unknown"
	if status == corev1.ConditionFalse {
		word = "NotReady"
	}
	return fmt.Sprintf("%s, which is %s since %s", is, word, since.UTC().Format(time.RFC3339))
}

// outOfService says whether a user said that a node does not run.
func outOfService(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
}

// onlyName is the node that a selector names, if it does nothing else.
func onlyName(s *corev1.NodeSelector) string {
	if len(s.NodeSelectorTerms) != 1 {
		return ""
	}
	t := &s.NodeSelectorTerms[0]
	if len(t.MatchFields) == 1 && len(t.MatchFields[0].Values) == 1 && t.MatchFields[0].Operator == corev1.NodeSelectorOpIn {
		return t.MatchFields[0].Values[0]
	}
	return ""
}

// reachable names the first node that a selector matches, and tells how many
// others it does.
func (s *Scheduler) reachable(sel *corev1.NodeSelector) (name, others string) {
	var names []string
	s.cache.nodes.Each(func(n *plan.Node) {
		if plan.Reaches(sel, n) {
			names = append(names, n.Name)
		}
	})
	if len(names) == 0 {
		return "", ""
	}
	slices.Sort(names)
	if len(names) > 1 {
		others = fmt.Sprintf("%d others", len(names)-1)
	}
	return names[0], others
}
