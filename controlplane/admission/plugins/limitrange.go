package plugins

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"

	"github.com/dunlin-project/dunlin/controlplane/admission"
)

// LimitRanger gives containers without requests and limits the defaults of
// the namespace's LimitRanges, and refuses pods outside of their bounds.
type LimitRanger struct{}

const limitRangerAnnotation = "kubernetes.io/limit-ranger"

// Name implements admission.Plugin.
func (LimitRanger) Name() string { return "LimitRanger" }

func (LimitRanger) ranges(a *admission.Attributes) ([]*corev1.LimitRange, error) {
	l, err := lister(a)
	if err != nil {
		return nil, err
	}
	list, err := l.List(schema.GroupKind{Kind: "LimitRange"}, a.Namespace, labels.Everything(), fields.Everything())
	if err != nil {
		return nil, err
	}
	var out []*corev1.LimitRange
	for _, obj := range list {
		if lr, ok := obj.(*corev1.LimitRange); ok {
			out = append(out, lr)
		}
	}
	return out, nil
}

// Admit implements admission.Plugin.
func (p LimitRanger) Admit(_ context.Context, a *admission.Attributes) error {
	pod, ok := newPod(a)
	if !ok {
		return nil
	}
	list, err := p.ranges(a)
	if err != nil {
		return err
	}
	for _, lr := range list {
		requests, limits := corev1.ResourceList{}, corev1.ResourceList{}
		for i := range lr.Spec.Limits {
			if item := &lr.Spec.Limits[i]; item.Type == corev1.LimitTypeContainer {
				maps.Copy(requests, item.DefaultRequest)
				maps.Copy(limits, item.Default)
			}
		}
		var done []string
		for i := range pod.Spec.Containers {
			done = append(done, fill(&pod.Spec.Containers[i], "container", requests, limits)...)
		}
		for i := range pod.Spec.InitContainers {
			done = append(done, fill(&pod.Spec.InitContainers[i], "init container", requests, limits)...)
		}
		if len(done) > 0 {
			if pod.Annotations == nil {
				pod.Annotations = map[string]string{}
			}
			pod.Annotations[limitRangerAnnotation] = "LimitRanger plugin set: " + strings.Join(done, "; ")
		}
	}
	return nil
}

// fill sets what a container does not, and says what it set.
func fill(c *corev1.Container, kind string, requests, limits corev1.ResourceList) []string {
	set := func(into *corev1.ResourceList, from corev1.ResourceList) []string {
		var names []string
		for _, name := range slices.Sorted(maps.Keys(from)) {
			if _, have := (*into)[name]; have {
				continue
			}
			if *into == nil {
				*into = corev1.ResourceList{}
			}
			(*into)[name] = from[name].DeepCopy()
			names = append(names, string(name))
		}
		return names
	}
	var done []string
	setLimits := set(&c.Resources.Limits, limits)
	if names := set(&c.Resources.Requests, requests); len(names) > 0 {
		done = append(done, fmt.Sprintf("%s request for %s %s", strings.Join(names, ", "), kind, c.Name))
	}
	if len(setLimits) > 0 {
		done = append(done, fmt.Sprintf("%s limit for %s %s", strings.Join(setLimits, ", "), kind, c.Name))
	}
	return done
}

// Validate implements admission.Plugin.
func (p LimitRanger) Validate(_ context.Context, a *admission.Attributes) error {
	if claim, ok := a.Object.(*corev1.PersistentVolumeClaim); ok && a.Subresource == "" {
		return p.claim(a, claim)
	}
	pod, ok := a.Object.(*corev1.Pod)
	resize := a.Operation == admission.Update && a.Subresource == "resize"
	if create := a.Operation == admission.Create && a.Subresource == ""; !ok || (!create && !resize) {
		return nil
	}
	list, err := p.ranges(a)
	if err != nil {
		return err
	}
	for _, lr := range list {
		var errs []error
		for i := range lr.Spec.Limits {
			item := &lr.Spec.Limits[i]
			switch item.Type {
			case corev1.LimitTypeContainer:
				for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
					for j := range containers {
						errs = append(errs, within(item, containers[j].Resources.Requests, containers[j].Resources.Limits)...)
					}
				}
			case corev1.LimitTypePod:
				errs = append(errs, within(item, podTotal(pod, requestsOf), podTotal(pod, limitsOf))...)
			}
		}
		if err := utilerrors.NewAggregate(errs); err != nil {
			return forbidden(a, "%w", err)
		}
	}
	return nil
}

