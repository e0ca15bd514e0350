package plugins

import (
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/admission"
)

func TestNamespaceLifecycle(t *testing.T) {
	terminating := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "gone"}, Status: corev1.NamespaceStatus{Phase: corev1.NamespaceTerminating}}
	read := (&objects{}).add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "d"}}, terminating)
	in := func(ns string) *corev1.ConfigMap {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "c"}}
	}
	namespace := func(name string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	}
	for _, c := range []struct {
		name   string
		a      *admission.Attributes
		reason metav1.StatusReason
		text   string
	}{
		{"create", create(in("d"), read), "", ""},
		{"create in a missing one", create(in("x"), read), metav1.StatusReasonNotFound, `namespaces "x" not found`},
		{"update in a missing one", request(admission.Update, in("x"), in("x"), read), metav1.StatusReasonNotFound, `namespaces "x" not found`},
		{"create in a terminating one", create(in("gone"), read), metav1.StatusReasonForbidden, "unable to create new content in namespace gone because it is being terminated"},
		{"update in a terminating one", request(admission.Update, in("gone"), in("gone"), read), "", ""},
		{"delete in a terminating one", request(admission.Delete, nil, in("gone"), read), "", ""},
		{"delete default", request(admission.Delete, nil, namespace("default"), read), metav1.StatusReasonForbidden, "this namespace may not be deleted"},
		{"delete kube-system", request(admission.Delete, nil, namespace("kube-system"), read), metav1.StatusReasonForbidden, "may not be deleted"},
		{"delete another", request(admission.Delete, nil, namespace("d"), read), "", ""},
		{"create a cluster object", create(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}, read), "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			refused(t, run(t, NamespaceLifecycle{}, c.a), c.reason, c.text)
		})
	}
	err := run(t, NamespaceLifecycle{}, create(in("gone"), read))
	if !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		t.Errorf("no cause: %v", err)
	}
}

func TestServiceAccountDefaults(t *testing.T) {
	sa := account("default")
	sa.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "pull"}}
	read := (&objects{}).add(sa)
	pod := newTestPod("p", "a", "b")
	pod.Spec.InitContainers = []corev1.Container{{Name: "i"}}
	pod.Spec.Containers[1].VolumeMounts = []corev1.VolumeMount{{Name: "mine", MountPath: tokenMountPath}}
	if err := run(t, ServiceAccount{}, create(pod, read)); err != nil {
		t.Fatal(err)
	}
	if pod.Spec.ServiceAccountName != "default" || pod.Spec.DeprecatedServiceAccount != "default" {
		t.Errorf("account %q, %q", pod.Spec.ServiceAccountName, pod.Spec.DeprecatedServiceAccount)
	}
	if !reflect.DeepEqual(pod.Spec.ImagePullSecrets, sa.ImagePullSecrets) {
		t.Errorf("pull secrets %v", pod.Spec.ImagePullSecrets)
	}
	if len(pod.Spec.Volumes) != 1 || !strings.HasPrefix(pod.Spec.Volumes[0].Name, "kube-api-access-") {
		t.Fatalf("volumes %v", pod.Spec.Volumes)
	}
	sources := pod.Spec.Volumes[0].Projected.Sources
	if len(sources) != 3 || sources[0].ServiceAccountToken.Path != "token" || *sources[0].ServiceAccountToken.ExpirationSeconds != 3607 ||
		sources[1].ConfigMap.Name != "kube-root-ca.crt" || sources[2].DownwardAPI.Items[0].Path != "namespace" || *pod.Spec.Volumes[0].Projected.DefaultMode != 0o644 {
		t.Errorf("sources %+v", sources)
	}
	for _, c := range []corev1.Container{pod.Spec.InitContainers[0], pod.Spec.Containers[0]} {
		if len(c.VolumeMounts) != 1 || c.VolumeMounts[0].MountPath != tokenMountPath || !c.VolumeMounts[0].ReadOnly || c.VolumeMounts[0].Name != pod.Spec.Volumes[0].Name {
			t.Errorf("%s mounts %v", c.Name, c.VolumeMounts)
		}
	}
	if len(pod.Spec.Containers[1].VolumeMounts) != 1 || pod.Spec.Containers[1].VolumeMounts[0].Name != "mine" {
		t.Errorf("a mount at the path was not left alone: %v", pod.Spec.Containers[1].VolumeMounts)
	}
	// Idempotent: what a copied manifest brings along is used again.
	again := pod.DeepCopy()
	if err := run(t, ServiceAccount{}, create(again, read)); err != nil || !reflect.DeepEqual(again.Spec, pod.Spec) {
		t.Errorf("second pass changed the pod: %v", err)
	}
	// Replicas share their spec.
	other := newTestPod("q", "a", "b")
	other.Spec.InitContainers = []corev1.Container{{Name: "i"}}
	other.Spec.Containers[1].VolumeMounts = []corev1.VolumeMount{{Name: "mine", MountPath: tokenMountPath}}
	if err := run(t, ServiceAccount{}, create(other, read)); err != nil || !reflect.DeepEqual(other.Spec, pod.Spec) {
		t.Errorf("two replicas differ: %v", err)
	}
}

