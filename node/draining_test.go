package node

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
	"github.com/dunlin-project/dunlin/runtime/workload"
)

// A pod on its way out says how many connections are open and since when, by
// few writes; one that nobody is connected to says nothing.
func TestDrainingIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.onStop = func(workload.ID) time.Duration { return 40 * time.Second }
		ports := func(p *corev1.Pod) { p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}} }
		pod, quiet := wasmPod("a", ports), wasmPod("b")
		b.link.put("Pod", pod)
		b.link.put("Pod", quiet)
		b.start()
		defer b.stop()
		b.after(time.Second)
		b.net.connect(3)
		b.after(10 * time.Second)
		if c := drainingOf(b.want("uid-a", "Running+Ready")); c != nil {
			t.Fatalf("nothing ends: %+v", c)
		}
		b.link.put("Pod", deleted(pod, 60))
		b.link.put("Pod", deleted(quiet, 60))
		b.after(time.Second)
		st := b.want("uid-a", "Running")
		first := drainingOf(st)
		if first == nil || first.Status != corev1.ConditionTrue || first.Message != "3 of 3 connections are still open" {
			t.Fatalf("%+v", first)
		}
		b.net.connect(2)
		b.after(2 * time.Second)
		if c := drainingOf(b.want("uid-a", "Running")); c.Message != first.Message {
			t.Fatalf("told again within seconds: %+v", c)
		}
		b.after(6 * time.Second)
		if c := drainingOf(b.want("uid-a", "Running")); c.Message != "2 of 3 connections are still open" || !c.LastTransitionTime.Equal(&first.LastTransitionTime) {
			t.Fatalf("%+v, first %+v", c, first)
		}
		b.net.connect(0)
		b.after(3 * time.Second)
		if c := drainingOf(b.want("uid-a", "Running")); c.Status != corev1.ConditionFalse || c.Reason != "Drained" || c.Message != "all 3 connections have ended" {
			t.Fatalf("%+v", c)
		}
		if c := drainingOf(b.want("uid-b", "Running")); c != nil {
			t.Fatalf("a pod without ports: %+v", c)
		}
		b.net.connect(1)
		b.after(time.Minute)
		if !b.link.gone["uid-a"] || !b.link.gone["uid-b"] {
			t.Fatal("not gone")
		}
	})
}

func drainingOf(st corev1.PodStatus) *corev1.PodCondition {
	i := slices.IndexFunc(st.Conditions, func(c corev1.PodCondition) bool { return c.Type == manifests.ConditionDraining })
	if i < 0 {
		return nil
	}
	return &st.Conditions[i]
}
