package manifests

import (
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// alwaysRestarts checks what the templates of long-running pods must have.
func (p *problems) alwaysRestarts(at *field.Path, t *corev1.PodTemplateSpec, owner string) {
	if t.Spec.RestartPolicy != corev1.RestartPolicyAlways {
		p.add(field.NotSupported(at.Child("spec", "restartPolicy"), t.Spec.RestartPolicy, []corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if t.Spec.ActiveDeadlineSeconds != nil {
		p.forbidden(at.Child("spec", "activeDeadlineSeconds"), "activeDeadlineSeconds in "+owner+" is not Supported")
	}
}

func (p *problems) daemonSet(d *appsv1.DaemonSet) {
	s := &d.Spec
	p.selector(specPath.Child("selector"), s.Selector)
	at := specPath.Child("template")
	if sel, err := metav1.LabelSelectorAsSelector(s.Selector); err == nil && !sel.Matches(labels.Set(s.Template.Labels)) {
		p.invalid(at.Child("metadata", "labels"), s.Template.Labels, "`selector` does not match template `labels`")
	}
	if s.Selector != nil && len(s.Selector.MatchLabels)+len(s.Selector.MatchExpressions) == 0 {
		p.invalid(specPath.Child("selector"), s.Selector, "empty selector is invalid for daemonset")
	}
	p.podTemplate(at, &s.Template)
	p.alwaysRestarts(at, &s.Template, "DaemonSet")
	p.disconnectSet(at, &s.Template, true)
	p.nonNegative(specPath.Child("minReadySeconds"), int64(s.MinReadySeconds))
	p.daemonSetStrategy(specPath.Child("updateStrategy"), &s.UpdateStrategy)
	if l := s.RevisionHistoryLimit; l != nil {
		p.nonNegative(specPath.Child("revisionHistoryLimit"), int64(*l))
	}
}

func (p *problems) daemonSetStrategy(at *field.Path, s *appsv1.DaemonSetUpdateStrategy) {
	switch s.Type {
	case appsv1.OnDeleteDaemonSetStrategyType:
	case appsv1.RollingUpdateDaemonSetStrategyType:
		rolling := at.Child("rollingUpdate")
		if s.RollingUpdate == nil {
			p.required(rolling, "")
			return
		}
		unavailable, surge := s.RollingUpdate.MaxUnavailable, s.RollingUpdate.MaxSurge
		p.intOrPercent(rolling.Child("maxUnavailable"), unavailable)
		p.intOrPercent(rolling.Child("maxSurge"), surge)
		p.atMost100Percent(rolling.Child("maxUnavailable"), unavailable)
		p.atMost100Percent(rolling.Child("maxSurge"), surge)
		switch u, v := magnitude(unavailable) != 0, magnitude(surge) != 0; {
		case u && v:
			p.invalid(rolling.Child("maxSurge"), deref(surge), "may not be set when maxUnavailable is non-zero")
		case !u && !v:
			p.required(rolling.Child("maxUnavailable"), "cannot be 0 when maxSurge is 0")
		}
	default:
		p.add(field.NotSupported(at, s, []appsv1.DaemonSetUpdateStrategyType{
			appsv1.RollingUpdateDaemonSetStrategyType, appsv1.OnDeleteDaemonSetStrategyType}))
	}
}

func (p *problems) daemonSetUpdate(d, old *appsv1.DaemonSet) {
	p.immutable(specPath.Child("selector"), d.Spec.Selector, old.Spec.Selector)
	if equality.Semantic.DeepEqual(d.Status, old.Status) {
		return
	}
	s := &d.Status
	for _, c := range []counter{
		{"currentNumberScheduled", int64(s.CurrentNumberScheduled)}, {"numberMisscheduled", int64(s.NumberMisscheduled)},
		{"desiredNumberScheduled", int64(s.DesiredNumberScheduled)}, {"numberReady", int64(s.NumberReady)},
		{"observedGeneration", s.ObservedGeneration}, {"updatedNumberScheduled", int64(s.UpdatedNumberScheduled)},
		{"numberAvailable", int64(s.NumberAvailable)}, {"numberUnavailable", int64(s.NumberUnavailable)},
	} {
		p.nonNegative(statusPath.Child(c.name), c.n)
	}
	p.collisions(s.CollisionCount, old.Status.CollisionCount)
}

// collisions checks a status's count of name collisions, which only grows.
func (p *problems) collisions(now, old *int32) {
	if now != nil {
		p.nonNegative(statusPath.Child("collisionCount"), int64(*now))
	}
	if old == nil {
		return
	}
	n := int32(0)
	if now != nil {
		n = *now
	}
	if n < *old {
		p.invalid(statusPath.Child("collisionCount"), n, "cannot be decremented")
	}
}

func (p *problems) statefulSet(s *appsv1.StatefulSet, create bool) {
	spec := &s.Spec
	switch policy := specPath.Child("podManagementPolicy"); spec.PodManagementPolicy {
	case "":
		p.required(policy, "")
	case appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement:
	default:
		p.invalid(policy, spec.PodManagementPolicy, fmt.Sprintf("must be '%s' or '%s'", appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement))
	}
	p.statefulSetStrategy(specPath.Child("updateStrategy"), &spec.UpdateStrategy)
	if r := spec.PersistentVolumeClaimRetentionPolicy; r != nil {
		at := specPath.Child("persistentVolumeClaimRetentionPolicy")
		allowed := []appsv1.PersistentVolumeClaimRetentionPolicyType{
			appsv1.RetainPersistentVolumeClaimRetentionPolicyType, appsv1.DeletePersistentVolumeClaimRetentionPolicyType}
		supported(p, at.Child("whenDeleted"), r.WhenDeleted, allowed...)
		supported(p, at.Child("whenScaled"), r.WhenScaled, allowed...)
	}
	if spec.Replicas != nil {
		p.nonNegative(specPath.Child("replicas"), int64(*spec.Replicas))
	}
	p.nonNegative(specPath.Child("minReadySeconds"), int64(spec.MinReadySeconds))
	if spec.Ordinals != nil {
		p.nonNegative(specPath.Child("ordinals.start"), int64(spec.Ordinals.Start))
	}
	if create && spec.ServiceName != "" {
		p.dnsLabel(specPath.Child("serviceName"), spec.ServiceName)
	}
	p.statefulSetTemplate(spec)
}

func (p *problems) statefulSetTemplate(spec *appsv1.StatefulSetSpec) {
	at := specPath.Child("selector")
	if spec.Selector == nil {
		p.required(at, "")
	} else {
		p.selector(at, spec.Selector)
		if len(spec.Selector.MatchLabels)+len(spec.Selector.MatchExpressions) == 0 {
			p.invalid(at, spec.Selector, "empty selector is invalid for statefulset")
		}
	}
	template := specPath.Child("template")
	if sel, err := metav1.LabelSelectorAsSelector(spec.Selector); err != nil {
		p.invalid(at, spec.Selector, "")
	} else {
		if !sel.Empty() && !sel.Matches(labels.Set(spec.Template.Labels)) {
			p.invalid(template.Child("metadata", "labels"), spec.Template.Labels, "`selector` does not match template `labels`")
		}
		t := &spec.Template
		if t.Spec.Subdomain != "" || t.Spec.Hostname != "" || len(spec.VolumeClaimTemplates) > 0 {
			t = t.DeepCopy()
			t.Spec.Subdomain, t.Spec.Hostname = "", "" // the controller sets them
			t.Spec.Volumes = withClaimVolumes(t.Spec.Volumes, spec.VolumeClaimTemplates)
		}
		p.podTemplate(template, t)
	}
	p.alwaysRestarts(template, &spec.Template, "StatefulSet")
	p.disconnectSet(template, &spec.Template, false)
}

// withClaimVolumes are the volumes that a pod of the set will have.
func withClaimVolumes(volumes []corev1.Volume, claims []corev1.PersistentVolumeClaim) []corev1.Volume {
	var out []corev1.Volume
	of := names{}
	for i := range claims {
		if !of.seen(claims[i].Name) {
			out = append(out, corev1.Volume{Name: claims[i].Name, VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claims[i].Name}}})
		}
	}
	for _, v := range volumes {
		if !of[v.Name] {
			out = append(out, v)
		}
	}
	return out
}

func (p *problems) statefulSetStrategy(at *field.Path, u *appsv1.StatefulSetUpdateStrategy) {
	r := u.RollingUpdate
	switch u.Type {
	case "":
		p.required(at, "")
	case appsv1.OnDeleteStatefulSetStrategyType:
		if r != nil {
			p.invalid(at.Child("rollingUpdate"), r, fmt.Sprintf("only allowed for updateStrategy '%s'", appsv1.RollingUpdateStatefulSetStrategyType))
		}
	case appsv1.RollingUpdateStatefulSetStrategyType:
		if r == nil {
			return
		}
		if r.Partition != nil {
			p.nonNegative(at.Child("rollingUpdate", "partition"), int64(*r.Partition))
		}
		if r.MaxUnavailable != nil {
			unavailable := at.Child("rollingUpdate", "maxUnavailable")
			p.intOrPercent(unavailable, r.MaxUnavailable)
			if magnitude(r.MaxUnavailable) == 0 {
				p.invalid(unavailable, *r.MaxUnavailable, "cannot be 0")
			}
			p.atMost100Percent(unavailable, r.MaxUnavailable)
		}
	default:
		p.invalid(at, u, fmt.Sprintf("must be '%s' or '%s'", appsv1.RollingUpdateStatefulSetStrategyType, appsv1.OnDeleteStatefulSetStrategyType))
	}
}

func (p *problems) atMost100Percent(at *field.Path, v *intstr.IntOrString) {
	if n, ok := percent(v); ok && n > 100 {
		p.invalid(at, *v, "must not be greater than 100%")
	}
}

func (p *problems) statefulSetUpdate(s, old *appsv1.StatefulSet) {
	p.immutable(specPath.Child("selector"), s.Spec.Selector, old.Spec.Selector)
	p.immutable(specPath.Child("volumeClaimTemplates"), s.Spec.VolumeClaimTemplates, old.Spec.VolumeClaimTemplates)
	p.immutable(specPath.Child("serviceName"), s.Spec.ServiceName, old.Spec.ServiceName)
	p.immutable(specPath.Child("podManagementPolicy"), s.Spec.PodManagementPolicy, old.Spec.PodManagementPolicy)
	if equality.Semantic.DeepEqual(s.Status, old.Status) {
		return
	}
	st := &s.Status
	p.nonNegative(statusPath.Child("observedGeneration"), st.ObservedGeneration)
	p.nonNegative(statusPath.Child("replicas"), int64(st.Replicas))
	for _, c := range []counter{
		{"readyReplicas", int64(st.ReadyReplicas)}, {"currentReplicas", int64(st.CurrentReplicas)},
		{"updatedReplicas", int64(st.UpdatedReplicas)}, {"availableReplicas", int64(st.AvailableReplicas)},
	} {
		p.nonNegative(statusPath.Child(c.name), c.n)
		if c.n > int64(st.Replicas) {
			p.invalid(statusPath.Child(c.name), int32(c.n), "cannot be greater than status.replicas")
		}
	}
	if st.AvailableReplicas > st.ReadyReplicas {
		p.invalid(statusPath.Child("availableReplicas"), st.AvailableReplicas, "cannot be greater than status.readyReplicas")
	}
	p.collisions(st.CollisionCount, old.Status.CollisionCount)
}
