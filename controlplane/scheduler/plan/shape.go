package plan

import (
	"fmt"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
)

// Shape is everything of a pod that is judged against a node's static facts.
// Pods of one template share one Shape, which remembers its verdicts.
type Shape struct {
	Selector    map[string]string
	Required    *corev1.NodeSelector
	Preferred   []corev1.PreferredSchedulingTerm
	Tolerations []corev1.Toleration
	// RuntimeClass and its Handler: the node must carry the label
	// dunlin.dev/runtime.<handler>=true. Empty handler: no demand.
	RuntimeClass, Handler string
	// Volumes is what the pod's claims demand; nil for pods without any.
	Volumes *Volumes

	// The memory, of one set of nodes.
	of       *Nodes
	latest   uint32
	versions []uint32
	verdicts []verdict
	prefer   []float32 // 0..1; nil if nothing is preferred anywhere
	averse   []bool    // nil if no taint PreferNoSchedule is anywhere
}

// RuntimeLabel is the label by which a node says that it runs a RuntimeClass
// handler.
func RuntimeLabel(handler string) string { return "dunlin.dev/runtime." + handler }

// verdict of the static filters, in their order.
type verdict uint8

const (
	fits verdict = iota
	noNode
	cordoned
	tainted
	noMatch
	noRuntime
	noVolume
)

// judge brings the shape's verdicts up to date with the nodes, looking only
// at those that changed.
func (s *Shape) judge(n *Nodes) {
	if s.of == n && s.latest == n.latest && len(s.versions) == len(n.info) {
		return
	}
	if s.of != n {
		s.of, s.versions, s.verdicts, s.prefer, s.averse = n, nil, nil, nil, nil
	}
	for len(s.versions) < len(n.info) {
		s.versions = append(s.versions, 0)
		s.verdicts = append(s.verdicts, noNode)
		if s.prefer != nil {
			s.prefer = append(s.prefer, 0)
		}
		if s.averse != nil {
			s.averse = append(s.averse, false)
		}
	}
	for i := range n.info {
		if s.versions[i] == n.version[i] {
			continue
		}
		s.versions[i] = n.version[i]
		s.verdicts[i] = noNode
		preference, averse := float32(0), false
		if n.live[i] {
			s.verdicts[i] = s.check(&n.info[i])
			preference, averse = s.preference(&n.info[i]), s.averseTo(&n.info[i])
		}
		if averse && s.averse == nil {
			s.averse = make([]bool, len(s.versions))
		}
		if s.averse != nil {
			s.averse[i] = averse
		}
		if preference != 0 && s.prefer == nil {
			s.prefer = make([]float32, len(s.versions))
		}
		if s.prefer != nil {
			s.prefer[i] = preference
		}
	}
	s.latest = n.latest
}

func (s *Shape) check(n *Node) verdict {
	switch {
	case s.isCordoned(n):
		return cordoned
	case s.untolerated(n) != nil:
		return tainted
	case !s.matches(n):
		return noMatch
	case !s.runs(n):
		return noRuntime
	case s.Volumes.objection(n) != "":
		return noVolume
	}
	return fits
}

func (s *Shape) isCordoned(n *Node) bool {
	return n.Unschedulable && !s.tolerates(&corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
}

func (s *Shape) runs(n *Node) bool {
	return s.Handler == "" || n.Labels[RuntimeLabel(s.Handler)] == "true"
}

// Allows says whether nothing about the node itself keeps the pod away.
func (s *Shape) Allows(n *Node) bool { return s.check(n) == fits }

// Matches says whether the node has what selector and required affinity ask
// for.
func (s *Shape) Matches(n *Node) bool { return s.matches(n) }

func (s *Shape) matches(n *Node) bool {
	for k, v := range s.Selector {
		if w, ok := n.Labels[k]; !ok || v != w {
			return false
		}
	}
	if s.Required == nil {
		return true
	}
	return slices.ContainsFunc(s.Required.NodeSelectorTerms, func(t corev1.NodeSelectorTerm) bool { return matchTerm(&t, n) })
}

var notReady = corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}