func TestServiceAccountAutomount(t *testing.T) {
	for _, c := range []struct {
		pod, account *bool
		want         bool
	}{
		{nil, nil, true}, {nil, ptr(false), false}, {nil, ptr(true), true},
		{ptr(true), ptr(false), true}, {ptr(false), ptr(true), false}, {ptr(false), nil, false},
	} {
		sa := account("default")
		sa.AutomountServiceAccountToken = c.account
		pod := newTestPod("p", "a")
		pod.Spec.AutomountServiceAccountToken = c.pod
		if err := run(t, ServiceAccount{}, create(pod, (&objects{}).add(sa))); err != nil {
			t.Fatal(err)
		}
		if got := len(pod.Spec.Volumes) == 1; got != c.want {
			t.Errorf("pod %v, account %v: mounted %v", c.pod, c.account, got)
		}
	}
}

func TestServiceAccountMissing(t *testing.T) {
	pod := newTestPod("p", "a")
	pod.Spec.ServiceAccountName = "robot"
	err := run(t, ServiceAccount{}, create(pod, &objects{}))
	refused(t, err, metav1.StatusReasonForbidden, `pods "p" is forbidden: error looking up service account d/robot: serviceaccount "robot" not found`)

	// Our controllers have no user and retry by themselves.
	a := create(newTestPod("p", "a"), &objects{})
	a.User = ""
	refused(t, run(t, ServiceAccount{}, a), metav1.StatusReasonForbidden, "it is created shortly after its namespace; retry")
}

func TestServiceAccountWaitsForTheDefaultOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		read := &lateReader{objects: objects{}, sa: account("default"), at: time.Now().Add(450 * time.Millisecond)}
		pod := newTestPod("p", "a")
		a := create(pod, &objects{})
		a.Read = read
		start := time.Now()
		if err := run(t, ServiceAccount{}, a); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != 500*time.Millisecond {
			t.Errorf("waited %s", d)
		}
		start = time.Now()
		err := run(t, ServiceAccount{}, create(newTestPod("q", "a"), &objects{}))
		refused(t, err, metav1.StatusReasonForbidden, "not found")
		if d := time.Since(start); d != 900*time.Millisecond {
			t.Errorf("gave up after %s", d)
		}
	})
}

// lateReader has the account from some time on.
type lateReader struct {
	objects
	sa *corev1.ServiceAccount
	at time.Time
}

func (r *lateReader) Get(gk schema.GroupKind, namespace, name string) (runtime.Object, error) {
	if !time.Now().Before(r.at) && len(r.list) == 0 {
		r.add(r.sa)
	}
	return r.objects.Get(gk, namespace, name)
}

func TestMirrorPods(t *testing.T) {
	mirror := func(change func(*corev1.Pod)) *corev1.Pod {
		p := newTestPod("p", "a")
		p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		change(p)
		return p
	}
	for _, c := range []struct {
		name string
		pod  *corev1.Pod
		text string
	}{
		{"plain", mirror(func(*corev1.Pod) {}), ""},
		{"account", mirror(func(p *corev1.Pod) { p.Spec.ServiceAccountName = "x" }), "a mirror pod may not reference service accounts"},
		{"secret", mirror(func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{}}}}
		}), "a mirror pod may not reference secrets"},
		{"token", mirror(func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{VolumeSource: corev1.VolumeSource{Projected: tokenSource()}}}
		}), "may not use ServiceAccountToken"},
	} {
		before := c.pod.DeepCopy()
		refused(t, run(t, ServiceAccount{}, create(c.pod, &objects{})), metav1.StatusReasonForbidden, c.text)
		if !reflect.DeepEqual(before, c.pod) {
			t.Errorf("%s: the pod was changed", c.name)
		}
	}
}

