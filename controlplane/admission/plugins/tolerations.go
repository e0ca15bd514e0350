package plugins

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"

	"github.com/dunlin-project/dunlin/controlplane/admission"
)

// DefaultTolerationSeconds says how long a pod that does not say it itself
// stays on a node that is not ready or unreachable.
type DefaultTolerationSeconds struct{ notReady, unreachable int64 }

// NewDefaultTolerationSeconds takes both times in seconds; nil is 300 for
// not-ready and 0 for unreachable.
func NewDefaultTolerationSeconds(notReady, unreachable *int64) DefaultTolerationSeconds {
	p := DefaultTolerationSeconds{notReady: 300, unreachable: 0}
	if notReady != nil {
		p.notReady = *notReady
	}
	if unreachable != nil {
		p.unreachable = *unreachable
	}
	return p
}

// Name implements admission.Plugin.
func (DefaultTolerationSeconds) Name() string { return "DefaultTolerationSeconds" }

// Admit implements admission.Plugin.
func (p DefaultTolerationSeconds) Admit(_ context.Context, a *admission.Attributes) error {
	pod, ok := newPod(a)
	if !ok {
		if pod, ok = newTolerations(a); !ok {
			return nil
		}
	}
	for _, d := range []struct {
		taint   string
		seconds int64
	}{{corev1.TaintNodeNotReady, p.notReady}, {corev1.TaintNodeUnreachable, p.unreachable}} {
		if toleratesNoExecute(pod.Spec.Tolerations, d.taint) {
			continue
		}
		seconds := d.seconds
		pod.Spec.Tolerations = append(pod.Spec.Tolerations, corev1.Toleration{
			Key: d.taint, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &seconds,
		})
	}
	return nil
}

// newTolerations is the pod whose tolerations an update replaces: what was
// added at first may not be missing from the new list.
func newTolerations(a *admission.Attributes) (*corev1.Pod, bool) {
	pod, ok := a.Object.(*corev1.Pod)
	old, had := a.Old.(*corev1.Pod)
	return pod, ok && had && a.Operation == admission.Update && a.Subresource == "" &&
		!apiequality.Semantic.DeepEqual(pod.Spec.Tolerations, old.Spec.Tolerations)
}

func toleratesNoExecute(list []corev1.Toleration, key string) bool {
	for i := range list {
		t := &list[i]
		if (t.Key == key || t.Key == "") && (t.Effect == corev1.TaintEffectNoExecute || t.Effect == "") {
			return true
		}
	}
	return false
}

// Validate implements admission.Plugin.
func (DefaultTolerationSeconds) Validate(context.Context, *admission.Attributes) error { return nil }
