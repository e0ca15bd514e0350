package manifests

import (
	"fmt"
	"math"
	"sort"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

const updatablePodFields = "`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`," +
	"`spec.tolerations` (only additions to existing tolerations)," +
	"`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"

// podUpdate checks what of a pod may change: images, a shorter deadline,
// more tolerations, fewer gates; while gated also more node constraints.
func (p *problems) podUpdate(pod, old *corev1.Pod) {
	p.mirrorAnnotation(pod, old)
	p.podStatusUpdate(pod, old)
	s, was := &pod.Spec, &old.Spec
	for name, lists := range map[string][2][]corev1.Container{
		"containers": {s.Containers, was.Containers}, "initContainers": {s.InitContainers, was.InitContainers},
	} {
		if len(lists[0]) != len(lists[1]) {
			p.forbidden(specPath.Child(name), "pod updates may not add or remove containers")
			return
		}
	}
	if !p.deadlineUpdate(s.ActiveDeadlineSeconds, was.ActiveDeadlineSeconds) {
		return
	}
	p.tolerationsUpdate(s.Tolerations, was.Tolerations)
	p.gatesUpdate(s.SchedulingGates, was.SchedulingGates)
	if equality.Semantic.DeepEqual(s, was) {
		return
	}
	rest := s.DeepCopy()
	for i := range rest.Containers {
		rest.Containers[i].Image = was.Containers[i].Image
	}
	for i := range rest.InitContainers {
		rest.InitContainers[i].Image = was.InitContainers[i].Image
	}
	rest.ActiveDeadlineSeconds, rest.Tolerations, rest.SchedulingGates = was.ActiveDeadlineSeconds, was.Tolerations, was.SchedulingGates
	if g := was.TerminationGracePeriodSeconds; g != nil && *g < 0 && rest.TerminationGracePeriodSeconds != nil && *rest.TerminationGracePeriodSeconds == 1 {
		rest.TerminationGracePeriodSeconds = g
	}
	if len(was.SchedulingGates) > 0 {
		p.gatedUpdate(rest, was)
	}
	if !equality.Semantic.DeepEqual(rest, was) {
		p.forbidden(specPath, fmt.Sprintf("pod updates may not change fields other than %s\n%v", updatablePodFields, changedFields(was, rest)))
	}
}

// changedFields names the fields of the spec that differ, one a line.
func changedFields(was, now *corev1.PodSpec) string {
	before, err := runtime.DefaultUnstructuredConverter.ToUnstructured(was)
	if err != nil {
		return ""
	}
	after, err := runtime.DefaultUnstructuredConverter.ToUnstructured(now)
	if err != nil {
		return ""
	}
	var changed []string
	for k := range after {
		if !equality.Semantic.DeepEqual(before[k], after[k]) {
			changed = append(changed, "spec."+k)
		}
	}
	for k := range before {
		if _, ok := after[k]; !ok {
			changed = append(changed, "spec."+k)
		}
	}
	sort.Strings(changed)
	return "changed: " + strings.Join(changed, ", ")
}

func (p *problems) mirrorAnnotation(pod, old *corev1.Pod) {
	const key = corev1.MirrorPodAnnotationKey
	at := metadataPath.Child("annotations").Key(key)
	now, is := pod.Annotations[key]
	before, was := old.Annotations[key]
	switch {
	case was && (!is || now != before):
		p.forbidden(at, "may not remove or update mirror pod annotation")
	case is && !was:
		p.forbidden(at, "may not add mirror pod annotation")
	}
}

// deadlineUpdate is false when the rest is not worth checking.
func (p *problems) deadlineUpdate(now, before *int64) bool {
	at := specPath.Child("activeDeadlineSeconds")
	switch {
	case now == nil:
		if before != nil {
			p.invalid(at, now, "must not update from a positive integer to nil value")
		}
	case *now < 0 || *now > math.MaxInt32:
		p.invalid(at, *now, validation.InclusiveRangeError(0, math.MaxInt32))
		return false
	case before != nil && *before < *now:
		p.invalid(at, *now, "must be less than or equal to previous value")
		return false
	}
	return true
}

// tolerationsUpdate: each that was there stays, but for its seconds.
func (p *problems) tolerationsUpdate(now, before []corev1.Toleration) {
	for _, b := range before {
		found := false
		for _, n := range now {
			b.TolerationSeconds = n.TolerationSeconds
			if equality.Semantic.DeepEqual(b, n) {
				found = true
				break
			}
		}
		if !found {
			p.forbidden(specPath.Child("tolerations"), "existing toleration can not be modified except its tolerationSeconds")
			return
		}
	}
}

func (p *problems) gatesUpdate(now, before []corev1.PodSchedulingGate) {
	was := names{}
	for _, g := range before {
		was[g.Name] = true
	}
	for i, g := range now {
		if !was[g.Name] {
			p.forbidden(specPath.Child("schedulingGates").Index(i).Child("name"),
				fmt.Sprintf("only deletion is allowed, but found new scheduling gate '%s'", g.Name))
		}
	}
}

// gatedUpdate allows a gated pod's node constraints to become narrower, and
// sets them back in rest so that they do not count as a change.
func (p *problems) gatedUpdate(rest, was *corev1.PodSpec) {
	for k, v := range was.NodeSelector {
		if now, ok := rest.NodeSelector[k]; !ok || now != v {
			p.invalid(specPath.Child("nodeSelector"), rest.NodeSelector, "only additions to spec.nodeSelector are allowed (no mutations or deletions)")
			break
		}
	}
	rest.NodeSelector = was.NodeSelector

	var now, before *corev1.NodeAffinity
	if rest.Affinity != nil {
		now = rest.Affinity.NodeAffinity
	}
	if was.Affinity != nil {
		before = was.Affinity.NodeAffinity
	}
	if equality.Semantic.DeepEqual(now, before) {
		return
	}
	p.nodeAffinityUpdate(specPath.Child("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"), now, before)
	switch {
	case rest.Affinity == nil:
		rest.Affinity = &corev1.Affinity{NodeAffinity: before}
	case was.Affinity == nil && rest.Affinity.PodAffinity == nil && rest.Affinity.PodAntiAffinity == nil:
		rest.Affinity = nil
	default:
		rest.Affinity.NodeAffinity = before
	}
}

func (p *problems) nodeAffinityUpdate(at *field.Path, now, before *corev1.NodeAffinity) {
	terms := func(a *corev1.NodeAffinity) []corev1.NodeSelectorTerm {
		if a == nil || a.RequiredDuringSchedulingIgnoredDuringExecution == nil {
			return nil
		}
		return a.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	}
	n, b := terms(now), terms(before)
	if len(b) > 0 && len(n) != len(b) {
		p.invalid(at, n, "no additions/deletions to non-empty NodeSelectorTerms list are allowed")
		return
	}
	for i := range b {
		if !onlyAdds(n[i], b[i]) {
			p.invalid(at.Index(i), n[i], "only additions are allowed (no mutations or deletions)")
		}
	}
}

func onlyAdds(now, before corev1.NodeSelectorTerm) bool {
	starts := func(now, before []corev1.NodeSelectorRequirement) bool {
		return len(now) >= len(before) && equality.Semantic.DeepEqual(now[:len(before)], before)
	}
	if len(before.MatchExpressions)+len(before.MatchFields) == 0 {
		return len(now.MatchExpressions)+len(now.MatchFields) == 0
	}
	return (len(before.MatchExpressions) == 0 || starts(now.MatchExpressions, before.MatchExpressions)) &&
		(len(before.MatchFields) == 0 || starts(now.MatchFields, before.MatchFields))
}

// podStatusUpdate checks addresses that were reported.
func (p *problems) podStatusUpdate(pod, old *corev1.Pod) {
	if equality.Semantic.DeepEqual(pod.Status, old.Status) {
		return
	}
	st := &pod.Status
	at := statusPath.Child("podIPs")
	var now, before []string
	for _, ip := range st.PodIPs {
		now = append(now, ip.IP)
	}
	for _, ip := range old.Status.PodIPs {
		before = append(before, ip.IP)
	}
	for i, ip := range now {
		p.ip(at.Index(i), ip, before)
	}
	if len(now) > 1 && (len(now) > 2 || !dualStack(now)) {
		p.invalid(at, st.PodIPs, "may specify no more than one IP for each IP family")
	}
	switch {
	case (st.PodIP != "") != (len(now) > 0):
		p.invalid(at, st.PodIPs, "podIP and podIPs must either both be set or both be unset")
	case len(now) > 0 && now[0] != st.PodIP:
		p.invalid(at.Index(0).Child("ip"), now[0], "must be equal to `podIP`")
	}
	if n := st.NominatedNodeName; n != "" && n != old.Status.NominatedNodeName {
		p.invalid(statusPath.Child("nominatedNodeName"), n, validation.IsDNS1123Subdomain(n)...)
	}
}