func TestDefaultTolerations(t *testing.T) {
	seconds := func(pod *corev1.Pod) map[string]int64 {
		m := map[string]int64{}
		for _, tol := range pod.Spec.Tolerations {
			if tol.TolerationSeconds != nil {
				m[tol.Key] = *tol.TolerationSeconds
			}
		}
		return m
	}
	notReady, unreachable := corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable
	for _, c := range []struct {
		name   string
		have   []corev1.Toleration
		plugin DefaultTolerationSeconds
		want   map[string]int64
	}{
		{"none", nil, NewDefaultTolerationSeconds(nil, nil), map[string]int64{notReady: 300, unreachable: 0}},
		{"configured", nil, NewDefaultTolerationSeconds(ptr[int64](10), ptr[int64](300)), map[string]int64{notReady: 10, unreachable: 300}},
		{"own", []corev1.Toleration{{Key: unreachable, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr[int64](5)}}, NewDefaultTolerationSeconds(nil, nil), map[string]int64{notReady: 300, unreachable: 5}},
		{"everything", []corev1.Toleration{{Operator: corev1.TolerationOpExists}}, NewDefaultTolerationSeconds(nil, nil), map[string]int64{}},
		{"other effect", []corev1.Toleration{{Key: notReady, Effect: corev1.TaintEffectNoSchedule}}, NewDefaultTolerationSeconds(nil, nil), map[string]int64{notReady: 300, unreachable: 0}},
	} {
		pod := newTestPod("p", "a")
		pod.Spec.Tolerations = c.have
		if err := run(t, c.plugin, create(pod, nil)); err != nil {
			t.Fatal(err)
		}
		if got := seconds(pod); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
	// An update that replaces the list keeps them; one that leaves it adds none.
	plugin := NewDefaultTolerationSeconds(nil, nil)
	old := newTestPod("p", "a")
	update := func(pod *corev1.Pod) *admission.Attributes {
		a := create(pod, nil)
		a.Operation, a.Old = admission.Update, old
		return a
	}
	replaced := newTestPod("p", "a")
	replaced.Spec.Tolerations = []corev1.Toleration{{Key: "mine", Operator: corev1.TolerationOpExists}}
	if err := run(t, plugin, update(replaced)); err != nil {
		t.Fatal(err)
	}
	if len(replaced.Spec.Tolerations) != 3 {
		t.Errorf("replaced: %v", replaced.Spec.Tolerations)
	}
	if same := newTestPod("p", "a"); run(t, plugin, update(same)) != nil || len(same.Spec.Tolerations) != 0 {
		t.Errorf("unchanged: %v", same.Spec.Tolerations)
	}
}

func class(name string, value int32, global bool) *schedulingv1.PriorityClass {
	return &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value, GlobalDefault: global}
}

