package manifests

import (
	"slices"

	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func (p *problems) disruptionBudget(b *policyv1.PodDisruptionBudget) {
	s := &b.Spec
	if s.MinAvailable != nil && s.MaxUnavailable != nil {
		p.invalid(specPath, *s, "minAvailable and maxUnavailable cannot be both set")
	}
	if v := s.MinAvailable; v != nil {
		p.intOrPercent(specPath.Child("minAvailable"), v)
		p.atMost100Percent(specPath.Child("minAvailable"), v)
	}
	if v := s.MaxUnavailable; v != nil {
		p.intOrPercent(specPath.Child("maxUnavailable"), v)
		p.atMost100Percent(specPath.Child("maxUnavailable"), v)
	}
	p.selector(specPath.Child("selector"), s.Selector)
	allowed := []policyv1.UnhealthyPodEvictionPolicyType{policyv1.AlwaysAllow, policyv1.IfHealthyBudget}
	if u := s.UnhealthyPodEvictionPolicy; u != nil && !slices.Contains(allowed, *u) {
		p.add(field.NotSupported(specPath.Child("unhealthyPodEvictionPolicy"), *u, allowed))
	}
}

func (p *problems) disruptionBudgetUpdate(b, old *policyv1.PodDisruptionBudget) {
	if equality.Semantic.DeepEqual(b.Status, old.Status) {
		return
	}
	s := &b.Status
	p.add(metavalidation.ValidateConditions(s.Conditions, statusPath.Child("conditions"))...)
	p.nonNegative(statusPath.Child("disruptionsAllowed"), int64(s.DisruptionsAllowed))
	p.nonNegative(statusPath.Child("currentHealthy"), int64(s.CurrentHealthy))
	p.nonNegative(statusPath.Child("desiredHealthy"), int64(s.DesiredHealthy))
	p.nonNegative(statusPath.Child("expectedPods"), int64(s.ExpectedPods))
}