// within checks requests and limits against one item's bounds.
func within(item *corev1.LimitRangeItem, requests, limits corev1.ResourceList) []error {
	var errs []error
	add := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(item.Min)) {
		add(atLeast(item.Type, name, item.Min[name], requests, limits))
	}
	for _, name := range slices.Sorted(maps.Keys(item.Max)) {
		add(atMost(item.Type, name, item.Max[name], requests, limits))
	}
	for _, name := range slices.Sorted(maps.Keys(item.MaxLimitRequestRatio)) {
		add(ratio(item.Type, name, item.MaxLimitRequestRatio[name], requests, limits))
	}
	return errs
}

func atLeast(t corev1.LimitType, name corev1.ResourceName, bound resource.Quantity, requests, limits corev1.ResourceList) error {
	request, ok := requests[name]
	limit, limited := limits[name]
	prefix := fmt.Sprintf("minimum %s usage per %s is %s", name, t, bound.String())
	switch {
	case !ok:
		return errors.New(prefix + ".  No request is specified")
	case request.Cmp(bound) < 0:
		return errors.New(prefix + ", but request is " + request.String())
	case limited && limit.Cmp(bound) < 0:
		return errors.New(prefix + ", but limit is " + limit.String())
	}
	return nil
}

func atMost(t corev1.LimitType, name corev1.ResourceName, bound resource.Quantity, requests, limits corev1.ResourceList) error {
	request, requested := requests[name]
	limit, ok := limits[name]
	prefix := fmt.Sprintf("maximum %s usage per %s is %s", name, t, bound.String())
	switch {
	case !ok:
		return errors.New(prefix + ".  No limit is specified")
	case limit.Cmp(bound) > 0:
		return errors.New(prefix + ", but limit is " + limit.String())
	case requested && request.Cmp(bound) > 0:
		return errors.New(prefix + ", but request is " + request.String())
	}
	return nil
}

func ratio(t corev1.LimitType, name corev1.ResourceName, bound resource.Quantity, requests, limits corev1.ResourceList) error {
	request, limit := requests[name], limits[name]
	prefix := fmt.Sprintf("%s max limit to request ratio per %s is %s", name, t, bound.String())
	switch {
	case request.IsZero():
		return errors.New(prefix + ", but no request is specified or request is 0")
	case limit.IsZero():
		return errors.New(prefix + ", but no limit is specified or limit is 0")
	}
	if got := limit.AsApproximateFloat64() / request.AsApproximateFloat64(); got > bound.AsApproximateFloat64() {
		return fmt.Errorf("%s, but provided ratio is %f", prefix, got)
	}
	return nil
}

// claim compares a claim's size with the namespace's bounds.
func (p LimitRanger) claim(a *admission.Attributes, c *corev1.PersistentVolumeClaim) error {
	list, err := p.ranges(a)
	if err != nil {
		return err
	}
	const storage = corev1.ResourceStorage
	size := c.Spec.Resources.Requests[storage]
	if old, ok := a.Old.(*corev1.PersistentVolumeClaim); ok && size.Cmp(old.Spec.Resources.Requests[storage]) == 0 {
		return nil // a limit that came later does not hold up what is here
	}
	for _, lr := range list {
		for i := range lr.Spec.Limits {
			l := &lr.Spec.Limits[i]
			if l.Type != corev1.LimitTypePersistentVolumeClaim {
				continue
			}
			if least, ok := l.Min[storage]; ok && size.Cmp(least) < 0 {
				return forbidden(a, "minimum storage usage per PersistentVolumeClaim is %s, but request is %s", least.String(), size.String())
			}
			if most, ok := l.Max[storage]; ok && size.Cmp(most) > 0 {
				return forbidden(a, "maximum storage usage per PersistentVolumeClaim is %s, but request is %s", most.String(), size.String())
			}
		}
	}
	return nil
}
