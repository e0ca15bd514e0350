package plugins

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
)

// Priority turns a pod's class into its number, and keeps the global default
// class single.
type Priority struct{}

var priorityKind = schema.GroupKind{Group: schedulingv1.GroupName, Kind: "PriorityClass"}

// systemClasses are known even if their objects are missing.
var systemClasses = map[string]int32{"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}

// Name implements admission.Plugin.
func (Priority) Name() string { return "Priority" }

// Admit implements admission.Plugin.
func (p Priority) Admit(_ context.Context, a *admission.Attributes) error {
	if a.Operation == admission.Update && a.Subresource == "" {
		pod, ok1 := a.Object.(*corev1.Pod)
		old, ok2 := a.Old.(*corev1.Pod)
		if ok1 && ok2 { // a client that does not know the fields keeps them
			if pod.Spec.Priority == nil {
				pod.Spec.Priority = old.Spec.Priority
			}
			if pod.Spec.PreemptionPolicy == nil {
				pod.Spec.PreemptionPolicy = old.Spec.PreemptionPolicy
			}
		}
		return nil
	}
	pod, ok := newPod(a)
	if !ok {
		return nil
	}
	class, value, policy, err := p.resolve(a, pod.Spec.PriorityClassName)
	if err != nil {
		return err
	}
	if pod.Spec.Priority != nil && *pod.Spec.Priority != value {
		return forbidden(a, "the integer value of priority (%d) must not be provided in pod spec; priority admission controller computed %d from the given PriorityClass name", *pod.Spec.Priority, value)
	}
	if pod.Spec.PreemptionPolicy != nil && *pod.Spec.PreemptionPolicy != policy {
		return forbidden(a, "the string value of PreemptionPolicy (%s) must not be provided in pod spec; priority admission controller computed %s from the given PriorityClass name", *pod.Spec.PreemptionPolicy, policy)
	}
	pod.Spec.PriorityClassName, pod.Spec.Priority, pod.Spec.PreemptionPolicy = class, &value, &policy
	return nil
}

// resolve finds the class, its value and its preemption policy; without a
// name they are those of the global default class, or nothing, 0 and
// PreemptLowerPriority.
func (p Priority) resolve(a *admission.Attributes, name string) (string, int32, corev1.PreemptionPolicy, error) {
	if name == "" {
		class, err := p.global(a, "")
		if err != nil || class == nil {
			return "", 0, corev1.PreemptLowerPriority, err
		}
		return class.Name, class.Value, policyOf(class), nil
	}
	obj, err := a.Read.Get(priorityKind, "", name)
	if class, ok := obj.(*schedulingv1.PriorityClass); ok && err == nil {
		return name, class.Value, policyOf(class), nil
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return "", 0, "", err
	}
	if value, ok := systemClasses[name]; ok {
		return name, value, corev1.PreemptLowerPriority, nil
	}
	return "", 0, "", forbidden(a, "no PriorityClass with name %s was found", name)
}

func policyOf(class *schedulingv1.PriorityClass) corev1.PreemptionPolicy {
	if class.PreemptionPolicy == nil {
		return corev1.PreemptLowerPriority
	}
	return *class.PreemptionPolicy
}

// global finds the default class other than one; of several (two servers may
// each have admitted one) the lowest counts.
func (Priority) global(a *admission.Attributes, other string) (*schedulingv1.PriorityClass, error) {
	l, err := lister(a)
	if err != nil {
		return nil, err
	}
	list, err := l.List(priorityKind, "", labels.Everything(), fields.Everything())
	if err != nil {
		return nil, err
	}
	var found *schedulingv1.PriorityClass
	for _, obj := range list {
		class, ok := obj.(*schedulingv1.PriorityClass)
		if ok && class.GlobalDefault && class.Name != other && (found == nil || class.Value < found.Value) {
			found = class
		}
	}
	return found, nil
}

// Validate implements admission.Plugin.
func (p Priority) Validate(_ context.Context, a *admission.Attributes) error {
	class, ok := a.Object.(*schedulingv1.PriorityClass)
	if !ok || a.Operation == admission.Delete || a.Subresource != "" || !class.GlobalDefault {
		return nil
	}
	have, err := p.global(a, class.Name)
	if err != nil {
		return err
	}
	if have != nil {
		return forbidden(a, "PriorityClass %s is already marked as default. Only one default can exist", have.Name)
	}
	return nil
}
