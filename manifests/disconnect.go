package manifests

import (
	"cmp"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// What happens to a pod while its node cannot reach the servers is written in
// its annotations: on the node (AnnotationStopDeadline), in the cluster
// (AnnotationReplaceAfter), and when the node is back (AnnotationOnReturn). An
// absent one is the default of the pod's controller.

// Never is the value of AnnotationReplaceAfter for a pod that is waited for.
const Never = "never"

// OnReturn is which of a pod and its replacement is kept.
type OnReturn string

// Values of AnnotationOnReturn. The one that is kept is healthy: an original
// that is not ready goes, and a replacement is waited for.
const (
	KeepOriginal    OnReturn = "original"
	KeepReplacement OnReturn = "replacement"
	KeepBetter      OnReturn = "better" // as when a controller has too many pods
)

// MinStopDeadline is the shortest stop deadline: the renewals of a healthy
// node are two seconds apart, and some are lost.
const MinStopDeadline = 10 * time.Second

// maxWait bounds the durations, far from what overflows.
const maxWait = 10 * 365 * 24 * time.Hour

// StopDeadline is how long a pod may run without contact; 0 is for ever. An
// error is for people.
func StopDeadline(p *corev1.Pod) (time.Duration, error) {
	v, ok := p.Annotations[AnnotationStopDeadline]
	if !ok {
		return 0, nil
	}
	return parseStopDeadline(v)
}

func parseStopDeadline(v string) (time.Duration, error) {
	d, err := time.ParseDuration(v)
	if err != nil || d < MinStopDeadline || d > maxWait {
		return 0, disconnectError("must be a duration from 10s on, as 90s, 15m or 24h; without it the pod runs on for ever")
	}
	return d, nil
}

// ReplaceAfter is what a pod says of its replacement: after d, or never. set
// is false if it says nothing that can be understood.
func ReplaceAfter(p *corev1.Pod) (d time.Duration, never, set bool) {
	v, ok := p.Annotations[AnnotationReplaceAfter]
	if !ok {
		return 0, false, false
	}
	d, never, err := parseReplaceAfter(v)
	return d, never, err == nil
}

func parseReplaceAfter(v string) (d time.Duration, never bool, err error) {
	if v == Never {
		return 0, true, nil
	}
	d, err = time.ParseDuration(v)
	if err != nil || d < 0 || d > maxWait {
		return 0, false, disconnectError("must be a duration, as 0s, 90s or 15m, or never")
	}
	return d, false, nil
}

// Returns is which of a pod and its replacement is kept; def where the pod
// says nothing.
func Returns(p *corev1.Pod, def OnReturn) OnReturn {
	switch v := OnReturn(p.Annotations[AnnotationOnReturn]); v {
	case KeepOriginal, KeepReplacement, KeepBetter:
		return v
	}
	return cmp.Or(def, KeepOriginal)
}

type disconnectError string

// Error implements error.
func (e disconnectError) Error() string { return string(e) }

// disconnect checks the annotations of a pod or template.
func (p *problems) disconnect(at *field.Path, a map[string]string) {
	if v, ok := a[AnnotationStopDeadline]; ok {
		if _, err := parseStopDeadline(v); err != nil {
			p.invalid(at.Key(AnnotationStopDeadline), v, err.Error())
		}
	}
	if v, ok := a[AnnotationReplaceAfter]; ok {
		if _, _, err := parseReplaceAfter(v); err != nil {
			p.invalid(at.Key(AnnotationReplaceAfter), v, err.Error())
		}
	}
	if v, ok := a[AnnotationOnReturn]; ok {
		supported(p, at.Key(AnnotationOnReturn), OnReturn(v), KeepOriginal, KeepReplacement, KeepBetter)
	}
}

// disconnectSet checks what only some controllers can do.
func (p *problems) disconnectSet(template *field.Path, t *corev1.PodTemplateSpec, daemon bool) {
	at := template.Child("metadata", "annotations")
	_, replace := t.Annotations[AnnotationReplaceAfter]
	_, back := t.Annotations[AnnotationOnReturn]
	_, stops := t.Annotations[AnnotationStopDeadline]
	switch {
	case daemon && replace:
		p.forbidden(at.Key(AnnotationReplaceAfter), "a DaemonSet's pod belongs to its node and is not replaced elsewhere")
	case !daemon && replace && t.Annotations[AnnotationReplaceAfter] != Never && !stops:
		p.forbidden(at.Key(AnnotationReplaceAfter), "a StatefulSet's pod runs once only: it is replaced after it has surely stopped by itself ("+AnnotationStopDeadline+"), or when its node is declared dead ('dunlin node declare-dead')")
	}
	if back {
		p.forbidden(at.Key(AnnotationOnReturn), "pods of this kind have no replacement beside them")
	}
}
