package oracle

import (
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	podutil "k8s.io/kubernetes/pkg/api/pod"
	"k8s.io/kubernetes/pkg/apis/apps"
	appsvalidation "k8s.io/kubernetes/pkg/apis/apps/validation"
	"k8s.io/kubernetes/pkg/apis/batch"
	_ "k8s.io/kubernetes/pkg/apis/batch/install"
	batchvalidation "k8s.io/kubernetes/pkg/apis/batch/validation"
	"k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/apis/policy"
	_ "k8s.io/kubernetes/pkg/apis/policy/install"
	policyvalidation "k8s.io/kubernetes/pkg/apis/policy/validation"
)

// validateWorkload does what upstream's strategies do. A DaemonSet's
// templateGeneration is theirs alone.
func validateWorkload(obj, old runtime.Object) field.ErrorList {
	switch o := obj.(type) {
	case *apps.DaemonSet:
		if old == nil {
			return appsvalidation.ValidateDaemonSet(o, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.Template, nil))
		}
		b := old.(*apps.DaemonSet)
		var kept field.ErrorList
		for _, e := range appsvalidation.ValidateDaemonSetUpdate(o, b, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.Template, &b.Spec.Template)) {
			if e.Field != "spec.templateGeneration" {
				kept = append(kept, e)
			}
		}
		return kept
	case *apps.StatefulSet:
		if old == nil {
			return appsvalidation.ValidateStatefulSet(o, appsvalidation.StatefulSetValidationOptions{}, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.Template, nil))
		}
		b := old.(*apps.StatefulSet)
		opts := appsvalidation.StatefulSetValidationOptions{AllowInvalidServiceName: true, SkipValidateVolumeClaimTemplates: true}
		return appsvalidation.ValidateStatefulSetUpdate(o, b, opts, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.Template, &b.Spec.Template))
	case *batch.Job:
		if o.Spec.Completions == nil { // upstream's check of the success policy panics
			o.Spec.SuccessPolicy = nil
			if b, ok := old.(*batch.Job); ok {
				b.Spec.SuccessPolicy = nil
			}
		}
		if old == nil {
			return batchvalidation.ValidateJobCreate(o, jobOptions(&o.Spec.Template, nil))
		}
		b := old.(*batch.Job)
		opts := jobOptions(&o.Spec.Template, &b.Spec.Template)
		open := b.Spec.Suspend != nil && *b.Spec.Suspend && b.Status.StartTime == nil && b.Status.Active == 0
		opts.AllowMutablePodResources, opts.AllowMutableSchedulingDirectives = open, open
		return batchvalidation.ValidateJobUpdate(o, b, opts)
	case *batch.CronJob:
		if old == nil {
			return batchvalidation.ValidateCronJobCreate(o, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.JobTemplate.Spec.Template, nil))
		}
		b := old.(*batch.CronJob)
		return batchvalidation.ValidateCronJobUpdate(o, b, podutil.GetValidationOptionsFromPodTemplate(&o.Spec.JobTemplate.Spec.Template, &b.Spec.JobTemplate.Spec.Template))
	case *policy.PodDisruptionBudget:
		spec := policyvalidation.ValidatePodDisruptionBudget(o, policyvalidation.PodDisruptionBudgetValidationOptions{})
		at := field.NewPath("metadata")
		if old == nil {
			return append(spec, apivalidation.ValidateObjectMeta(&o.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, at)...)
		}
		return append(spec, apivalidation.ValidateObjectMetaUpdate(&o.ObjectMeta, &old.(*policy.PodDisruptionBudget).ObjectMeta, at)...)
	}
	return nil
}

func jobOptions(now, before *core.PodTemplateSpec) batchvalidation.JobValidationOptions {
	return batchvalidation.JobValidationOptions{PodValidationOptions: podutil.GetValidationOptionsFromPodTemplate(now, before), RequirePrefixedLabels: true}
}
