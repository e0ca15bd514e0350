package printers

import (
	"fmt"
	"reflect"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// addBatch registers Jobs, CronJobs and disruption budgets.
func addBatch(m map[reflect.Type]*printer) {
	selector := batchv1.JobSpec{}.SwaggerDoc()["selector"]
	add(m, append([]metav1.TableColumnDefinition{
		nameColumn(),
		column("Status", "Status of the job."),
		column("Completions", batchv1.JobStatus{}.SwaggerDoc()["succeeded"]),
		column("Duration", "Time required to complete the job."),
		ageColumn(),
	}, templateColumns(selector)...), func(o *batchv1.Job, now time.Time) []any {
		names, images := containers(o.Spec.Template.Spec.Containers)
		return []any{
			o.Name, jobStatus(o), completions(o), jobDuration(&o.Status, now), age(o.CreationTimestamp, now),
			names, images, metav1.FormatLabelSelector(o.Spec.Selector),
		}
	})
	spec, status := batchv1.CronJobSpec{}.SwaggerDoc(), batchv1.CronJobStatus{}.SwaggerDoc()
	add(m, append([]metav1.TableColumnDefinition{
		nameColumn(),
		column("Schedule", spec["schedule"]),
		column("Timezone", spec["timeZone"]),
		typed("boolean", column("Suspend", spec["suspend"])),
		typed("integer", column("Active", status["active"])),
		column("Last Schedule", status["lastScheduleTime"]),
		ageColumn(),
	}, templateColumns(selector)...), func(o *batchv1.CronJob, now time.Time) []any {
		last, zone, suspend := none, none, "<unset>"
		if o.Status.LastScheduleTime != nil {
			last = age(*o.Status.LastScheduleTime, now)
		}
		if o.Spec.TimeZone != nil {
			zone = *o.Spec.TimeZone
		}
		if o.Spec.Suspend != nil {
			suspend = "False"
			if *o.Spec.Suspend {
				suspend = "True"
			}
		}
		names, images := containers(o.Spec.JobTemplate.Spec.Template.Spec.Containers)
		return []any{
			o.Name, o.Spec.Schedule, zone, suspend, int64(len(o.Status.Active)), last, age(o.CreationTimestamp, now),
			names, images, metav1.FormatLabelSelector(o.Spec.JobTemplate.Spec.Selector),
		}
	})
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Min Available", "The minimum number of pods that must be available."),
		column("Max Unavailable", "The maximum number of pods that may be unavailable."),
		typed("integer", column("Allowed Disruptions", "Calculated number of pods that may be disrupted at this time.")),
		ageColumn(),
	}, func(o *policyv1.PodDisruptionBudget, now time.Time) []any {
		return []any{
			o.Name, orNA(o.Spec.MinAvailable), orNA(o.Spec.MaxUnavailable), int64(o.Status.DisruptionsAllowed), age(o.CreationTimestamp, now),
		}
	})
}

func orNA(v *intstr.IntOrString) string {
	if v == nil {
		return "N/A"
	}
	return v.String()
}

func jobStatus(o *batchv1.Job) string {
	has := func(t batchv1.JobConditionType) bool {
		for _, c := range o.Status.Conditions {
			if c.Type == t {
				return c.Status == corev1.ConditionTrue
			}
		}
		return false
	}
	for _, s := range []struct {
		is   bool
		name string
	}{
		{has(batchv1.JobComplete), "Complete"}, {has(batchv1.JobFailed), "Failed"}, {o.DeletionTimestamp != nil, "Terminating"},
		{has(batchv1.JobSuspended), "Suspended"}, {has(batchv1.JobFailureTarget), "FailureTarget"}, {has(batchv1.JobSuccessCriteriaMet), "SuccessCriteriaMet"},
	} {
		if s.is {
			return s.name
		}
	}
	return "Running"
}

func completions(o *batchv1.Job) string {
	switch p := o.Spec.Parallelism; {
	case o.Spec.Completions != nil:
		return fmt.Sprintf("%d/%d", o.Status.Succeeded, *o.Spec.Completions)
	case p != nil && *p > 1:
		return fmt.Sprintf("%d/1 of %d", o.Status.Succeeded, *p)
	}
	return fmt.Sprintf("%d/1", o.Status.Succeeded)
}

func jobDuration(s *batchv1.JobStatus, now time.Time) string {
	switch {
	case s.StartTime == nil:
		return ""
	case s.CompletionTime == nil:
		return duration.HumanDuration(now.Sub(s.StartTime.Time))
	}
	return duration.HumanDuration(s.CompletionTime.Sub(s.StartTime.Time))
}
