package manifests

import (
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func (p *problems) podFailurePolicy(at *field.Path, s *batchv1.JobSpec) {
	rules := at.Child("rules")
	if n := len(s.PodFailurePolicy.Rules); n > maxPolicyRules {
		p.add(field.TooMany(rules, n, maxPolicyRules))
	}
	var containers []string
	for _, list := range [][]corev1.Container{s.Template.Spec.Containers, s.Template.Spec.InitContainers} {
		for i := range list {
			containers = append(containers, list[i].Name)
		}
	}
	for i := range s.PodFailurePolicy.Rules {
		p.failureRule(rules.Index(i), &s.PodFailurePolicy.Rules[i], s.BackoffLimitPerIndex != nil, containers)
	}
}

// chosen checks a required choice; upstream lists the choices both when it is
// missing and when it is wrong.
func chosen[T ~string](p *problems, at *field.Path, v T, allowed ...T) {
	if v == "" {
		p.required(at, fmt.Sprintf("valid values: %q", allowed))
		return
	}
	supported(p, at, v, allowed...)
}

func (p *problems) failureRule(at *field.Path, r *batchv1.PodFailurePolicyRule, perIndex bool, containers []string) {
	action := at.Child("action")
	if r.Action == batchv1.PodFailurePolicyActionFailIndex {
		if !perIndex {
			p.invalid(action, r.Action, "requires the backoffLimitPerIndex to be set")
		}
	} else {
		chosen(p, action, r.Action, batchv1.PodFailurePolicyActionCount, batchv1.PodFailurePolicyActionFailIndex,
			batchv1.PodFailurePolicyActionFailJob, batchv1.PodFailurePolicyActionIgnore)
	}
	if r.OnExitCodes != nil {
		p.onExitCodes(at.Child("onExitCodes"), r.OnExitCodes, containers)
	}
	if n := len(r.OnPodConditions); n > 0 {
		conditions := at.Child("onPodConditions")
		if n > maxPolicyRules {
			p.add(field.TooMany(conditions, n, maxPolicyRules))
		}
		for i, c := range r.OnPodConditions {
			p.qualifiedName(conditions.Index(i).Child("type"), string(c.Type))
			chosen(p, conditions.Index(i).Child("status"), c.Status, corev1.ConditionFalse, corev1.ConditionTrue, corev1.ConditionUnknown)
		}
	}
	switch codes, conditions := r.OnExitCodes != nil, len(r.OnPodConditions) > 0; {
	case codes && conditions:
		p.invalid(at, field.OmitValueType{}, "specifying both OnExitCodes and OnPodConditions is not supported")
	case !codes && !conditions:
		p.invalid(at, field.OmitValueType{}, "specifying one of OnExitCodes and OnPodConditions is required")
	}
}

func (p *problems) onExitCodes(at *field.Path, r *batchv1.PodFailurePolicyOnExitCodesRequirement, containers []string) {
	chosen(p, at.Child("operator"), r.Operator, batchv1.PodFailurePolicyOnExitCodesOpIn, batchv1.PodFailurePolicyOnExitCodesOpNotIn)
	if r.ContainerName != nil && !slices.Contains(containers, *r.ContainerName) {
		p.invalid(at.Child("containerName"), *r.ContainerName, "must be one of the container or initContainer names in the pod template")
	}
	values := at.Child("values")
	switch n := len(r.Values); {
	case n == 0:
		p.invalid(values, r.Values, "at least one value is required")
	case n > maxExitCodes:
		p.add(field.TooMany(values, n, maxExitCodes))
	}
	seen := map[int32]bool{}
	for i, v := range r.Values {
		if v == 0 && r.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn {
			p.invalid(values.Index(i), v, "must not be 0 for the In operator")
		}
		if seen[v] {
			p.duplicate(values.Index(i), v)
		}
		seen[v] = true
	}
	if !slices.IsSorted(r.Values) {
		p.invalid(values, r.Values, "must be ordered")
	}
}

func (p *problems) successPolicy(at *field.Path, s *batchv1.JobSpec) {
	rules := at.Child("rules")
	switch n := len(s.SuccessPolicy.Rules); {
	case n == 0:
		p.required(rules, "at least one rules must be specified when the successPolicy is specified")
	case n > maxPolicyRules:
		p.add(field.TooMany(rules, n, maxPolicyRules))
	}
	completions := int32(0)
	if s.Completions != nil {
		completions = *s.Completions
	}
	for i, r := range s.SuccessPolicy.Rules {
		one := rules.Index(i)
		if r.SucceededCount == nil && r.SucceededIndexes == nil {
			p.required(one, "at least one of succeededCount or succeededIndexes must be specified")
		}
		total := int32(0)
		if x := r.SucceededIndexes; x != nil {
			if len(*x) > maxSucceededIndexesText {
				p.add(field.TooLong(one.Child("succeededIndexes"), "", maxSucceededIndexesText))
			}
			set, err := ParseIndexes(*x, completions)
			if err != nil {
				p.invalid(one.Child("succeededIndexes"), *x, "error parsing succeededIndexes: "+err.Error())
			} else {
				total = int32(set.Len())
			}
		}
		if n := r.SucceededCount; n != nil {
			count := one.Child("succeededCount")
			p.nonNegative(count, int64(*n))
			if *n > completions {
				p.invalid(count, *n, fmt.Sprintf("must be less than or equal to %d (the number of specified completions)", completions))
			}
			if r.SucceededIndexes != nil && *n > total {
				p.invalid(count, *n, fmt.Sprintf("must be less than or equal to %d (the number of indexes in the specified succeededIndexes field)", total))
			}
		}
	}
}

func jobCondition(s *batchv1.JobStatus, t batchv1.JobConditionType) bool {
	return slices.ContainsFunc(s.Conditions, func(c batchv1.JobCondition) bool { return c.Type == t && c.Status == corev1.ConditionTrue })
}

// jobStatus checks a changed status: what is over stays so, and what was
// counted stays counted, whoever the Job's controller is.
func (p *problems) jobStatus(j, old *batchv1.Job) {
	s, o := &j.Status, &old.Status
	p.nonNegative(statusPath.Child("active"), int64(s.Active))
	p.nonNegative(statusPath.Child("succeeded"), int64(s.Succeeded))
	p.nonNegative(statusPath.Child("failed"), int64(s.Failed))
	if s.Ready != nil {
		p.nonNegative(statusPath.Child("ready"), int64(*s.Ready))
		if *s.Ready > s.Active {
			p.invalid(statusPath.Child("ready"), *s.Ready, "cannot set more ready pods than active")
		}
	}
	if s.Terminating != nil {
		p.nonNegative(statusPath.Child("terminating"), int64(*s.Terminating))
	}
	conditions := statusPath.Child("conditions")
	both := func(a, b batchv1.JobConditionType, detail string) {
		if jobCondition(s, a) && jobCondition(s, b) {
			p.invalid(conditions, field.OmitValueType{}, detail)
		}
	}
	both(batchv1.JobComplete, batchv1.JobFailed, "cannot set Complete=True and Failed=true conditions")
	both(batchv1.JobComplete, batchv1.JobFailureTarget, "cannot set Complete=True and FailureTarget=true conditions")
	both(batchv1.JobSuccessCriteriaMet, batchv1.JobFailed, "cannot set SuccessCriteriaMet=True and Failed=true conditions")
	both(batchv1.JobSuccessCriteriaMet, batchv1.JobFailureTarget, "cannot set SuccessCriteriaMet=True and FailureTarget=true conditions")
	complete, failed := jobCondition(s, batchv1.JobComplete), jobCondition(s, batchv1.JobFailed)
	if failed && !jobCondition(s, batchv1.JobFailureTarget) {
		p.invalid(conditions, field.OmitValueType{}, "cannot set Failed=True condition without the FailureTarget=true condition")
	}
	if complete && !jobCondition(s, batchv1.JobSuccessCriteriaMet) {
		p.invalid(conditions, field.OmitValueType{}, "cannot set Complete=True condition without the SuccessCriteriaMet=true condition")
	}
	switch {
	case complete && s.CompletionTime == nil:
		p.required(statusPath.Child("completionTime"), "completionTime is required for Complete jobs")
	case !complete && s.CompletionTime != nil:
		p.invalid(statusPath.Child("completionTime"), s.CompletionTime, "cannot set completionTime when there is no Complete=True condition")
	}
	if complete || failed {
		if s.Active > 0 {
			p.invalid(statusPath.Child("active"), s.Active, "active>0 is invalid for finished job")
		}
		if u := s.UncountedTerminatedPods; u != nil && len(u.Failed)+len(u.Succeeded) > 0 {
			p.invalid(statusPath.Child("uncountedTerminatedPods"), u, "must be empty for finished job")
		}
	}
	for _, t := range []batchv1.JobConditionType{batchv1.JobFailed, batchv1.JobComplete, batchv1.JobFailureTarget} {
		if jobCondition(o, t) && !jobCondition(s, t) {
			p.invalid(conditions, field.OmitValueType{}, fmt.Sprintf("cannot disable the terminal %s=True condition", t))
		}
	}
	if jobCondition(o, batchv1.JobSuccessCriteriaMet) && !jobCondition(s, batchv1.JobSuccessCriteriaMet) {
		p.invalid(conditions, field.OmitValueType{}, "cannot disable the SuccessCriteriaMet=True condition")
	}
	if s.Failed < o.Failed {
		p.invalid(statusPath.Child("failed"), s.Failed, "cannot decrease the failed counter")
	}
	elastic := indexed(&j.Spec) && j.Spec.Completions != nil && j.Spec.Parallelism != nil && *j.Spec.Completions == *j.Spec.Parallelism
	if s.Succeeded < o.Succeeded && !elastic {
		p.invalid(statusPath.Child("succeeded"), s.Succeeded, "cannot decrease the succeeded counter")
	}
}