func TestPriority(t *testing.T) {
	never := class("never", 7, false)
	never.PreemptionPolicy = ptr(corev1.PreemptNever)
	read := (&objects{}).add(class("high", 1000, false), never)
	withDefault := (&objects{}).add(class("base", 50, true), class("later", 60, true))
	for _, c := range []struct {
		name       string
		read       *objects
		class      string
		value      *int32
		policy     *corev1.PreemptionPolicy
		wantClass  string
		wantValue  int32
		wantPolicy corev1.PreemptionPolicy
		text       string
	}{
		{name: "nothing", read: read, wantPolicy: corev1.PreemptLowerPriority},
		{name: "a class", read: read, class: "high", wantClass: "high", wantValue: 1000, wantPolicy: corev1.PreemptLowerPriority},
		{name: "never preempts", read: read, class: "never", wantClass: "never", wantValue: 7, wantPolicy: corev1.PreemptNever},
		{name: "the same number given", read: read, class: "high", value: ptr[int32](1000), wantClass: "high", wantValue: 1000, wantPolicy: corev1.PreemptLowerPriority},
		{name: "another number given", read: read, class: "high", value: ptr[int32](5), text: "the integer value of priority (5) must not be provided in pod spec; priority admission controller computed 1000"},
		{name: "another policy given", read: read, class: "never", policy: ptr(corev1.PreemptLowerPriority), text: "the string value of PreemptionPolicy (PreemptLowerPriority) must not be provided"},
		{name: "missing", read: read, class: "nope", text: "no PriorityClass with name nope was found"},
		{name: "global default, the lowest", read: withDefault, wantClass: "base", wantValue: 50, wantPolicy: corev1.PreemptLowerPriority},
		{name: "system class without its object", read: read, class: "system-node-critical", wantClass: "system-node-critical", wantValue: 2000001000, wantPolicy: corev1.PreemptLowerPriority},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := newTestPod("p", "a")
			pod.Spec.PriorityClassName, pod.Spec.Priority, pod.Spec.PreemptionPolicy = c.class, c.value, c.policy
			err := run(t, Priority{}, create(pod, c.read))
			refused(t, err, metav1.StatusReasonForbidden, c.text)
			if c.text != "" {
				return
			}
			if pod.Spec.PriorityClassName != c.wantClass || *pod.Spec.Priority != c.wantValue || *pod.Spec.PreemptionPolicy != c.wantPolicy {
				t.Errorf("got %q %d %s", pod.Spec.PriorityClassName, *pod.Spec.Priority, *pod.Spec.PreemptionPolicy)
			}
		})
	}
}

func TestPriorityIsKeptOnUpdate(t *testing.T) {
	old := newTestPod("p", "a")
	old.Spec.Priority, old.Spec.PreemptionPolicy = ptr[int32](7), ptr(corev1.PreemptNever)
	pod := newTestPod("p", "a")
	if err := run(t, Priority{}, request(admission.Update, pod, old, &objects{})); err != nil {
		t.Fatal(err)
	}
	if *pod.Spec.Priority != 7 || *pod.Spec.PreemptionPolicy != corev1.PreemptNever {
		t.Errorf("%v", pod.Spec)
	}
}

func TestOneGlobalDefault(t *testing.T) {
	base := class("base", 1, true)
	read := (&objects{}).add(base)
	refused(t, run(t, Priority{}, create(class("more", 2, true), read)), metav1.StatusReasonForbidden, "PriorityClass base is already marked as default. Only one default can exist")
	refused(t, run(t, Priority{}, create(class("more", 2, false), read)), "", "")
	refused(t, run(t, Priority{}, request(admission.Update, base, base, read)), "", "")
}

func TestRuntimeClassChoice(t *testing.T) {
	const digest = "registry.example/app@sha256:aa"
	read := (&objects{}).add(
		&nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "wasm"}, Handler: "wazero"},
		&nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "oci"}, Handler: "crun"},
	)
	plugin := RuntimeClass{WasmArtifact: func(image string) bool { return image == digest }}
	for _, c := range []struct {
		name     string
		class    *string
		images   []string
		want     string
		warnings int
		text     string
	}{
		{"OCI", nil, []string{"nginx:1.27"}, "oci", 0, ""},
		{"file", nil, []string{"file:///srv/app.wasm"}, "wasm", 0, ""},
		{"name", nil, []string{"registry.example/app.wasm:1"}, "wasm", 0, ""},
		{"digest that is known", nil, []string{digest}, "wasm", 0, ""},
		{"digest that is not", nil, []string{"registry.example/app@sha256:bb"}, "oci", 0, ""},
		{"mixed", nil, []string{"file:///srv/app.wasm", "nginx"}, "oci", 1, ""},
		{"given", ptr("wasm"), []string{"nginx"}, "wasm", 0, ""},
		{"unknown", ptr("gvisor"), []string{"nginx"}, "", 0, `pod rejected: RuntimeClass "gvisor" not found (there are oci, wasm; 'dunlin get runtimeclasses' shows all)`},
		{"no containers", nil, nil, "oci", 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := newTestPod("p", c.images...)
			pod.Spec.RuntimeClassName = c.class
			a := create(pod, read)
			warnings := 0
			a.Warn = func(string) { warnings++ }
			err := run(t, plugin, a)
			refused(t, err, metav1.StatusReasonForbidden, c.text)
			if c.text != "" {
				return
			}
			if pod.Spec.RuntimeClassName == nil || *pod.Spec.RuntimeClassName != c.want || warnings != c.warnings {
				t.Errorf("class %v, %d warnings", pod.Spec.RuntimeClassName, warnings)
			}
		})
	}
	// The built-in classes work also when somebody deleted their objects.
	pod := newTestPod("p", "nginx")
	if err := run(t, plugin, create(pod, &objects{})); err != nil || *pod.Spec.RuntimeClassName != "oci" {
		t.Errorf("%v", err)
	}
}

