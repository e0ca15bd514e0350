package plugins

import (
	"context"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
	"github.com/dunlin-project/dunlin/manifests"
)

// RuntimeClass chooses the class of a pod that names none, writes it into
// the pod so that nothing downstream guesses, and merges what the class says
// of overhead and scheduling. A pod without a class is OCI, except when all
// its images are Wasm modules.
type RuntimeClass struct {
	// WasmArtifact knows images by digest; may be nil.
	WasmArtifact func(image string) bool
}

var runtimeKind = schema.GroupKind{Group: nodev1.GroupName, Kind: "RuntimeClass"}

// Name implements admission.Plugin.
func (RuntimeClass) Name() string { return "RuntimeClass" }

// Admit implements admission.Plugin.
func (p RuntimeClass) Admit(_ context.Context, a *admission.Attributes) error {
	pod, ok := newPod(a)
	if !ok {
		return nil
	}
	class, err := p.class(a, pod)
	if err != nil || class == nil {
		return err
	}
	if class.Overhead != nil {
		if len(pod.Spec.Overhead) > 0 && !apiequality.Semantic.DeepEqual(class.Overhead.PodFixed, pod.Spec.Overhead) {
			return forbidden(a, "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead")
		}
		pod.Spec.Overhead = class.Overhead.PodFixed.DeepCopy()
	}
	if class.Scheduling != nil {
		return schedule(a, pod, class.Scheduling)
	}
	return nil
}

// class finds the pod's class, choosing one if it names none. Nil means the
// built-in one, whose object is missing.
func (p RuntimeClass) class(a *admission.Attributes, pod *corev1.Pod) (*nodev1.RuntimeClass, error) {
	chosen := pod.Spec.RuntimeClassName == nil
	if chosen {
		name := p.choose(a, &pod.Spec)
		pod.Spec.RuntimeClassName = &name
	}
	name := *pod.Spec.RuntimeClassName
	obj, err := a.Read.Get(runtimeKind, "", name)
	if class, ok := obj.(*nodev1.RuntimeClass); ok && err == nil {
		return class, nil
	}
	switch {
	case err != nil && !apierrors.IsNotFound(err):
		return nil, err
	case chosen:
		return nil, nil // documented: the built-in class
	}
	return nil, forbidden(a, "pod rejected: RuntimeClass %q not found%s", name, p.known(a))
}

// known names the built-in classes that there are, for whoever named another.
func (p RuntimeClass) known(a *admission.Attributes) string {
	var names []string
	for _, name := range []string{manifests.RuntimeClassOCI, manifests.RuntimeClassWasm} {
		if _, err := a.Read.Get(runtimeKind, "", name); err == nil {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return " (there are " + strings.Join(names, ", ") + "; 'dunlin get runtimeclasses' shows all)"
}

// choose is the rule for a pod without a class.
func (p RuntimeClass) choose(a *admission.Attributes, spec *corev1.PodSpec) string {
	var wasm, other []string
	for _, list := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range list {
			image := list[i].Image
			if manifests.IsWasmImage(image) || (p.WasmArtifact != nil && p.WasmArtifact(image)) {
				wasm = append(wasm, list[i].Name)
			} else {
				other = append(other, list[i].Name)
			}
		}
	}
	if len(wasm) > 0 && len(other) == 0 {
		return manifests.RuntimeClassWasm
	}
	if len(wasm) > 0 {
		a.Warn("spec.runtimeClassName: the images of " + strings.Join(wasm, ", ") + " look like Wasm modules and those of " +
			strings.Join(other, ", ") + " do not; the pod runs as " + manifests.RuntimeClassOCI + ", set runtimeClassName to choose")
	}
	return manifests.RuntimeClassOCI
}

// schedule merges the class's node selector and tolerations into the pod.
func schedule(a *admission.Attributes, pod *corev1.Pod, s *nodev1.Scheduling) error {
	for key, value := range s.NodeSelector {
		if have, ok := pod.Spec.NodeSelector[key]; ok && have != value {
			return forbidden(a, "conflict: runtimeClass.scheduling.nodeSelector[%s] = %s; pod.spec.nodeSelector[%s] = %s", key, value, key, have)
		}
		if pod.Spec.NodeSelector == nil {
			pod.Spec.NodeSelector = map[string]string{}
		}
		pod.Spec.NodeSelector[key] = value
	}
	for i := range s.Tolerations {
		same := func(t corev1.Toleration) bool { return apiequality.Semantic.DeepEqual(t, s.Tolerations[i]) }
		if !slices.ContainsFunc(pod.Spec.Tolerations, same) {
			pod.Spec.Tolerations = append(pod.Spec.Tolerations, *s.Tolerations[i].DeepCopy())
		}
	}
	return nil
}

// Validate implements admission.Plugin.
func (p RuntimeClass) Validate(_ context.Context, a *admission.Attributes) error {
	pod, ok := newPod(a)
	if !ok || pod.Spec.Overhead == nil {
		return nil
	}
	var want corev1.ResourceList
	if pod.Spec.RuntimeClassName != nil {
		obj, err := a.Read.Get(runtimeKind, "", *pod.Spec.RuntimeClassName)
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		if class, ok := obj.(*nodev1.RuntimeClass); ok && err == nil && class.Overhead != nil {
			want = class.Overhead.PodFixed
		}
	}
	if want == nil {
		return forbidden(a, "pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead")
	}
	if !apiequality.Semantic.DeepEqual(want, pod.Spec.Overhead) {
		return forbidden(a, "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead")
	}
	return nil
}
