package manifests

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

func ptr[T any](v T) *T { return &v }

// wasmPod is a valid, defaulted pod that sets only what is implemented.
func wasmPod(change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default"},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{{
				Name: "c", Image: "file:///srv/app.wasm", Args: []string{"-v"},
				Env:   []corev1.EnvVar{{Name: "A", Value: "b"}, {Name: "N", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}},
				Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}},
				Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{
					"cpu": resource.MustParse("100m"), "memory": resource.MustParse("32Mi")}},
				ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Port: intstrInt(8080)}}},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: ptr(false), ReadOnlyRootFilesystem: ptr(true),
					Capabilities:   &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
					SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
				},
				VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: "/v"}, {Name: "w", MountPath: "/w"}},
			}},
			Volumes: []corev1.Volume{{Name: "v"}, {Name: "w", VolumeSource: corev1.VolumeSource{
				ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "cm"}}}}},
		},
	}
	for _, f := range change {
		f(p)
	}
	Default(p)
	return p
}

func TestUnsupportedIsSilentOnWhatIsImplemented(t *testing.T) {
	for _, obj := range []runtime.Object{
		wasmPod(),
		wasmPod(func(p *corev1.Pod) {
			p.Spec.Volumes[0].EmptyDir = &corev1.EmptyDirVolumeSource{Medium: "Memory", SizeLimit: resource.NewQuantity(1<<20, resource.BinarySI)}
		}),
		&corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}, Selector: map[string]string{"a": "b"}, ClusterIP: "10.43.0.1"}},
		&corev1.ServiceAccount{TypeMeta: metav1.TypeMeta{Kind: "ServiceAccount", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{Name: "x"}},
		&corev1.ConfigMap{Data: map[string]string{"a": "b"}},
		&corev1.Node{Spec: corev1.NodeSpec{PodCIDR: "10.42.0.0/24", Taints: []corev1.Taint{{Key: "a"}}}},
	} {
		Default(obj)
		warnings, refused := Unsupported(obj)
		if len(warnings)+len(refused) > 0 {
			t.Errorf("%T: %q %v", obj, warnings, refused)
		}
	}
}

func TestUnsupportedNamesFields(t *testing.T) {
	first := func(f func(*corev1.Container)) func(*corev1.Pod) {
		return func(p *corev1.Pod) { f(&p.Spec.Containers[0]) }
	}
	for _, tc := range []struct {
		name   string
		change func(*corev1.Pod)
		path   string
		refuse bool
	}{
		{"hostPID", func(p *corev1.Pod) { p.Spec.HostPID = true }, "spec.hostPID", true},
		{"hostIPC", func(p *corev1.Pod) { p.Spec.HostIPC = true }, "spec.hostIPC", true},
		{"hostUsers", func(p *corev1.Pod) { p.Spec.HostUsers = ptr(false) }, "spec.hostUsers", true},
		{"share", func(p *corev1.Pod) { p.Spec.ShareProcessNamespace = ptr(true) }, "spec.shareProcessNamespace", true},
		{"windows", func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: "windows"} }, "spec.os.name", true},
		{"privileged", first(func(c *corev1.Container) { c.SecurityContext.Privileged = ptr(true) }), "spec.containers[0].securityContext.privileged", true},
		{"caps", first(func(c *corev1.Container) { c.SecurityContext.Capabilities.Add = []corev1.Capability{"NET_ADMIN"} }), "spec.containers[0].securityContext.capabilities.add", true},
		{"seccomp", first(func(c *corev1.Container) { c.SecurityContext.SeccompProfile.Type = corev1.SeccompProfileTypeUnconfined }), "spec.containers[0].securityContext.seccompProfile.type", true},
		{"selinux", func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{SELinuxOptions: &corev1.SELinuxOptions{Level: "s0"}}
		}, "spec.securityContext.seLinuxOptions", false},
		{"csi", func(p *corev1.Pod) {
			p.Spec.Volumes[0].VolumeSource = corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: "x"}}
		}, "spec.volumes[0].csi", true},
		{"exec", first(func(c *corev1.Container) {
			c.LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"x"}}}}
		}), "spec.containers[0].livenessProbe.exec", true},
		{"udp", first(func(c *corev1.Container) { c.Ports[0].Protocol = corev1.ProtocolUDP }), "spec.containers[0].ports[0].protocol", true},
		{"host address", first(func(c *corev1.Container) { c.Ports[0].HostPort, c.Ports[0].HostIP = 8080, "10.0.0.1" }), "spec.containers[0].ports[0].hostIP", true},
		{"aliases", func(p *corev1.Pod) { p.Spec.HostAliases = []corev1.HostAlias{{IP: "1.2.3.4"}} }, "spec.hostAliases", false},
		{"tty", first(func(c *corev1.Container) { c.TTY = true }), "spec.containers[0].tty", false},
		{"size on disk", func(p *corev1.Pod) {
			p.Spec.Volumes[0].EmptyDir = &corev1.EmptyDirVolumeSource{SizeLimit: resource.NewQuantity(1<<20, resource.BinarySI)}
		}, "spec.volumes[0].emptyDir.sizeLimit", false},
		{"storage limit", first(func(c *corev1.Container) { c.Resources.Limits["ephemeral-storage"] = resource.MustParse("1Gi") }), "spec.containers[0].resources.limits[ephemeral-storage]", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			warnings, refused := Unsupported(wasmPod(tc.change))
			if tc.refuse {
				if len(refused) != 1 || refused[0].Field != tc.path || len(warnings) != 0 {
					t.Fatalf("warnings %q, refused %v", warnings, refused)
				}
				return
			}
			if len(refused) != 0 || len(warnings) != 1 || !strings.HasPrefix(warnings[0], tc.path+": ") {
				t.Fatalf("warnings %q, refused %v", warnings, refused)
			}
		})
	}
}

// An OCI pod may do what only a Wasm guest cannot.
func TestUnsupportedProtocolOfAService(t *testing.T) {
	svc := &corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolSCTP}}}}
	warnings, refused := Unsupported(svc)
	if len(refused) > 0 || len(warnings) != 1 || !strings.Contains(warnings[0], "spec.ports[0].protocol") {
		t.Errorf("%q %v", warnings, refused)
	}
}

func TestUnsupportedOCI(t *testing.T) {
	p := wasmPod(func(p *corev1.Pod) {
		p.Spec.RuntimeClassName = ptr(RuntimeClassOCI)
		p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr(true)}
		p.Spec.Containers[0].LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"x"}}}}
	})
	if warnings, refused := Unsupported(p); len(warnings)+len(refused) > 0 {
		t.Fatal(warnings, refused)
	}
}
