package manifests

import (
	"fmt"
	"regexp"
	"strings"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Upstream's bounds of a Job: they cap how long the lists of indexes in its
// status can become.
const (
	maxIndexedParallelism   = 100_000
	manyCompletions         = 100_000
	maxParallelismOfMany    = 10_000
	maxFailedIndexesOfMany  = 10_000
	maxPolicyRules          = 20
	maxExitCodes            = 255
	maxSucceededIndexesText = 64 * 1024
	maxManagedBy            = 63
	cronJobNameMax          = 52
)

func indexed(s *batchv1.JobSpec) bool {
	return s.CompletionMode != nil && *s.CompletionMode == batchv1.IndexedCompletion
}

func (p *problems) job(j *batchv1.Job, create bool) {
	if create {
		p.generatedSelector(j)
	}
	p.jobSpec(specPath, &j.Spec)
	if j.Spec.Selector == nil {
		p.required(specPath.Child("selector"), "")
	} else {
		p.selector(specPath.Child("selector"), j.Spec.Selector)
	}
	if sel, err := metav1.LabelSelectorAsSelector(j.Spec.Selector); err == nil && !sel.Matches(labels.Set(j.Spec.Template.Labels)) {
		p.invalid(specPath.Child("template", "metadata", "labels"), j.Spec.Template.Labels, "`selector` does not match template `labels`")
	}
	if n := j.Spec.Completions; indexed(&j.Spec) && n != nil && *n > 0 {
		last := fmt.Sprintf("%s-%d", j.Name, *n-1)
		if len(validation.IsDNS1123Label(last)) > 0 {
			p.invalid(metadataPath.Child("name"), j.Name, "will not able to create pod with invalid DNS label: "+last)
		}
	}
}

// generatedSelector checks what GenerateJobSelector has made.
func (p *problems) generatedSelector(j *batchv1.Job) {
	if j.Spec.ManualSelector != nil && *j.Spec.ManualSelector || j.Spec.Selector == nil {
		return
	}
	if j.UID == "" {
		p.required(metadataPath.Child("uid"), "")
	}
	want := map[string]string{}
	at := specPath.Child("template", "metadata", "labels")
	for _, l := range []struct{ key, value string }{
		{"controller-uid", string(j.UID)}, {"job-name", j.Name},
		{batchv1.ControllerUidLabel, string(j.UID)}, {batchv1.JobNameLabel, j.Name},
	} {
		want[l.key] = l.value
		switch has, ok := j.Spec.Template.Labels[l.key]; {
		case !ok:
			p.required(at.Key(l.key), fmt.Sprintf("must be '%s'", l.value))
		case has != l.value:
			p.invalid(at.Key(l.key), j.Spec.Template.Labels, fmt.Sprintf("must be '%s'", l.value))
		}
	}
	if sel, err := metav1.LabelSelectorAsSelector(j.Spec.Selector); err == nil && !sel.Matches(labels.Set(want)) {
		p.invalid(specPath.Child("selector"), j.Spec.Selector, "`selector` not auto-generated")
	}
}

// GenerateJobSelector gives a new Job the labels and the selector by which
// its pods are told from all others, unless manualSelector is set. Name and
// uid are known.
func GenerateJobSelector(j *batchv1.Job) {
	if j.Spec.ManualSelector != nil && *j.Spec.ManualSelector {
		return
	}
	t := &j.Spec.Template
	if t.Labels == nil {
		t.Labels = map[string]string{}
	}
	for key, value := range map[string]string{
		"job-name": j.Name, batchv1.JobNameLabel: j.Name,
		"controller-uid": string(j.UID), batchv1.ControllerUidLabel: string(j.UID),
	} {
		if _, ok := t.Labels[key]; !ok { // one that is there and wrong is refused by validation
			t.Labels[key] = value
		}
	}
	if j.Spec.Selector == nil {
		j.Spec.Selector = &metav1.LabelSelector{}
	}
	if j.Spec.Selector.MatchLabels == nil {
		j.Spec.Selector.MatchLabels = map[string]string{}
	}
	if _, ok := j.Spec.Selector.MatchLabels[batchv1.ControllerUidLabel]; !ok {
		j.Spec.Selector.MatchLabels[batchv1.ControllerUidLabel] = string(j.UID)
	}
}

func (p *problems) jobSpec(at *field.Path, s *batchv1.JobSpec) {
	for _, n := range []struct {
		name string
		v    *int32
	}{
		{"parallelism", s.Parallelism}, {"completions", s.Completions}, {"backoffLimit", s.BackoffLimit},
		{"ttlSecondsAfterFinished", s.TTLSecondsAfterFinished}, {"backoffLimitPerIndex", s.BackoffLimitPerIndex},
		{"maxFailedIndexes", s.MaxFailedIndexes},
	} {
		if n.v != nil {
			p.nonNegative(at.Child(n.name), int64(*n.v))
		}
	}
	if s.ActiveDeadlineSeconds != nil {
		p.nonNegative(at.Child("activeDeadlineSeconds"), *s.ActiveDeadlineSeconds)
	}
	if s.MaxFailedIndexes != nil && s.BackoffLimitPerIndex == nil {
		p.required(at.Child("backoffLimitPerIndex"), "when maxFailedIndexes is specified")
	}
	if s.ManagedBy != nil {
		p.add(validation.IsDomainPrefixedPath(at.Child("managedBy"), *s.ManagedBy)...)
		if len(*s.ManagedBy) > maxManagedBy {
			p.add(field.TooLong(at.Child("managedBy"), "", maxManagedBy))
		}
	}
	p.completionMode(at, s)
	if s.PodFailurePolicy != nil {
		p.podFailurePolicy(at.Child("podFailurePolicy"), s)
	}
	if s.SuccessPolicy != nil {
		if !indexed(s) {
			p.invalid(at.Child("successPolicy"), *s.SuccessPolicy, "requires indexed completion mode")
		} else if s.Completions != nil { // required, and reported as missing
			p.successPolicy(at.Child("successPolicy"), s)
		}
	}
	if r := s.PodReplacementPolicy; r != nil {
		if s.PodFailurePolicy != nil {
			supported(p, at.Child("podReplacementPolicy"), *r, batchv1.Failed)
		} else {
			supported(p, at.Child("podReplacementPolicy"), *r, batchv1.Failed, batchv1.TerminatingOrFailed)
		}
	}
	p.podTemplate(at.Child("template"), &s.Template)
	restart := at.Child("template", "spec", "restartPolicy")
	switch r := s.Template.Spec.RestartPolicy; {
	case r == "" || r == corev1.RestartPolicyAlways:
		p.required(restart, fmt.Sprintf("valid values: %q, %q", corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever))
	case r != corev1.RestartPolicyOnFailure && r != corev1.RestartPolicyNever:
		p.add(field.NotSupported(restart, r, []corev1.RestartPolicy{corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever}))
	case s.PodFailurePolicy != nil && r != corev1.RestartPolicyNever:
		p.invalid(restart, r, fmt.Sprintf("only %q is supported when podFailurePolicy is specified", corev1.RestartPolicyNever))
	}
}

func (p *problems) completionMode(at *field.Path, s *batchv1.JobSpec) {
	if s.CompletionMode != nil {
		supported(p, at.Child("completionMode"), *s.CompletionMode, batchv1.NonIndexedCompletion, batchv1.IndexedCompletion)
	}
	if s.CompletionMode == nil || *s.CompletionMode == batchv1.NonIndexedCompletion {
		if s.BackoffLimitPerIndex != nil {
			p.invalid(at.Child("backoffLimitPerIndex"), *s.BackoffLimitPerIndex, "requires indexed completion mode")
		}
		if s.MaxFailedIndexes != nil {
			p.invalid(at.Child("maxFailedIndexes"), *s.MaxFailedIndexes, "requires indexed completion mode")
		}
	}
	if !indexed(s) {
		return
	}
	over := func(name string, v *int32, limit int32, detail string) {
		if v != nil && *v > limit {
			p.invalid(at.Child(name), *v, fmt.Sprintf("must be less than or equal to %d", limit)+detail)
		}
	}
	if s.Completions == nil {
		p.required(at.Child("completions"), "when completion mode is Indexed")
	}
	over("parallelism", s.Parallelism, maxIndexedParallelism, " when completion mode is Indexed")
	if s.Completions != nil && s.MaxFailedIndexes != nil && *s.MaxFailedIndexes > *s.Completions {
		p.invalid(at.Child("maxFailedIndexes"), *s.MaxFailedIndexes, "must be less than or equal to completions")
	}
	over("maxFailedIndexes", s.MaxFailedIndexes, maxIndexedParallelism, "")
	if s.Completions == nil || *s.Completions <= manyCompletions || s.BackoffLimitPerIndex == nil {
		return
	}
	if s.MaxFailedIndexes == nil {
		p.required(at.Child("maxFailedIndexes"), fmt.Sprintf("must be specified when completions is above %d", manyCompletions))
	}
	many := fmt.Sprintf(" when completions are above %d and used with backoff limit per index", manyCompletions)
	over("parallelism", s.Parallelism, maxParallelismOfMany, many)
	over("maxFailedIndexes", s.MaxFailedIndexes, maxFailedIndexesOfMany, many)
}

func (p *problems) jobUpdate(j, old *batchv1.Job) {
	s, o := &j.Spec, &old.Spec
	switch {
	case !indexed(s):
		p.immutable(specPath.Child("completions"), s.Completions, o.Completions)
	case s.Completions != nil && !equality.Semantic.DeepEqual(s.Completions, o.Completions) &&
		(s.Parallelism == nil || *s.Completions != *s.Parallelism):
		p.invalid(specPath.Child("completions"), s.Completions, "can only be modified in tandem with spec.parallelism")
	}
	p.immutable(specPath.Child("selector"), s.Selector, o.Selector)
	p.jobTemplateUpdate(j, old)
	p.immutable(specPath.Child("completionMode"), s.CompletionMode, o.CompletionMode)
	p.immutable(specPath.Child("podFailurePolicy"), s.PodFailurePolicy, o.PodFailurePolicy)
	p.immutable(specPath.Child("backoffLimitPerIndex"), s.BackoffLimitPerIndex, o.BackoffLimitPerIndex)
	p.immutable(specPath.Child("managedBy"), s.ManagedBy, o.ManagedBy)
	p.immutable(specPath.Child("successPolicy"), s.SuccessPolicy, o.SuccessPolicy)
	if !equality.Semantic.DeepEqual(j.Status, old.Status) {
		p.jobStatus(j, old)
	}
}

// jobTemplateUpdate: a template is fixed, except that the resources and where
// to run of a suspended Job without pods may change.
func (p *problems) jobTemplateUpdate(j, old *batchv1.Job) {
	now, was := &j.Spec.Template, old.Spec.Template.DeepCopy()
	suspended := old.Spec.Suspend != nil && *old.Spec.Suspend
	open := suspended && old.Status.Active == 0 && (old.Status.StartTime == nil || jobCondition(&old.Status, batchv1.JobSuspended))
	if !open {
		p.immutable(specPath.Child("template"), *now, *was)
		return
	}
	switch a, b := now.Spec.Affinity, was.Spec.Affinity; {
	case a == nil && b != nil:
		b.NodeAffinity = nil
		if *b == (corev1.Affinity{}) {
			was.Spec.Affinity = nil
		}
	case a != nil && b == nil:
		was.Spec.Affinity = &corev1.Affinity{NodeAffinity: a.NodeAffinity}
	case a != nil:
		b.NodeAffinity = a.NodeAffinity
	}
	was.Spec.NodeSelector, was.Spec.Tolerations, was.Spec.SchedulingGates = now.Spec.NodeSelector, now.Spec.Tolerations, now.Spec.SchedulingGates
	sameResources(now.Spec.Containers, was.Spec.Containers)
	sameResources(now.Spec.InitContainers, was.Spec.InitContainers)
	p.immutable(specPath.Child("template.spec"), now.Spec, was.Spec)
}

func sameResources(now, was []corev1.Container) {
	if len(now) != len(was) {
		return
	}
	for i := range now {
		if now[i].Name == was[i].Name {
			was[i].Resources = now[i].Resources
		}
	}
}

func (p *problems) cronJob(c *batchv1.CronJob, old *batchv1.CronJob) {
	s := &c.Spec
	if at := specPath.Child("schedule"); s.Schedule == "" {
		p.required(at, "")
	} else {
		if _, err := ParseSchedule(s.Schedule); err != nil {
			p.invalid(at, s.Schedule, err.Error())
		}
		if strings.Contains(s.Schedule, "TZ") {
			p.invalid(at, s.Schedule, "cannot use TZ or CRON_TZ in schedule, use timeZone field instead")
		}
	}
	if n := s.StartingDeadlineSeconds; n != nil {
		p.nonNegative(specPath.Child("startingDeadlineSeconds"), *n)
	}
	if old == nil || !equality.Semantic.DeepEqual(old.Spec.TimeZone, s.TimeZone) {
		p.timeZone(specPath.Child("timeZone"), s.TimeZone)
	}
	oneOf(p, specPath.Child("concurrencyPolicy"), s.ConcurrencyPolicy, batchv1.AllowConcurrent, batchv1.ForbidConcurrent, batchv1.ReplaceConcurrent)
	at := specPath.Child("jobTemplate", "spec")
	p.jobSpec(at, &s.JobTemplate.Spec)
	if sel := s.JobTemplate.Spec.Selector; sel != nil {
		p.invalid(at.Child("selector"), sel, "`selector` will be auto-generated")
	}
	if m := s.JobTemplate.Spec.ManualSelector; m != nil && *m {
		p.add(field.NotSupported(at.Child("manualSelector"), m, []string{"nil", "false"}))
	}
	for _, n := range []struct {
		name string
		v    *int32
	}{{"successfulJobsHistoryLimit", s.SuccessfulJobsHistoryLimit}, {"failedJobsHistoryLimit", s.FailedJobsHistoryLimit}} {
		if n.v != nil {
			p.nonNegative(specPath.Child(n.name), int64(*n.v))
		}
	}
	if old == nil && len(c.Name) > cronJobNameMax {
		p.invalid(metadataPath.Child("name"), c.Name, fmt.Sprintf("must be no more than %d characters", cronJobNameMax))
	}
}

// zonePart is what a component of a zone's name may look like, in the words
// of the zone database's own rules and with its older names allowed.
var zonePart = regexp.MustCompile(`^[A-Za-z._0-9+][A-Za-z.\-_0-9+]{0,13}$`)

func (p *problems) timeZone(at *field.Path, z *string) {
	if z == nil {
		return
	}
	if *z == "" {
		p.invalid(at, z, "timeZone must be nil or non-empty string")
		return
	}
	for _, part := range strings.Split(*z, "/") {
		if part == "." || part == ".." || !zonePart.MatchString(part) {
			p.invalid(at, z, "unknown time zone "+*z)
			return
		}
	}
	if strings.EqualFold(*z, "Local") {
		p.invalid(at, z, "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones")
	}
	if _, err := LoadZone(z); err != nil {
		p.invalid(at, z, err.Error())
	}
}
