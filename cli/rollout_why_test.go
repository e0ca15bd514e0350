package cli

import (
	"context"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/registry"
)

// TestRolloutStatusSaysWhy: while it waits it says what the pods wait for,
// and again what they waited for when it gives up.
func TestRolloutStatusSaysWhy(t *testing.T) {
	w := drainWorld(t)
	status := func(gk schema.GroupKind, name string, change func(runtime.Object)) {
		t.Helper()
		_, err := w.reg.Update(context.Background(), gk, "default", name, registry.Status, func(cur runtime.Object) (runtime.Object, error) {
			change(cur)
			return cur, nil
		}, registry.WriteOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	status(schema.GroupKind{Group: "apps", Kind: "Deployment"}, "web", func(o runtime.Object) {
		d := o.(*appsv1.Deployment)
		d.Status = appsv1.DeploymentStatus{ObservedGeneration: d.Generation, Replicas: 1, UpdatedReplicas: 1}
	})
	status(schema.GroupKind{Group: "apps", Kind: "DaemonSet"}, "daemon", func(o runtime.Object) {
		d := o.(*appsv1.DaemonSet)
		d.Status = appsv1.DaemonSetStatus{ObservedGeneration: d.Generation, DesiredNumberScheduled: 1, UpdatedNumberScheduled: 1}
	})
	for _, name := range []string{"web-1-a", "daemon-a"} {
		status(podKind, name, func(o runtime.Object) {
			p := o.(*corev1.Pod)
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}}
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{
				Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImageNeverPull", Message: "no module a.wasm here"}}}}
		})
	}
	for target, pod := range map[string]string{"deploy/web": "web-1-a", "ds/daemon": "daemon-a"} {
		code, out, errs := run("rollout", "status", target, "--timeout", "1s")
		want := "  pod " + pod + ": ErrImageNeverPull: no module a.wasm here\n    next: "
		if code != 1 || strings.Count(out, want) != 1 || !strings.Contains(out, "Waiting: 0 of 1 updated pods are available...\n"+want) {
			t.Errorf("%s: exit %d\n%s", target, code, out)
		}
		if !strings.Contains(errs, "is not rolled out yet: Waiting: 0 of 1") || !strings.Contains(errs, want) {
			t.Errorf("%s: %s", target, errs)
		}
	}
}

func TestPodReasons(t *testing.T) {
	pod := func(name, reason string) corev1.Pod {
		p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{NodeName: "n"}}
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		if reason != "" {
			p.Status.Conditions[0].Status = corev1.ConditionFalse
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}}
		}
		return p
	}
	got := podReasons([]corev1.Pod{pod("f", "E"), pod("a", ""), pod("b", "A"), pod("c", "B"), pod("d", "A"), pod("e", "C")})
	for _, want := range []string{"pod b and 1 like it: A\n", "pod c: B\n", "pod e: C\n", "  and 1 more\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if got := podReasons([]corev1.Pod{pod("a", "")}); got != "" {
		t.Errorf("%q", got)
	}
}
