package manifests

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func amounts(kv ...string) corev1.ResourceList {
	l := corev1.ResourceList{}
	for i := 0; i < len(kv); i += 2 {
		l[corev1.ResourceName(kv[i])] = resource.MustParse(kv[i+1])
	}
	return l
}

func withRequests(kv ...string) corev1.Container {
	return corev1.Container{Resources: corev1.ResourceRequirements{Requests: amounts(kv...)}}
}

func sidecar(kv ...string) corev1.Container {
	c := withRequests(kv...)
	c.RestartPolicy = ptr(corev1.ContainerRestartPolicyAlways)
	return c
}

func TestPodRequests(t *testing.T) {
	for _, tc := range []struct {
		name string
		spec corev1.PodSpec
		cpu  string
	}{
		{"none", corev1.PodSpec{Containers: []corev1.Container{{}}}, "0"},
		{"sum", corev1.PodSpec{Containers: []corev1.Container{withRequests("cpu", "1"), withRequests("cpu", "500m")}}, "1500m"},
		{"init below", corev1.PodSpec{InitContainers: []corev1.Container{withRequests("cpu", "1")}, Containers: []corev1.Container{withRequests("cpu", "2")}}, "2"},
		{"init above", corev1.PodSpec{InitContainers: []corev1.Container{withRequests("cpu", "3")}, Containers: []corev1.Container{withRequests("cpu", "2")}}, "3"},
		{"sidecar", corev1.PodSpec{InitContainers: []corev1.Container{sidecar("cpu", "1")}, Containers: []corev1.Container{withRequests("cpu", "2")}}, "3"},
		{"init beside sidecar", corev1.PodSpec{InitContainers: []corev1.Container{sidecar("cpu", "1"), withRequests("cpu", "4")}, Containers: []corev1.Container{withRequests("cpu", "2")}}, "5"},
		{"init before sidecar", corev1.PodSpec{InitContainers: []corev1.Container{withRequests("cpu", "4"), sidecar("cpu", "1")}, Containers: []corev1.Container{withRequests("cpu", "2")}}, "4"},
		{"overhead", corev1.PodSpec{Containers: []corev1.Container{withRequests("cpu", "1")}, Overhead: amounts("cpu", "10m")}, "1010m"},
		{"pod level", corev1.PodSpec{Containers: []corev1.Container{withRequests("cpu", "1")}, Resources: &corev1.ResourceRequirements{Requests: amounts("cpu", "2")}}, "2"},
	} {
		before := tc.spec.DeepCopy()
		got := PodRequests(&corev1.Pod{Spec: tc.spec})
		if q, want := got[corev1.ResourceCPU], resource.MustParse(tc.cpu); q.Cmp(want) != 0 {
			t.Errorf("%s: %s, want %s", tc.name, q.String(), tc.cpu)
		}
		if PodRequests(&corev1.Pod{Spec: *before}) == nil || tc.spec.String() != before.String() {
			t.Errorf("%s: the pod was changed", tc.name)
		}
	}
}

func TestQOSClass(t *testing.T) {
	both := func(req, lim corev1.ResourceList) corev1.Container {
		return corev1.Container{Resources: corev1.ResourceRequirements{Requests: req, Limits: lim}}
	}
	full := amounts("cpu", "1", "memory", "1Gi")
	for _, tc := range []struct {
		want corev1.PodQOSClass
		cs   []corev1.Container
	}{
		{corev1.PodQOSBestEffort, []corev1.Container{{}}},
		{corev1.PodQOSBestEffort, []corev1.Container{both(amounts("ephemeral-storage", "1Gi"), nil)}},
		{corev1.PodQOSGuaranteed, []corev1.Container{both(full, full)}},
		{corev1.PodQOSBurstable, []corev1.Container{both(full, full), {}}},
		{corev1.PodQOSBurstable, []corev1.Container{both(amounts("cpu", "500m", "memory", "1Gi"), full)}},
		{corev1.PodQOSBurstable, []corev1.Container{both(amounts("cpu", "1"), nil)}},
	} {
		if got := QOSClass(&corev1.Pod{Spec: corev1.PodSpec{Containers: tc.cs}}); got != tc.want {
			t.Errorf("%v: %s, want %s", tc.cs, got, tc.want)
		}
	}
}

func TestIsWasmImage(t *testing.T) {
	for image, want := range map[string]bool{
		"file:///srv/app.wasm": true, "file:///srv/app": false, "file:///a@b.wasm": true, "app.wasm": true, "reg/app.wasm:1.0": true,
		"reg:5000/app:v1.wasm": true, "reg/app.wasm@sha256:00": true, "nginx": false, "reg.wasm:5000/app": false, "wasm": false, "": false,
	} {
		if IsWasmImage(image) != want {
			t.Errorf("%s: %v", image, !want)
		}
	}
}

func TestSysctlNames(t *testing.T) {
	p := problems{}
	p.sysctls(field.NewPath("sysctls"), []corev1.Sysctl{
		{Name: "kernel.shmmax"}, {Name: "net/ipv4/ip_unprivileged_port_start"}, {Name: "safe-and-unsafe"},
		{Name: ""}, {Name: "foo-"}, {Name: "bar.."}, {Name: "kernel.shmmax"},
	})
	want := []string{"FieldValueRequired sysctls[3].name", "FieldValueInvalid sysctls[4].name", "FieldValueInvalid sysctls[5].name", "FieldValueDuplicate sysctls[6].name"}
	got := []string{}
	for _, e := range p.list {
		got = append(got, string(e.Type)+" "+e.Field)
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