func TestRuntimeClassMerges(t *testing.T) {
	heavy := &nodev1.RuntimeClass{
		ObjectMeta: metav1.ObjectMeta{Name: "heavy"}, Handler: "x",
		Overhead: &nodev1.Overhead{PodFixed: amounts("cpu", "100m")},
		Scheduling: &nodev1.Scheduling{
			NodeSelector: map[string]string{"a": "1"}, Tolerations: []corev1.Toleration{{Key: "t", Operator: corev1.TolerationOpExists}},
		},
	}
	read := (&objects{}).add(heavy, &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "oci"}})
	with := func(change func(*corev1.Pod)) *corev1.Pod {
		p := newTestPod("p", "a")
		p.Spec.RuntimeClassName = ptr("heavy")
		change(p)
		return p
	}
	pod := with(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"b": "2"} })
	if err := run(t, RuntimeClass{}, create(pod, read)); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(pod.Spec.NodeSelector, map[string]string{"a": "1", "b": "2"}) || len(pod.Spec.Tolerations) != 1 || pod.Spec.Overhead.Cpu().String() != "100m" {
		t.Errorf("%+v", pod.Spec)
	}
	again := pod.DeepCopy()
	if err := run(t, RuntimeClass{}, create(again, read)); err != nil || !reflect.DeepEqual(again.Spec, pod.Spec) {
		t.Errorf("a second pass changed it: %v", err)
	}
	pod.Spec.NodeSelector["a"] = "changed"
	pod.Spec.Overhead["cpu"] = amounts("cpu", "9")["cpu"]
	if heavy.Scheduling.NodeSelector["a"] != "1" || heavy.Overhead.PodFixed.Cpu().String() != "100m" {
		t.Error("the class's own object was changed")
	}
	refused(t, run(t, RuntimeClass{}, create(with(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"a": "2"} }), read)),
		metav1.StatusReasonForbidden, "conflict: runtimeClass.scheduling.nodeSelector[a] = 1; pod.spec.nodeSelector[a] = 2")
	refused(t, run(t, RuntimeClass{}, create(with(func(p *corev1.Pod) { p.Spec.Overhead = amounts("cpu", "1") }), read)),
		metav1.StatusReasonForbidden, "Pod's Overhead doesn't match")
	plain := newTestPod("p", "a")
	plain.Spec.Overhead = amounts("cpu", "1")
	refused(t, run(t, RuntimeClass{}, create(plain, read)), metav1.StatusReasonForbidden, "Pod Overhead set without corresponding RuntimeClass")
}

func TestLimitRangeDefaults(t *testing.T) {
	read := (&objects{}).add(&corev1.LimitRange{ObjectMeta: inD("l"), Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{{
		Type: corev1.LimitTypeContainer, DefaultRequest: amounts("cpu", "100m", "memory", "64Mi"), Default: amounts("memory", "128Mi"),
	}}}})
	pod := newTestPod("p", "a", "b")
	pod.Spec.InitContainers = []corev1.Container{{Name: "i"}}
	pod.Spec.Containers[1].Resources.Requests = amounts("cpu", "1")
	if err := run(t, LimitRanger{}, create(pod, read)); err != nil {
		t.Fatal(err)
	}
	c := pod.Spec.Containers
	if c[0].Resources.Requests.Cpu().String() != "100m" || c[0].Resources.Limits.Memory().String() != "128Mi" || c[1].Resources.Requests.Cpu().String() != "1" || c[1].Resources.Requests.Memory().String() != "64Mi" {
		t.Errorf("%+v", c)
	}
	want := "LimitRanger plugin set: cpu, memory request for container c0; memory limit for container c0; memory request for container c1; memory limit for container c1; cpu, memory request for init container i; memory limit for init container i"
	if got := pod.Annotations[limitRangerAnnotation]; got != want {
		t.Errorf("annotation\n got %s\nwant %s", got, want)
	}
}

