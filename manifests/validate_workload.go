package manifests

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ownedTemplate checks a template against its owner's selector.
func (p *problems) ownedTemplate(at *field.Path, t *corev1.PodTemplateSpec, s labels.Selector, owner string) {
	if !s.Empty() && !s.Matches(labels.Set(t.Labels)) {
		p.invalid(at.Child("metadata", "labels"), t.Labels, "`selector` does not match template `labels`")
	}
	p.podTemplate(at, t)
	if t.Spec.RestartPolicy != corev1.RestartPolicyAlways {
		p.add(field.NotSupported(at.Child("spec", "restartPolicy"), t.Spec.RestartPolicy, []corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if t.Spec.ActiveDeadlineSeconds != nil {
		p.forbidden(at.Child("spec", "activeDeadlineSeconds"), "activeDeadlineSeconds in "+owner+" is not Supported")
	}
}

// selectorAndTemplate is what ReplicaSets and Deployments have in common.
// Upstream's words name the deployment for both.
func (p *problems) selectorAndTemplate(s *metav1.LabelSelector, t *corev1.PodTemplateSpec) {
	at := specPath.Child("selector")
	if s == nil {
		p.required(at, "")
	} else {
		p.selector(at, s)
		if len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
			p.invalid(at, s, "empty selector is invalid for deployment")
		}
	}
	sel, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		p.invalid(at, s, "invalid label selector")
		return
	}
	p.ownedTemplate(specPath.Child("template"), t, sel, "ReplicaSet")
}

func (p *problems) replicaSet(rs *appsv1.ReplicaSet) {
	p.replicas(rs.Spec.Replicas)
	p.nonNegative(specPath.Child("minReadySeconds"), int64(rs.Spec.MinReadySeconds))
	p.selectorAndTemplate(rs.Spec.Selector, &rs.Spec.Template)
}

func (p *problems) replicas(n *int32) {
	if n == nil {
		p.required(specPath.Child("replicas"), "")
		return
	}
	p.nonNegative(specPath.Child("replicas"), int64(*n))
}

func (p *problems) deployment(d *appsv1.Deployment) {
	s := &d.Spec
	p.replicas(s.Replicas)
	p.selectorAndTemplate(s.Selector, &s.Template)
	p.strategy(specPath.Child("strategy"), &s.Strategy)
	p.nonNegative(specPath.Child("minReadySeconds"), int64(s.MinReadySeconds))
	if _, _, err := AutoRollback(d.Annotations); err != nil {
		p.invalid(field.NewPath("metadata", "annotations").Key(AnnotationAutoRollback), d.Annotations[AnnotationAutoRollback], err.Error())
	}
	if l := s.RevisionHistoryLimit; l != nil {
		p.nonNegative(specPath.Child("revisionHistoryLimit"), int64(*l))
	}
	if d := s.ProgressDeadlineSeconds; d != nil {
		at := specPath.Child("progressDeadlineSeconds")
		p.nonNegative(at, int64(*d))
		if *d <= s.MinReadySeconds {
			p.invalid(at, d, "must be greater than minReadySeconds")
		}
	}
}

func (p *problems) strategy(at *field.Path, s *appsv1.DeploymentStrategy) {
	rolling := at.Child("rollingUpdate")
	switch s.Type {
	case appsv1.RecreateDeploymentStrategyType:
		if s.RollingUpdate != nil {
			p.forbidden(rolling, "may not be specified when strategy `type` is 'Recreate'")
		}
	case appsv1.RollingUpdateDeploymentStrategyType:
		if s.RollingUpdate == nil {
			p.required(rolling, "this should be defaulted and never be nil")
			return
		}
		unavailable, surge := s.RollingUpdate.MaxUnavailable, s.RollingUpdate.MaxSurge
		p.intOrPercent(rolling.Child("maxUnavailable"), unavailable)
		p.intOrPercent(rolling.Child("maxSurge"), surge)
		if magnitude(unavailable) == 0 && magnitude(surge) == 0 {
			p.invalid(rolling.Child("maxUnavailable"), deref(unavailable), "may not be 0 when `maxSurge` is 0")
		}
		if v, ok := percent(unavailable); ok && v > 100 {
			p.invalid(rolling.Child("maxUnavailable"), deref(unavailable), "must not be greater than 100%")
		}
	default:
		p.add(field.NotSupported(at, s, []appsv1.DeploymentStrategyType{
			appsv1.RecreateDeploymentStrategyType, appsv1.RollingUpdateDeploymentStrategyType}))
	}
}

func deref(v *intstr.IntOrString) intstr.IntOrString {
	if v == nil {
		return intstr.IntOrString{}
	}
	return *v
}

func (p *problems) intOrPercent(at *field.Path, v *intstr.IntOrString) {
	switch x := deref(v); x.Type {
	case intstr.String:
		p.invalid(at, x, validation.IsValidPercent(x.StrVal)...)
	default:
		p.nonNegative(at, int64(x.IntValue()))
	}
}

func percent(v *intstr.IntOrString) (int, bool) {
	x := deref(v)
	if x.Type != intstr.String || len(validation.IsValidPercent(x.StrVal)) > 0 {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSuffix(x.StrVal, "%"))
	return n, err == nil
}

// magnitude is the number, of whichever unit.
func magnitude(v *intstr.IntOrString) int {
	if n, ok := percent(v); ok {
		return n
	}
	x := deref(v)
	return x.IntValue()
}

func (p *problems) replicationController(rc *corev1.ReplicationController) {
	p.nonNegative(specPath.Child("minReadySeconds"), int64(rc.Spec.MinReadySeconds))
	sel := labels.SelectorFromSet(rc.Spec.Selector)
	if len(rc.Spec.Selector) == 0 {
		p.required(specPath.Child("selector"), "")
	}
	p.replicas(rc.Spec.Replicas)
	if rc.Spec.Template == nil {
		p.required(specPath.Child("template"), "")
		return
	}
	p.ownedTemplate(specPath.Child("template"), rc.Spec.Template, sel, "ReplicationController")
}

// counter is one status field that may not exceed another.
type counter struct {
	name string
	n    int64
}

// counts checks that status numbers are sane: not negative, not more than
// the replicas, and available not more than ready.
func (p *problems) counts(replicas int64, ready, available counter, others ...counter) {
	p.nonNegative(statusPath.Child("replicas"), replicas)
	for _, c := range append([]counter{ready, available}, others...) {
		p.nonNegative(statusPath.Child(c.name), c.n)
		if c.n > replicas {
			p.invalid(statusPath.Child(c.name), int32(c.n), "cannot be greater than status.replicas")
		}
	}
	if available.n > ready.n {
		p.invalid(statusPath.Child(available.name), int32(available.n), "cannot be greater than readyReplicas")
	}
}

func (p *problems) deploymentStatus(d, old *appsv1.Deployment) {
	if equality.Semantic.DeepEqual(d.Status, old.Status) {
		return
	}
	s := &d.Status
	p.nonNegative(statusPath.Child("observedGeneration"), s.ObservedGeneration)
	p.nonNegative(statusPath.Child("unavailableReplicas"), int64(s.UnavailableReplicas))
	p.counts(int64(s.Replicas), counter{"readyReplicas", int64(s.ReadyReplicas)}, counter{"availableReplicas", int64(s.AvailableReplicas)},
		counter{"updatedReplicas", int64(s.UpdatedReplicas)})
	if n := s.TerminatingReplicas; n != nil {
		p.nonNegative(statusPath.Child("terminatingReplicas"), int64(*n))
	}
	if n := s.CollisionCount; n != nil {
		p.nonNegative(statusPath.Child("collisionCount"), int64(*n))
		if old.Status.CollisionCount != nil && *n < *old.Status.CollisionCount {
			p.invalid(statusPath.Child("collisionCount"), *n, "cannot be decremented")
		}
	}
}

func (p *problems) replicaSetStatus(rs, old *appsv1.ReplicaSet) {
	if equality.Semantic.DeepEqual(rs.Status, old.Status) {
		return
	}
	s := &rs.Status
	p.nonNegative(statusPath.Child("observedGeneration"), s.ObservedGeneration)
	p.counts(int64(s.Replicas), counter{"readyReplicas", int64(s.ReadyReplicas)}, counter{"availableReplicas", int64(s.AvailableReplicas)},
		counter{"fullyLabeledReplicas", int64(s.FullyLabeledReplicas)})
	if n := s.TerminatingReplicas; n != nil {
		p.nonNegative(statusPath.Child("terminatingReplicas"), int64(*n))
	}
}

func (p *problems) replicationControllerStatus(rc, old *corev1.ReplicationController) {
	if equality.Semantic.DeepEqual(rc.Status, old.Status) {
		return
	}
	s := &rc.Status
	p.nonNegative(statusPath.Child("observedGeneration"), s.ObservedGeneration)
	p.counts(int64(s.Replicas), counter{"readyReplicas", int64(s.ReadyReplicas)}, counter{"availableReplicas", int64(s.AvailableReplicas)},
		counter{"fullyLabeledReplicas", int64(s.FullyLabeledReplicas)})
}

// controllerRevision checks the data on create only: it never changes.
func (p *problems) controllerRevision(r *appsv1.ControllerRevision, create bool) {
	p.nonNegative(field.NewPath("revision"), r.Revision)
	if !create {
		return
	}
	at := field.NewPath("data")
	if r.Data.Raw == nil {
		p.required(at, "data is mandatory")
		return
	}
	var v any
	switch err := json.Unmarshal(r.Data.Raw, &v); {
	case err != nil:
		p.invalid(at, "<value omitted>", fmt.Sprintf("error parsing data: %v", err))
	case v == nil:
		p.required(at, "data is mandatory")
	default:
		if _, ok := v.(map[string]any); !ok {
			p.required(at, "data must be a valid JSON object")
		}
	}
}
