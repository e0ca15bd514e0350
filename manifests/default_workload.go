package manifests

import (
	"math"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func defaultDaemonSet(d *appsv1.DaemonSet) {
	s := &d.Spec.UpdateStrategy
	setZero(&s.Type, appsv1.RollingUpdateDaemonSetStrategyType)
	if s.Type == appsv1.RollingUpdateDaemonSetStrategyType {
		if s.RollingUpdate == nil {
			s.RollingUpdate = &appsv1.RollingUpdateDaemonSet{}
		}
		setDefault(&s.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
		setDefault(&s.RollingUpdate.MaxSurge, intstr.FromInt32(0))
	}
	setDefault(&d.Spec.RevisionHistoryLimit, 10)
	defaultPodSpec(&d.Spec.Template.Spec)
}

func defaultStatefulSet(s *appsv1.StatefulSet) {
	setZero(&s.Spec.PodManagementPolicy, appsv1.OrderedReadyPodManagement)
	u := &s.Spec.UpdateStrategy
	if u.Type == "" {
		u.Type = appsv1.RollingUpdateStatefulSetStrategyType
		if u.RollingUpdate == nil {
			u.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{}
		}
	}
	if u.Type == appsv1.RollingUpdateStatefulSetStrategyType && u.RollingUpdate != nil {
		setDefault(&u.RollingUpdate.Partition, 0)
		setDefault(&u.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
	}
	if s.Spec.PersistentVolumeClaimRetentionPolicy == nil {
		s.Spec.PersistentVolumeClaimRetentionPolicy = &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{}
	}
	setZero(&s.Spec.PersistentVolumeClaimRetentionPolicy.WhenDeleted, appsv1.RetainPersistentVolumeClaimRetentionPolicyType)
	setZero(&s.Spec.PersistentVolumeClaimRetentionPolicy.WhenScaled, appsv1.RetainPersistentVolumeClaimRetentionPolicyType)
	setDefault(&s.Spec.Replicas, 1)
	setDefault(&s.Spec.RevisionHistoryLimit, 10)
	defaultPodSpec(&s.Spec.Template.Spec)
	for i := range s.Spec.VolumeClaimTemplates {
		c := &s.Spec.VolumeClaimTemplates[i]
		c.APIVersion, c.Kind = "v1", "PersistentVolumeClaim"
		setZero(&c.Status.Phase, corev1.ClaimPending)
		defaultClaim(&c.Spec)
		roundResources(c.Status.Capacity, c.Status.AllocatedResources)
	}
}

func defaultJob(j *batchv1.Job) {
	s := &j.Spec
	if s.Completions == nil && s.Parallelism == nil {
		setDefault(&s.Completions, 1)
	}
	setDefault(&s.Parallelism, 1)
	if s.BackoffLimitPerIndex != nil {
		setDefault(&s.BackoffLimit, math.MaxInt32)
	}
	setDefault(&s.BackoffLimit, 6)
	if len(j.Labels) == 0 && s.Template.Labels != nil {
		j.Labels = copyMap(s.Template.Labels)
	}
	setDefault(&s.CompletionMode, batchv1.NonIndexedCompletion)
	setDefault(&s.Suspend, false)
	if s.PodFailurePolicy != nil {
		setDefault(&s.PodReplacementPolicy, batchv1.Failed)
	}
	setDefault(&s.PodReplacementPolicy, batchv1.TerminatingOrFailed)
	setDefault(&s.ManualSelector, false)
	defaultJobSpec(s)
}

// defaultJobSpec are the defaults that a CronJob's template gets too.
func defaultJobSpec(s *batchv1.JobSpec) {
	if s.PodFailurePolicy != nil {
		for i := range s.PodFailurePolicy.Rules {
			for j := range s.PodFailurePolicy.Rules[i].OnPodConditions {
				setZero(&s.PodFailurePolicy.Rules[i].OnPodConditions[j].Status, corev1.ConditionTrue)
			}
		}
	}
	defaultPodSpec(&s.Template.Spec)
}

func defaultCronJob(c *batchv1.CronJob) {
	setZero(&c.Spec.ConcurrencyPolicy, batchv1.AllowConcurrent)
	setDefault(&c.Spec.Suspend, false)
	setDefault(&c.Spec.SuccessfulJobsHistoryLimit, 3)
	setDefault(&c.Spec.FailedJobsHistoryLimit, 1)
	defaultJobSpec(&c.Spec.JobTemplate.Spec)
}