func TestLimitRangeBounds(t *testing.T) {
	item := func(i corev1.LimitRangeItem) *objects {
		return (&objects{}).add(&corev1.LimitRange{ObjectMeta: inD("l"), Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{i}}})
	}
	container := corev1.LimitTypeContainer
	for _, c := range []struct {
		name             string
		read             *objects
		requests, limits corev1.ResourceList
		text             string
	}{
		{"fits", item(corev1.LimitRangeItem{Type: container, Min: amounts("cpu", "10m"), Max: amounts("cpu", "1")}), amounts("cpu", "10m"), amounts("cpu", "1"), ""},
		{"no request", item(corev1.LimitRangeItem{Type: container, Min: amounts("cpu", "10m")}), nil, nil, "minimum cpu usage per Container is 10m.  No request is specified"},
		{"request too small", item(corev1.LimitRangeItem{Type: container, Min: amounts("cpu", "10m")}), amounts("cpu", "9m"), nil, "minimum cpu usage per Container is 10m, but request is 9m"},
		{"limit too small", item(corev1.LimitRangeItem{Type: container, Min: amounts("cpu", "10m")}), amounts("cpu", "10m"), amounts("cpu", "5m"), "minimum cpu usage per Container is 10m, but limit is 5m"},
		{"no limit", item(corev1.LimitRangeItem{Type: container, Max: amounts("memory", "1Gi")}), nil, nil, "maximum memory usage per Container is 1Gi.  No limit is specified"},
		{"limit too large", item(corev1.LimitRangeItem{Type: container, Max: amounts("memory", "1Gi")}), nil, amounts("memory", "2Gi"), "maximum memory usage per Container is 1Gi, but limit is 2Gi"},
		{"request too large", item(corev1.LimitRangeItem{Type: container, Max: amounts("cpu", "1")}), amounts("cpu", "2"), amounts("cpu", "1"), "maximum cpu usage per Container is 1, but request is 2"},
		{"ratio", item(corev1.LimitRangeItem{Type: container, MaxLimitRequestRatio: amounts("cpu", "2")}), amounts("cpu", "1"), amounts("cpu", "3"), "cpu max limit to request ratio per Container is 2, but provided ratio is 3.000000"},
		{"ratio without a limit", item(corev1.LimitRangeItem{Type: container, MaxLimitRequestRatio: amounts("cpu", "2")}), amounts("cpu", "1"), nil, "but no limit is specified or limit is 0"},
		{"pod total", item(corev1.LimitRangeItem{Type: corev1.LimitTypePod, Max: amounts("cpu", "1500m")}), amounts("cpu", "1"), amounts("cpu", "1"), "maximum cpu usage per Pod is 1500m, but limit is 2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := newTestPod("p", "a", "b")
			for i := range pod.Spec.Containers {
				pod.Spec.Containers[i].Resources = corev1.ResourceRequirements{Requests: c.requests, Limits: c.limits}
			}
			refused(t, run(t, LimitRanger{}, create(pod, c.read)), metav1.StatusReasonForbidden, c.text)
		})
	}
}

// TestDefaultChain: a bare pod comes out complete.
func TestDefaultChain(t *testing.T) {
	read := (&objects{}).add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "d"}}, account("default"))
	pod := newTestPod("p", "file:///a.wasm")
	a := create(pod, read)
	chain := Default(Config{})
	if err := chain.Admit(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	if err := chain.Validate(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	if *pod.Spec.RuntimeClassName != "wasm" || pod.Spec.ServiceAccountName != "default" || len(pod.Spec.Tolerations) != 2 || *pod.Spec.Priority != 0 {
		t.Errorf("%+v", pod.Spec)
	}
	names := map[string]bool{}
	for _, p := range chain {
		if names[p.Name()] {
			t.Errorf("%s twice", p.Name())
		}
		names[p.Name()] = true
	}
}
