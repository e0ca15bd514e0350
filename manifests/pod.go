package manifests

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// PodRequests is what a pod asks of a node: the sum of its containers and
// restartable init containers, or the largest moment of its init sequence if
// that is more, plus overhead (KEP-753). Pod-level resources, where set,
// stand in for the containers. "pods" is not in it.
func PodRequests(pod *corev1.Pod) corev1.ResourceList {
	spec := &pod.Spec
	sum := corev1.ResourceList{}
	for i := range spec.Containers {
		addResources(sum, spec.Containers[i].Resources.Requests)
	}
	// sidecars accumulates restartable init containers started so far; an
	// ordinary init container runs beside those that precede it.
	sidecars, peak := corev1.ResourceList{}, corev1.ResourceList{}
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		moment := corev1.ResourceList{}
		if IsRestartableInit(c) {
			addResources(sum, c.Resources.Requests)
			addResources(sidecars, c.Resources.Requests)
			addResources(moment, sidecars)
		} else {
			addResources(moment, sidecars)
			addResources(moment, c.Resources.Requests)
		}
		maxResources(peak, moment)
	}
	maxResources(sum, peak)
	if spec.Resources != nil {
		for name, q := range spec.Resources.Requests {
			sum[name] = q.DeepCopy()
		}
	}
	addResources(sum, spec.Overhead)
	return sum
}

// ApplyLabelKeys writes matchLabelKeys and mismatchLabelKeys of a new pod's
// affinity terms and spread constraints into their label selectors, with the
// values that the pod's own labels have (KEP-3633, KEP-3243).
func ApplyLabelKeys(pod *corev1.Pod) {
	terms := func(required []corev1.PodAffinityTerm, preferred []corev1.WeightedPodAffinityTerm) {
		for i := range required {
			addLabelKeys(required[i].LabelSelector, pod.Labels, required[i].MatchLabelKeys, required[i].MismatchLabelKeys)
		}
		for i := range preferred {
			t := &preferred[i].PodAffinityTerm
			addLabelKeys(t.LabelSelector, pod.Labels, t.MatchLabelKeys, t.MismatchLabelKeys)
		}
	}
	if a := pod.Spec.Affinity; a != nil && a.PodAffinity != nil {
		terms(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution, a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	if a := pod.Spec.Affinity; a != nil && a.PodAntiAffinity != nil {
		terms(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution, a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	for i := range pod.Spec.TopologySpreadConstraints {
		c := &pod.Spec.TopologySpreadConstraints[i]
		addLabelKeys(c.LabelSelector, pod.Labels, c.MatchLabelKeys, nil)
	}
}

func addLabelKeys(s *metav1.LabelSelector, labels map[string]string, match, mismatch []string) {
	if s == nil {
		return // selects nothing, whatever the keys
	}
	add := func(keys []string, op metav1.LabelSelectorOperator) {
		for _, k := range keys {
			if v, ok := labels[k]; ok {
				s.MatchExpressions = append(s.MatchExpressions, metav1.LabelSelectorRequirement{Key: k, Operator: op, Values: []string{v}})
			}
		}
	}
	add(match, metav1.LabelSelectorOpIn)
	add(mismatch, metav1.LabelSelectorOpNotIn)
}

// IsRestartableInit says whether an init container is a sidecar: it keeps
// running beside the main containers.
func IsRestartableInit(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

func addResources(sum, add corev1.ResourceList) {
	for name, q := range add {
		v := sum[name].DeepCopy()
		v.Add(q)
		sum[name] = v
	}
}

func maxResources(sum, other corev1.ResourceList) {
	for name, q := range other {
		if v, ok := sum[name]; !ok || q.Cmp(v) > 0 {
			sum[name] = q.DeepCopy()
		}
	}
}

// QOSClass computes a pod's quality of service from the cpu and memory of
// all its containers: Guaranteed when every one has limits equal to its
// requests, BestEffort when none has either, Burstable otherwise.
func QOSClass(pod *corev1.Pod) corev1.PodQOSClass {
	if r := pod.Spec.Resources; r != nil && (countsForQOS(r.Requests) || countsForQOS(r.Limits)) {
		return qosOf(r.Requests, r.Limits, guaranteed(r.Limits))
	}
	requests, limits, all := corev1.ResourceList{}, corev1.ResourceList{}, true
	each := func(cs []corev1.Container) {
		for i := range cs {
			addQOS(requests, cs[i].Resources.Requests)
			addQOS(limits, cs[i].Resources.Limits)
			all = all && guaranteed(cs[i].Resources.Limits)
		}
	}
	each(pod.Spec.Containers)
	each(pod.Spec.InitContainers)
	return qosOf(requests, limits, all)
}

func qosOf(requests, limits corev1.ResourceList, all bool) corev1.PodQOSClass {
	if !countsForQOS(requests) && !countsForQOS(limits) {
		return corev1.PodQOSBestEffort
	}
	if !all {
		return corev1.PodQOSBurstable
	}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		r, l := requests[name], limits[name]
		if r.Cmp(l) != 0 {
			return corev1.PodQOSBurstable
		}
	}
	return corev1.PodQOSGuaranteed
}

func guaranteed(limits corev1.ResourceList) bool {
	cpu, mem := limits[corev1.ResourceCPU], limits[corev1.ResourceMemory]
	return cpu.Sign() > 0 && mem.Sign() > 0
}

func countsForQOS(l corev1.ResourceList) bool {
	cpu, mem := l[corev1.ResourceCPU], l[corev1.ResourceMemory]
	return cpu.Sign() > 0 || mem.Sign() > 0
}

func addQOS(sum, add corev1.ResourceList) {
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		if q, ok := add[name]; ok && q.Sign() > 0 {
			v := sum[name].DeepCopy()
			v.Add(q)
			sum[name] = v
		}
	}
}

// IsWasmImage says whether an image reference is a Wasm module by its form:
// a file://….wasm path, or a name or tag that ends in ".wasm".
func IsWasmImage(image string) bool {
	if strings.HasPrefix(image, "file://") {
		return strings.HasSuffix(image, ".wasm")
	}
	image, _, _ = strings.Cut(image, "@")
	if strings.HasSuffix(image, ".wasm") {
		return true
	}
	if colon := strings.LastIndexByte(image, ':'); colon > strings.LastIndexByte(image, '/') {
		return strings.HasSuffix(image[:colon], ".wasm")
	}
	return false
}

// IsWasmPod says whether a pod is of the Wasm runtime: its class says so, or
// it has no class yet and all its images are Wasm modules by their form.
func IsWasmPod(s *corev1.PodSpec) bool {
	if s.RuntimeClassName != nil && *s.RuntimeClassName != "" {
		return *s.RuntimeClassName == RuntimeClassWasm
	}
	if len(s.Containers) == 0 {
		return false
	}
	for _, cs := range [][]corev1.Container{s.InitContainers, s.Containers} {
		for i := range cs {
			if !IsWasmImage(cs[i].Image) {
				return false
			}
		}
	}
	return true
}
