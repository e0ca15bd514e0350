package daemonset

import (
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/dunlin-project/dunlin/controlplane/scheduler/plan"
	"github.com/dunlin-project/dunlin/manifests"
)

// builtIn are the tolerations that every daemon pod gets, as upstream's: what
// is wrong with a node is no reason to take its daemons away.
func builtIn(hostNetwork bool) []corev1.Toleration {
	out := []corev1.Toleration{
		{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
		{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
		{Key: corev1.TaintNodeDiskPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
		{Key: corev1.TaintNodeMemoryPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
		{Key: corev1.TaintNodePIDPressure, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
		{Key: corev1.TaintNodeUnschedulable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
	}
	if hostNetwork {
		out = append(out, corev1.Toleration{Key: corev1.TaintNodeNetworkUnavailable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule})
	}
	return out
}

// placement is where a set's pods belong.
type placement struct {
	nodeName    string
	shape       *plan.Shape
	tolerations []corev1.Toleration
}

func newPlacement(ds *appsv1.DaemonSet) placement {
	s := &ds.Spec.Template.Spec
	p := placement{nodeName: s.NodeName, shape: &plan.Shape{Selector: s.NodeSelector}}
	if a := s.Affinity; a != nil && a.NodeAffinity != nil {
		p.shape.Required = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	}
	p.tolerations = append(slices.Clone(s.Tolerations), builtIn(s.HostNetwork)...)
	return p
}

// judge says of a node whether a pod is wanted there (want), one that is
// there may stay (keep), and whether it would be wanted but for the node's
// being silent or not ready (away). Pure.
func (p placement) judge(n *corev1.Node) (want, keep, away bool) {
	if p.nodeName != "" && p.nodeName != n.Name || n.Labels[manifests.LabelDead] != "" {
		return false, false, false
	}
	if !p.shape.Matches(&plan.Node{Name: n.Name, Labels: n.Labels}) {
		return false, false, false
	}
	want, keep = true, true
	for i := range n.Spec.Taints {
		t := &n.Spec.Taints[i]
		if t.Effect == corev1.TaintEffectPreferNoSchedule ||
			slices.ContainsFunc(p.tolerations, func(o corev1.Toleration) bool { return plan.Tolerates(&o, t) }) {
			continue
		}
		switch {
		case t.Effect == corev1.TaintEffectNoExecute:
			return false, false, false
		case t.Key == corev1.TaintNodeUnreachable || t.Key == corev1.TaintNodeNotReady:
			away = true
		default:
			want = false
		}
	}
	for i := range n.Status.Conditions {
		if c := &n.Status.Conditions[i]; c.Type == corev1.NodeReady && c.Status == corev1.ConditionUnknown {
			away = true // the taint is about to follow
		}
	}
	return want && !away, keep, want && away
}

// newPod is the set's pod for one node; the scheduler binds it there.
func newPod(ds *appsv1.DaemonSet, hash, node string) *corev1.Pod {
	t := ds.Spec.Template.DeepCopy()
	if t.Labels == nil {
		t.Labels = map[string]string{}
	}
	t.Labels[appsv1.ControllerRevisionHashLabelKey] = hash
	t.Spec.Affinity = onNode(t.Spec.Affinity, node)
	for _, o := range builtIn(t.Spec.HostNetwork) {
		if !slices.Contains(t.Spec.Tolerations, o) {
			t.Spec.Tolerations = append(t.Spec.Tolerations, o)
		}
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			GenerateName: ds.Name + "-", Namespace: ds.Namespace, Labels: t.Labels, Annotations: t.Annotations, Finalizers: t.Finalizers,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(ds, gvk)},
		},
		Spec: t.Spec,
	}
}

// onNode replaces what the affinity requires of the node by its name: the
// template's demands were checked when the node was chosen.
func onNode(a *corev1.Affinity, node string) *corev1.Affinity {
	if a == nil {
		a = &corev1.Affinity{}
	}
	if a.NodeAffinity == nil {
		a.NodeAffinity = &corev1.NodeAffinity{}
	}
	a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
	}}}
	return a
}

// target is the node that a pod without one is meant for.
func target(p *corev1.Pod) string {
	if p.Spec.NodeName != "" {
		return p.Spec.NodeName
	}
	a := p.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return ""
	}
	for _, t := range a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, r := range t.MatchFields {
			if r.Key == metav1.ObjectNameField && r.Operator == corev1.NodeSelectorOpIn && len(r.Values) == 1 {
				return r.Values[0]
			}
		}
	}
	return ""
}

// budget turns the strategy into numbers, of as many nodes as want a pod and
// are there.
func budget(ds *appsv1.DaemonSet, desired int) (strategy, error) {
	u := &ds.Spec.UpdateStrategy
	if u.Type == appsv1.OnDeleteDaemonSetStrategyType {
		return strategy{onDelete: true}, nil
	}
	var s strategy
	if u.RollingUpdate == nil {
		return strategy{maxUnavailable: 1}, nil
	}
	var err error
	if v := u.RollingUpdate.MaxSurge; v != nil {
		if s.surge, err = intstr.GetScaledValueFromIntOrPercent(v, desired, true); err != nil {
			return s, err
		}
	}
	if v := u.RollingUpdate.MaxUnavailable; v != nil {
		s.maxUnavailable, err = intstr.GetScaledValueFromIntOrPercent(v, desired, true)
	}
	return s, err
}
