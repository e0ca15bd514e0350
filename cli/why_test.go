package cli

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestWhyPod(t *testing.T) {
	t0 := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	since := metav1.NewTime(t0)
	pod := func(edit func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", CreationTimestamp: since}, Spec: corev1.PodSpec{NodeName: "pi"}}
		edit(p)
		return p
	}
	cond := func(typ corev1.PodConditionType, status corev1.ConditionStatus, reason, message string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: typ, Status: status, Reason: reason, Message: message, LastTransitionTime: since})
		}
	}
	unbound := func(message string) *corev1.Pod {
		return pod(func(p *corev1.Pod) {
			p.Spec.NodeName = ""
			cond(corev1.PodScheduled, corev1.ConditionFalse, "Unschedulable", message)(p)
		})
	}
	waiting := func(reason, message string) *corev1.Pod {
		return pod(func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", RestartCount: 2,
				State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}},
				LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 7, Reason: "Error", Message: "no database\nmore"}}}}
		})
	}
	silent := pod(cond(corev1.PodReady, corev1.ConditionFalse, "NodeUnreachable", "Node pi does not renew its lease"))
	if w, ok := whyPod(silent, false); !ok || !strings.Contains(w.text(t0), "its node pi is out of reach") || !strings.Contains(w.next, "dunlin node declare-dead pi") {
		t.Errorf("a pod that is waited for: %+v", w)
	}
	for name, f := range map[string]struct {
		pod          *corev1.Pod
		reason, next string
	}{
		"serves":      {pod(cond(corev1.PodReady, corev1.ConditionTrue, "", "")), "", ""},
		"done":        {pod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }), "", ""},
		"terminating": {pod(func(p *corev1.Pod) { p.DeletionTimestamp = &since }), "", ""},
		"failed": {pod(func(p *corev1.Pod) {
			p.Status.Phase, p.Status.Reason, p.Status.Message = corev1.PodFailed, "OutOfcpu", "too much"
		}), "OutOfcpu: too much", "does not start again"},
		"lost": {pod(cond(corev1.DisruptionTarget, corev1.ConditionTrue, "NodeUnreachable", "")), "node pi is out of reach", "describe node pi"},
		"lost, and stops": {pod(func(p *corev1.Pod) {
			p.Annotations = map[string]string{"dunlin.dev/stop-deadline": "20s"}
			cond(corev1.DisruptionTarget, corev1.ConditionTrue, "NodeUnreachable", "")(p)
		}), "node pi is out of reach", "stops there by itself after 20s without contact"},
		"not looked at": {pod(func(p *corev1.Pod) { p.Spec.NodeName = "" }), "has not looked", "leader"},
		"too big":       {unbound("0/1 nodes are available: 1 Insufficient cpu (needs 64, most free 2)."), "needs 64, most free 2", "ask for less"},
		"selector":      {unbound("1 node(s) didn't match Pod's node affinity/selector."), "didn't match", "labels"},
		"gated": {pod(func(p *corev1.Pod) {
			p.Spec.NodeName = ""
			cond(corev1.PodScheduled, corev1.ConditionFalse, corev1.PodReasonSchedulingGated, "gated")(p)
		}), "gated", "schedulingGates"},
		"crash loop": {waiting("CrashLoopBackOff", "back-off 20s restarting failed container=c pod=x"), "ended with exit code 7 (Error): no database, 3 times so far; back-off 20s before", "logs p -c c --previous"},
		"no image":   {waiting("ImagePullBackOff", "not here"), "ImagePullBackOff: not here", "'dunlin import ARCHIVE' there gives node pi the image"},
		"being made": {pod(func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}}}
			cond(corev1.PodReady, corev1.ConditionFalse, "ContainersNotReady", "containers with unready status: [c]")(p)
		}), "container c is not started yet", "how far that is"},
		"small limit":  {waiting("OOMKilled", "the container's memory limit is too small to load the module"), "too small", "raise resources.limits.memory of container"},
		"no config":    {waiting("CreateContainerConfigError", `configmap "x" not found`), `configmap "x" not found`, "create what is missing"},
		"not reported": {pod(func(*corev1.Pod) {}), "node pi has not reported", "delete pod p --force"},
		"just placed":  {pod(func(p *corev1.Pod) { p.CreationTimestamp = metav1.Now() }), "node pi has not reported", "wait a moment"},
		"not ready":    {pod(cond(corev1.PodReady, corev1.ConditionFalse, "ContainersNotReady", "containers with unready status: [c]")), "it is not Ready: containers", "dunlin logs"},
		"not ready, probed": {pod(func(p *corev1.Pod) {
			cond(corev1.PodReady, corev1.ConditionFalse, "ContainersNotReady", "containers with unready status: [c]")(p)
			p.Spec.Containers = []corev1.Container{{Name: "c", ReadinessProbe: &corev1.Probe{}}}
		}), "it is not Ready: containers", "readiness probe"},
		"the disk is full": {unbound("0/1 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/disk-pressure: }."), "disk-pressure", "free room"},
	} {
		t.Run(name, func(t *testing.T) {
			w, ok := whyPod(f.pod, false)
			if ok != (f.reason != "") || !strings.Contains(w.reason, f.reason) || !strings.Contains(w.next, f.next) {
				t.Fatalf("%v %+v", ok, w)
			}
			if strings.Contains(w.reason, "\n") {
				t.Fatalf("more than a line: %q", w.reason)
			}
		})
	}
	if got := (why{"x", t0, ""}).text(t0.Add(5 * time.Minute)); got != "x (for 5m)" {
		t.Fatal(got)
	}
	if got := (why{reason: "x"}).text(t0); got != "x" {
		t.Fatal(got)
	}
}