// untolerated returns the first taint that keeps the pod away.
func (s *Shape) untolerated(n *Node) *corev1.Taint {
	for i := range n.Taints {
		t := &n.Taints[i]
		if t.Effect != corev1.TaintEffectPreferNoSchedule && !s.tolerates(t) {
			return t
		}
	}
	if n.NotReady && !s.tolerates(&notReady) {
		return &notReady
	}
	return nil
}

func (s *Shape) tolerates(t *corev1.Taint) bool {
	for i := range s.Tolerations {
		if Tolerates(&s.Tolerations[i], t) {
			return true
		}
	}
	return false
}

// Tolerates says whether a toleration covers a taint (core/v1 semantics).
func Tolerates(o *corev1.Toleration, t *corev1.Taint) bool {
	if o.Effect != "" && o.Effect != t.Effect {
		return false
	}
	if o.Key != "" && o.Key != t.Key {
		return false
	}
	switch o.Operator {
	case corev1.TolerationOpExists:
		return true
	case "", corev1.TolerationOpEqual:
		return o.Key != "" && o.Value == t.Value
	case "Gt", "Lt":
		want, err1 := strconv.ParseInt(o.Value, 10, 64)
		has, err2 := strconv.ParseInt(t.Value, 10, 64)
		if err1 != nil || err2 != nil {
			return false
		}
		return (o.Operator == "Gt" && has > want) || (o.Operator == "Lt" && has < want)
	}
	return false
}

// preference is the node's share of all preferred weights.
func (s *Shape) preference(n *Node) float32 {
	var got, all int32
	for i := range s.Preferred {
		p := &s.Preferred[i]
		all += p.Weight
		if matchTerm(&p.Preference, n) {
			got += p.Weight
		}
	}
	if all <= 0 {
		return 0
	}
	return float32(got) / float32(all)
}

// averseTo says whether the node has a taint PreferNoSchedule that is not
// tolerated.
func (s *Shape) averseTo(n *Node) bool {
	for i := range n.Taints {
		if t := &n.Taints[i]; t.Effect == corev1.TaintEffectPreferNoSchedule && !s.tolerates(t) {
			return true
		}
	}
	return false
}

// matchTerm: all requirements must hold; a term without any matches nothing.
func matchTerm(t *corev1.NodeSelectorTerm, n *Node) bool {
	if len(t.MatchExpressions)+len(t.MatchFields) == 0 {
		return false
	}
	for i := range t.MatchExpressions {
		r := &t.MatchExpressions[i]
		v, ok := n.Labels[r.Key]
		if !matchRequirement(r, v, ok) {
			return false
		}
	}
	for i := range t.MatchFields {
		r := &t.MatchFields[i]
		if r.Key != "metadata.name" || !matchRequirement(r, n.Name, true) {
			return false
		}
	}
	return true
}

func matchRequirement(r *corev1.NodeSelectorRequirement, v string, has bool) bool {
	switch r.Operator {
	case corev1.NodeSelectorOpIn:
		return has && slices.Contains(r.Values, v)
	case corev1.NodeSelectorOpNotIn:
		return !has || !slices.Contains(r.Values, v)
	case corev1.NodeSelectorOpExists:
		return has
	case corev1.NodeSelectorOpDoesNotExist:
		return !has
	case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
		if !has || len(r.Values) != 1 {
			return false
		}
		x, err1 := strconv.ParseInt(v, 10, 64)
		y, err2 := strconv.ParseInt(r.Values[0], 10, 64)
		if err1 != nil || err2 != nil {
			return false
		}
		return (r.Operator == corev1.NodeSelectorOpGt && x > y) || (r.Operator == corev1.NodeSelectorOpLt && x < y)
	}
	return false
}

// text explains a verdict, as upstream's scheduler does.
func (s *Shape) text(v verdict, n *Node) string {
	switch v {
	case cordoned:
		return "node(s) were unschedulable"
	case tainted:
		if t := s.untolerated(n); t != nil {
			return fmt.Sprintf("node(s) had untolerated taint {%s: %s}", t.Key, t.Value)
		}
		return "node(s) had untolerated taints"
	case noMatch:
		return "node(s) didn't match Pod's node affinity/selector"
	case noRuntime:
		return fmt.Sprintf("node(s) cannot run RuntimeClass %s (handler %s, where they have %s)", s.RuntimeClass, s.Handler, handlers(n))
	case noVolume:
		return s.Volumes.objection(n)
	}
	return ""
}
